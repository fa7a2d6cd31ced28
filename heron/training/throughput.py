"""How much of a device a step uses: model FLOPs utilisation, and memory."""

import copy
import re
import resource
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch

from heron.models.heterogeneous import Heterogeneous

MatmulPrecision = Literal["fp32", "tf32", "bf16", "fp16", "fp64"]

# Published peak rates in TFLOP/s: fp32 (no tensor cores), tf32, bf16 and, where it differs from
# bf16, fp16 (tensor cores). All are dense: where a data sheet has the rate with 2:4 sparsity only,
# half of that. None: the device has no such units. A pattern must match the whole name that PyTorch
# reports: devices of a similar name (A10G, A100X, GH200, L40, a MIG slice) have other rates.
#   A100, V100, T4, H200: NVIDIA A100, V100, T4 and H200 Tensor Core GPU datasheets.
#   H100: NVIDIA H100 Tensor Core GPU datasheet, the early one for PCIe, the later for SXM and NVL.
#   B200: NVIDIA Blackwell datasheet, one of the eight GPUs of an HGX B200.
#   L4, L40S, A10: NVIDIA L4, L40S and A10 datasheets.
_TERA_FLOPS: dict[str, tuple[float | None, ...]] = {
    r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe": (19.5, 156, 312),
    r"H100 PCIe": (51, 756 / 2, 1513 / 2),
    r"H100 NVL": (60, 835 / 2, 1671 / 2),
    r"H100 80GB HBM3": (67, 989 / 2, 1979 / 2),  # SXM5
    r"H200 NVL": (60, 835 / 2, 1671 / 2),
    r"H200": (67, 989 / 2, 1979 / 2),
    r"B200": (75, 2200 / 2, 4500 / 2),
    r"V100-SXM2-(16|32)GB": (15.7, None, None, 125),
    r"V100-PCIE-(16|32)GB": (14, None, None, 112),
    r"T4": (8.1, None, None, 65),
    r"L4": (30.3, 120 / 2, 242 / 2),
    r"L40S": (91.6, 183, 362.05),
    r"A10": (31.2, 62.5, 125),
}


def peak_flops(device: torch.device | str, precision: MatmulPrecision) -> float | None:
    """Returns the published dense peak of one device, FLOP/s, whatever its power cap, or None.

    The precision is that of matrix products; `tf32` is float32 where PyTorch may round the factors
    (`torch.backends.cuda.matmul.allow_tf32`, and by default cuDNN's convolutions). None is for a
    CPU, a device that the table lacks, and a precision that it has no units for. Raises ValueError
    for an unknown precision.
    """
    if precision not in get_args(MatmulPrecision):
        raise ValueError(
            f"precision must be {', '.join(get_args(MatmulPrecision))}, got {precision!r}"
        )
    device = torch.device(device)
    if device.type != "cuda":
        return None
    name = re.sub(r"^(NVIDIA|Tesla) ", "", torch.cuda.get_device_name(device))
    for pattern, rates in _TERA_FLOPS.items():
        if re.fullmatch(pattern, name):
            fp32, tf32, bf16, *fp16 = rates
            fp16 = fp16 or [bf16]
            rate = {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16[0]}.get(precision)
            return None if rate is None else rate * 1e12
    return None


def step_flops(forward: Callable[[], object]) -> int:
    """Returns the FLOPs of a training step: three times those of a forward.

    A backward is taken as two forwards (a product has the gradients of two factors; Chowdhery et
    al., 2022, "PaLM", appendix B). That is the model's arithmetic, not the hardware's: a second
    forward of the same rows, to save memory, does not count.

    Matrix products, convolutions and attention are counted, a multiplication and an addition as
    two; elementwise operations, normalisation, reductions, the optimiser, and kernels that PyTorch
    does not know (Triton's) are not. So `forward` should run the encoders and heads on a process's
    rows, but no loss that computes its own gradients. It is called once; its side effects (batch
    norm's averages, random numbers) stay unless it runs on a copy, which costs nothing on the meta
    device.
    """
    from torch.utils.flop_counter import FlopCounterMode  # here: it loads torch's compiler

    with FlopCounterMode(display=False) as counter:
        forward()
    return 3 * int(counter.get_total_flops())


def model_flops(model: Heterogeneous, shapes: Sequence[Sequence[int]], rows: int) -> int:
    """Returns `step_flops` of a model for a process's rows of a step, on the meta device.

    `shapes` are of a sample of each view as stored: [..., channels] or (tokens, vocabulary).
    """
    meta = copy.deepcopy(model).to("meta").eval()
    inputs = [
        torch.empty(rows, shape[0], dtype=torch.int32, device="meta")
        if len(shape) == 2
        else torch.empty(
            rows, *(shape[2:] + shape[:2] if len(shape) == 3 else shape), device="meta"
        )
        for shape in map(tuple, shapes)
    ]
    rng_keys = torch.empty(rows, dtype=torch.int64, device="meta")
    return step_flops(lambda: meta.embed(inputs, rng_keys, [rows]))


def flops(
    model: Heterogeneous, shapes: Sequence[Sequence[int]], rows: Sequence[int]
) -> tuple[float | None, int]:
    """Returns `peak_flops` of a model's device and, where it is known, its `model_flops`, else 0.

    `rows` are of each process. Those of graph encoders depend on the rows, and are not counted.
    """
    assert model.precision != "auto"
    device = next(model.parameters()).device
    has_graphs = any(len(shape) == 4 for shape in shapes)
    peak = None if has_graphs else peak_flops(device, model.precision)
    return peak, model_flops(model, shapes, max(rows)) if peak else 0


def utilisation(flops: float, seconds: float, peak: float | None) -> dict[str, float]:
    """Returns the share of a peak that was used, as `mfu`; empty where the peak is unknown."""
    return {"mfu": flops / seconds / peak} if peak and seconds else {}


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory of this process: of the GPU, or resident; bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
