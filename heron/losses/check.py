"""Checks any loss: on several processes against one, in other precisions, at hard inputs.

The true loss is that of one process with all rows in float64. On several processes each calls the
loss with its own rows, as a loop under DistributedDataParallel does, which takes the mean of the
processes' gradients; so a process's gradient of its rows, divided by the number of processes, must
be that of one process.
"""

import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from heron.base.errors import TrainingError
from heron.distributed.watchdog import leave
from heron.losses.check_inputs import Inputs, LossSpec, build, call

EXACT = 1e-9  # relative error of float64 that is rounding
ROWS = 12
MOST = 6  # processes, of which the last still has rows
START_S = 600  # for the processes to import and build the loss, which busy machines do slowly
WAIT_S = 60  # for a process from there on: others may wait for it for ever
STEP = 1e-5  # of a difference quotient


class Finding(NamedTuple):
    """A line of the table.

    Attributes:
        case: what was tried.
        passed: whether it is as it should be; None: refused, or not tried.
        text: what was seen.
    """

    case: str
    passed: bool | None
    text: str


@dataclass(frozen=True)
class Result:
    """The value of a loss, and its gradients; `error`: what it raised instead.

    `gradients` are those of the inputs, of this process's rows, `learnt` those of parameters.
    """

    value: Tensor | None = None
    gradients: tuple[Tensor, ...] = ()
    learnt: tuple[Tensor, ...] = ()
    error: str = ""


def check_loss(spec: LossSpec, processes: Sequence[int] = (2, 3)) -> list[Finding]:
    """Returns a line per case; TrainingError if a loss cannot be called, or not by `processes`."""
    if wrong := [world for world in processes if not 2 <= world <= MOST]:
        raise TrainingError(f"--processes {wrong[0]}: a check takes 2 to {MOST} processes")
    draw = Inputs.draw(spec.inputs, ROWS)
    true = evaluate(spec, draw.double())
    if true.error:
        raise TrainingError(
            f"{spec.path} cannot be called with {spec.inputs}: {true.error}; "
            "say what it takes by --inputs, or name a function that builds it"
        )
    findings = _alone(spec, draw, true)
    for world in processes:
        for kind, shares in zip(("even", "uneven"), shares_of(world), strict=True):
            case = f"{world} processes, {kind} rows ({', '.join(map(str, shares))})"
            results = on_processes(spec, shares)
            findings.append(_compare(case, true, results))
    return findings


