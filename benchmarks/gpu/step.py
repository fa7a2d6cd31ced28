"""A step of a network of pictures taken apart: copy, augmentation, model, loss, optimiser."""

import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.common import DEVICE, DRY, clock, host_clock, numbered, say, sync, told
from heron.base.shipped import find_config
from heron.data.batches import Batch
from heron.data.random_keys import rng_keys
from heron.data.views import Views
from heron.experiment.config import Config, load_config
from heron.losses.objective import Objective
from heron.losses.products import set_run_precision
from heron.losses.unsupervised import nt_xent
from heron.models.heterogeneous import Heterogeneous
from heron.shards.manifest import View
from heron.training import throughput
from heron.training.optim import build_optimizer

PEAK = 989.5e12  # of an H100 or H200 in bf16, as published
AUGMENT = "[{crop: {area: [0.2, 1.0]}}, {color: {strength: 0.4}}, {blur: {}}]"
CASES = [(name, 256, c) for c in (False, True) for name in ("resnet50", "vit_base_patch16_224")]


class Stored:
    """A data set of pictures that are nowhere: what `Views` asks of one."""

    def __init__(self, side: int) -> None:
        self._view = View(name="image", kind="image", shape=(side, side, 3), dtype="uint8")

    def view(self, name: str) -> View:
        return self._view

    def vocabulary(self, name: str) -> int:
        return 0


def step(first: int) -> None:
    """Each network with and without torch.compile."""
    for name, rows, compile_ in numbered([("convnet", 4, False)] if DRY else CASES, first):
        row = dict(what="step", model=name, rows=rows, compile=compile_)
        with told(**row):
            try:
                say(**row, **measure(name, rows, compile_, 32 if DRY else 224))
            except Exception:
                traceback.print_exc()
                raise


def experiment(name: str, side: int) -> Config:
    """SimCLR of two views of a picture."""
    view = f"{{stored: image, size: {side}, augment: {AUGMENT}}}"
    encoder = f"{{kind: timm, name: {name}}}"
    if DRY:  # where timm need not be
        encoder = "{kind: convnet, channels: [8], widths: [16]}"
    model = (
        f"{{encoder: {encoder}, shared_encoder: true, shared_projector: true, "
        "projection_width: 128}"
    )
    words = [f"data.views=[{view}, {view}]", f"model={model}", "objective={nt_xent: {tau: 0.1}}",
             "optim={kind: sgd, lr: 0.01}"]  # fmt: skip
    return load_config(find_config("faces"), words, None)


def drawn(rows: int, side: int) -> Batch:
    """A batch of noise."""
    pictures = torch.randint(0, 256, (rows, side, side, 3), dtype=torch.uint8)
    numbers = np.arange(rows)
    keys = torch.from_numpy(rng_keys(0, np.array([0]), numbers))
    return Batch({"image": pictures}, torch.zeros(0, 0), torch.from_numpy(numbers), keys, [rows])


def measure(name: str, rows: int, compile_: bool, side: int) -> dict[str, Any]:
    """Milliseconds of a step and of its parts, and the share of the peak."""
    config, device = experiment(name, side), torch.device(DEVICE)
    views = Views(Stored(side), config.data, device)
    objective = Objective(config.objective, config.model.matryoshka)
    torch.manual_seed(0)
    names = config.data.view_names
    model = Heterogeneous(config.model, views.shapes, 0, objective.terms, names, rows).to(device)
    model.precision = "bf16"
    set_run_precision("bf16")
    flops = throughput.model_flops(model, views.shapes, rows)
    if compile_:
        model.compile_encoders("inductor")
        views.compile("inductor")
    optimizer = build_optimizer(config.optim, model.parameters())
    host = drawn(rows, side)
    pinned = host.pin_memory() if DEVICE == "cuda" else host
    batch = pinned.to(device)
    inputs: list[Tensor] = list(views(batch, train=True))
    features = model(inputs, batch.rng_keys, batch.sizes)

    def augmented() -> list[Tensor]:
        return list(views(batch, train=True))

    def loss() -> Tensor:
        return nt_xent(features["projections"], tau=0.1)

    def whole() -> None:
        z = model(augmented(), batch.rng_keys, batch.sizes)["projections"]
        nt_xent(z, tau=0.1).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    start = time.time()
    whole()
    whole()
    sync()
    warm_up = round(time.time() - start, 1)
    found: dict[str, Any] = {"warm_up_s": warm_up}
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    total = clock(whole, budget=2.0, most=12)
    found |= {"step_ms": total * 1e3, "pictures_s": 2 * rows / total}
    found |= {"tflops": flops / total / 1e12, "mfu": flops / total / PEAK}
    if DEVICE == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["pin_ms"] = 1e3 * host_clock(host.pin_memory)
        found["copy_ms"] = 1e3 * clock(lambda: pinned.to(device))
    parts: dict[str, Callable[[], object]] = {
        "augment_ms": augmented,
        "forward_ms": lambda: model(inputs, batch.rng_keys, batch.sizes),
        "loss_ms": loss,
    }
    return found | {part: 1e3 * clock(work) for part, work in parts.items()}
