"""A step queues ahead of the device: nothing in it waits but what reads the last step's numbers."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from heron.api.job import pretrain
from heron.data import pictures
from heron.data.augmentations import Blur, Color, Crop, Flip
from heron.data.batches import Batch
from heron.evaluation import collapse
from heron.experiment.config import METHODS
from heron.losses.engine import count_members, group_numbers
from heron.training.trainer import Trainer
from tests import reference_runs
from tests.host_syncs import HostSyncs

# What is left, and why; a wait that ends has to leave this list.
PAIRS = {f"losses/supervised.py:{call}" for call in (
    "__init__ tolist", "_members bincount", "_members nonzero", "_members tolist",
)}  # fmt: skip  # the pairs of L_s, whose number the labels decide
CLASSES = {"losses/classes.py:strips tolist"}  # the sizes of strips, which classes decide
ONE_HOT = {"losses/momentum.py:one_hot_like local_scalar_dense"}  # torch looks on CPUs alone
# A class's rows move its prototype one after the other: the largest class says in how many rounds.
PROTOTYPES = {"losses/pico.py:update_prototypes local_scalar_dense"}
LEFT: dict[str, set[str]] = {
    **dict.fromkeys(("herocon", "herocon-single-view", "herocon-s", "hcl"), PAIRS),
    **dict.fromkeys(("scl", "h-scl-beta", "h-scl-tau", "himulcon"), CLASSES),
    **dict.fromkeys(
        ("hicone", "himulcone"), CLASSES | {"losses/classes.py:largest_pairs local_scalar_dense"}
    ),
    "mib": {"losses/mib.py:rule nonzero", "losses/mib.py:rule lift_fresh"},
    "comco": ONE_HOT,
    "pico": ONE_HOT | PROTOTYPES,
    "plnl": {
        "losses/plnl.py:<listcomp> local_scalar_dense",  # for the log, once an epoch
        "losses/plnl.py:end_epochs local_scalar_dense",
        "losses/plnl.py:plnl index by a mask",
    },
    "deepmtmv": {  # the numbers of tasks' groups, as lists
        "losses/task_groups.py:backward lift_fresh",
        "losses/task_groups.py:forward lift_fresh",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("syncs")
    reference_runs.data(folder)
    return folder


@contextlib.contextmanager
def watched(syncs: HostSyncs, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """While it is open, steps are watched, but for the loader, last step's numbers and collapse."""
    step, record, measure = Trainer.step, Trainer.record_pending, collapse.measure

    def loaded(source: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            with syncs.paused():
                batch = next(source)
            yield batch

    def watched_step(self: Trainer, t: int, source: Iterator[Batch]) -> None:
        with syncs:
            step(self, t, loaded(source))

    def paused_record(self: Trainer) -> None:
        with syncs.paused():
            record(self)

    def paused_measure(*args: Any) -> Any:
        with syncs.paused():
            return measure(*args)

    with patch.context() as context:
        context.setattr(Trainer, "step", watched_step)
        context.setattr(Trainer, "record_pending", paused_record)
        context.setattr(collapse, "measure", paused_measure)
        yield


METHOD_NAMES = [name for name in yaml.safe_load(METHODS.read_text()) if name != "infograph"]


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_a_step_of_each_method_waits_for_nothing_else(
    method: str, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = HostSyncs()
    config = reference_runs.experiment(
        stored, method, f"{method}-syncs", steps=2, precision="fp32", micro_batch=8
    )
    with watched(syncs, monkeypatch):
        pretrain(config)
    assert syncs.calls == LEFT.get(method, set())


def test_augmentations_of_pictures_wait_for_nothing_else() -> None:
    x, draws = torch.rand(5, 3, 32, 32), torch.rand(5, pictures.DRAWS)
    with HostSyncs() as syncs:
        y = pictures.crop(x, Crop(), draws, (16, 16))
        y = pictures.color(y, Color(strength=0.4), draws)
        y = pictures.flip(y, Flip(), draws)
        y = pictures.blur(y, Blur(), draws)
    assert y.shape == (5, 3, 16, 16)
    assert syncs.calls == set()


WAITS = {
    "item": lambda x: float(x.sum()),
    "bool": lambda x: bool((x > 0).any()),
    "list": lambda x: x.tolist(),
    "unique": torch.unique,
    "mask": lambda x: x[x > 1],
    "nonzero": lambda x: x.nonzero(),
    "a tensor of numbers": lambda x: x + torch.tensor([1.0]),
    "counts": lambda x: torch.bincount(x.long()),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a function that counts as the library's, forward and backward."""
    monkeypatch.setattr("tests.host_syncs.LIBRARY", Path(__file__).parent)

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            WAITS[name](grads[0])
            return grads[0]

    x = torch.arange(3.0, requires_grad=True)
    with HostSyncs() as syncs:
        WAITS[name](x.detach())
    assert len(syncs.calls) == 1
    with HostSyncs() as syncs:
        Waits.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert len(syncs.calls) == (name != "list")  # which only its forward tells on a CPU
    with HostSyncs() as syncs, syncs.paused():
        WAITS[name](x.detach())
    assert not syncs.calls


@pytest.mark.parametrize("size", [0, 1, 17])
def test_groups_and_counts_are_those_of_unique_and_bincount(size: int) -> None:
    values = torch.randint(-3, 4, (size,), generator=torch.Generator().manual_seed(size)) * 5
    names, expected = torch.unique(values, return_inverse=True)
    numbers = group_numbers(torch.stack([values, values], 1)[:, 0])  # torch warns of strides
    smaller = (values < names[:, None]).sum(1)
    assert torch.equal(numbers, smaller[expected])
    assert torch.equal(count_members(numbers, size), torch.bincount(numbers, minlength=size))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks CUDA itself; there is no GPU")
@pytest.mark.parametrize("method", [name for name in METHOD_NAMES if name not in LEFT])
def test_cuda_sees_no_wait(method: str, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, record = Trainer.step, Trainer.record_pending

    def strict(self: Trainer, t: int, source: Iterator[Batch]) -> None:
        torch.cuda.set_sync_debug_mode("error" if t else "default")  # the first step builds kernels
        try:
            step(self, t, source)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Trainer, "step", strict)
    pretrain(reference_runs.experiment(stored, method, f"{method}-cuda", steps=3))
    assert record is Trainer.record_pending