def shares_of(world: int) -> tuple[list[int], list[int]]:
    """Returns the rows of each process, evenly many and unevenly many."""
    even = [ROWS // world + (rank < ROWS % world) for rank in range(world)]
    return even, [even[0] + even[-1] // 2, *even[1:-1], even[-1] - even[-1] // 2]


def evaluate(spec: LossSpec, inputs: Inputs) -> Result:
    """Returns the value and the gradients of a loss that is built anew."""
    try:
        loss = build(spec, inputs.features[0].dtype)
        leaves = [x.clone().requires_grad_() for x in inputs.features]
        value = call(loss, spec, inputs.with_features(leaves))
        learnt = list(loss.parameters()) if isinstance(loss, nn.Module) else []
        gradients = torch.autograd.grad(
            value, [*leaves, *learnt], allow_unused=True, materialize_grads=True
        )
    except Exception as fault:  # a stranger's loss may raise anything
        return Result(error=f"{type(fault).__name__}: {' '.join(str(fault).split())}"[:200])
    count = len(leaves)
    return Result(value.detach(), gradients[:count], gradients[count:])


def _alone(spec: LossSpec, draw: Inputs, true: Result) -> list[Finding]:
    """Returns what is found on one process."""
    double = draw.double()
    again = evaluate(spec, double)
    same = all(map(torch.equal, _flat(true), _flat(again)))
    findings = [Finding("called twice", same, "equal bits" if same else "other bits")]
    for name, dtype, bound in (
        ("float32", torch.float32, 1e-4),
        ("bfloat16", torch.bfloat16, 5e-2),
        ("float16", torch.float16, 5e-2),
    ):
        findings.append(_precision(name, evaluate(spec, draw.to(dtype)), true, bound))
    one_class = replace(double, classes=torch.zeros_like(double.classes))
    zero = [x.clone() for x in double.features]
    zero[0][0] = 0
    findings.append(_finite("a row of zeros", evaluate(spec, double.with_features(zero))))
    findings.append(_finite("one row", evaluate(spec, double.rows(slice(0, 1)))))
    findings.append(_finite("one class", evaluate(spec, one_class)))
    return [*findings, _second_derivative(spec, double)]


def _flat(result: Result) -> list[Tensor]:
    value = [] if result.value is None else [result.value]
    return [*value, *result.gradients, *result.learnt]


def _precision(case: str, found: Result, true: Result, bound: float) -> Finding:
    if found.error:
        return Finding(case, None, f"refused: {found.error}")
    if not all(bool(x.isfinite().all()) for x in _flat(found)):
        return Finding(case, False, "not finite")
    error = max(_relative(a.double(), b) for a, b in zip(_flat(found), _flat(true), strict=True))
    return Finding(case, error <= bound, f"relative error {error:.0e}")


def _finite(case: str, found: Result) -> Finding:
    if found.error:
        return Finding(case, None, f"refused: {found.error}")
    finite = all(bool(x.isfinite().all()) for x in _flat(found))
    return Finding(case, finite, "finite" if finite else "value or gradient is not finite")


def _second_derivative(spec: LossSpec, inputs: Inputs) -> Finding:
    """Compares a second derivative with the difference quotient of gradients."""
    case = "second derivative"
    direction = torch.ones_like(inputs.features[0])
    direction[::2] = -1

    def slopes(x: Tensor, create_graph: bool) -> Tensor:
        loss = build(spec, inputs.features[0].dtype)
        value = call(loss, spec, inputs.with_features([x, *inputs.features[1:]]))
        (gradient,) = torch.autograd.grad(value, x, create_graph=create_graph)
        return gradient

    x = inputs.features[0].clone().requires_grad_()
    try:
        first = slopes(x, create_graph=True)
        (second,) = torch.autograd.grad(
            (first * direction).sum(), x, allow_unused=True, materialize_grads=True
        )
        ends = [
            slopes((x.detach() + sign * STEP * direction).requires_grad_(), create_graph=False)
            for sign in (1, -1)
        ]
    except Exception as fault:
        return Finding(case, None, f"refused: {type(fault).__name__}")
    error = _relative(second, (ends[0] - ends[1]) / (2 * STEP))
    return Finding(case, error < 1e-4, "right" if error < 1e-4 else f"wrong by {error:.0%}")


def _relative(found: Tensor, true: Tensor) -> float:
    """Returns the relative error; of a gradient that should be 0, its size."""
    scale = true.norm()
    return float((found - true).norm() / (scale if scale > 1e-12 else 1))


def on_processes(spec: LossSpec, shares: Sequence[int]) -> list[Result]:
    """Returns the result of each of several processes, with `shares` rows each."""
    world = len(shares)
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(  # type: ignore[no-untyped-call]
            _rank, (list(shares), folder, spec), world, join=False, start_method="spawn"
        )
        assert context is not None
        ready, deadline = False, time.monotonic() + START_S
        with suppress(Exception):  # a process died: the files that are missing say which
            while time.monotonic() < deadline and not context.join(timeout=0.2):
                if not ready and len([*Path(folder).glob("ready-*")]) == world:
                    ready, deadline = True, time.monotonic() + WAIT_S
        for process in context.processes:
            process.kill()
        return [_read(Path(folder) / f"{rank}.pt") for rank in range(world)]


def _read(path: Path) -> Result:
    if not path.exists():
        return Result(error=f"no result after {WAIT_S} s: it died, or waits for another process")
    value, gradients, learnt, error = torch.load(path, weights_only=True)
    return Result(value, tuple(gradients), tuple(learnt), error)


def _rank(rank: int, shares: list[int], folder: str, spec: LossSpec) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=len(shares),
        timeout=timedelta(seconds=START_S),
    )
    # Built once before the time runs, as some libraries take a minute to be imported.
    with suppress(Exception):  # which is then the result
        build(spec, torch.float64)
    dist.barrier()
    Path(folder, f"ready-{rank}").touch()
    start = sum(shares[:rank])
    own = Inputs.draw(spec.inputs, ROWS).double().rows(slice(start, start + shares[rank]))
    found = evaluate(spec, own)
    path = Path(folder) / f"{rank}.pt"
    saved = found.value, list(found.gradients), list(found.learnt), found.error
    torch.save(saved, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    leave(0)


def _compare(case: str, true: Result, results: Sequence[Result]) -> Finding:
    """Compares the results of processes with that of one."""
    if errors := [result.error for result in results if result.error]:
        return Finding(case, None if len(errors) == len(results) else False, f"raised {errors[0]}")
    assert true.value is not None
    values = torch.stack([result.value for result in results if result.value is not None])
    gradients = [
        torch.cat([result.gradients[n] for result in results]) / len(results)
        for n in range(len(true.gradients))
    ]
    gradients += [torch.stack(xs).mean(0) for xs in zip(*(r.learnt for r in results), strict=True)]
    true_gradients = [*true.gradients, *true.learnt]
    value_text, value_right = _value_text(values, true.value)
    found, expected = (torch.cat([x.flatten() for x in xs]) for xs in (gradients, true_gradients))
    error = _relative(found, expected)
    if error <= EXACT:
        return Finding(case, value_right, f"value {value_text}, gradient exact")
    ratio = float(found @ expected / (expected @ expected))
    cosine = float(torch.nn.functional.cosine_similarity(found, expected, dim=0))
    text = (
        f"{ratio:.3f} of the true one"
        if cosine > 1 - EXACT
        else f"of another loss (cosine {cosine:.3f})"
    )
    return Finding(case, False, f"value {value_text}, gradient {text}")


def _value_text(values: Tensor, true: Tensor) -> tuple[str, bool]:
    if _relative(values, true.expand_as(values)) <= EXACT:
        return "exact", True
    if _relative(values.mean(), true) <= EXACT:
        return "exact as the mean over processes, of which each has its own", True
    same = _relative(values, values[0].expand_as(values)) <= EXACT
    average = "" if same else " on average"
    return f"{float(values.mean() / true):.3f} of the true one{average}", False


def passed(findings: Sequence[Finding]) -> bool:
    """Returns whether no finding is a failure; what a loss refuses is none."""
    return all(finding.passed is not False for finding in findings)
