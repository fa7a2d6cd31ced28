"""No term makes a tensor of anchors x keys, forward or backward, nor one that grows as fast."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heron.losses import engine
from heron.losses.comco import comco
from heron.losses.mib import mib
from heron.losses.pico import pico
from heron.losses.supervised import weighted_supervised
from heron.losses.unsupervised import input_weighted_unsupervised
from tests.objectives.test_family import terms
from tests.objectives.test_terms import draw, labels

ROWS = (256, 512)  # samples, of two views each


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the most elements of any tensor that an operation made."""

    elements: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for item in made if isinstance(made, tuple | list) else (made,):
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.numel())
        return made


@pytest.fixture(autouse=True)
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine.STRIP_ELEMENTS, "cpu", 1 << 13)
    monkeypatch.setattr(engine, "MIN_STRIP_ROWS", 4)


def made(term: Callable[..., Tensor], batch: int) -> int:
    """The largest tensor of a forward and a backward pass."""
    z = [draw(batch, 4, seed=v, dtype=torch.float32) for v in (0, 1)]
    largest = Largest()  # type: ignore[no-untyped-call]
    with largest:
        term(z).backward()  # type: ignore[no-untyped-call]
    return largest.elements


class Kept:
    """What autograd keeps in the stead of a tensor; it goes with the graph."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def saved(term: Callable[..., Tensor], batch: int) -> int:
    """Bytes that wait for the backward pass when the forward pass is done, each storage once."""
    z = [draw(batch, 4, seed=v, dtype=torch.float32) for v in (0, 1)]
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(x: Tensor) -> Kept:
        alive.add(kept := Kept(x))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.x):
        loss = term(z)
    storages = [kept.x.untyped_storage() for kept in alive]
    loss.backward()  # type: ignore[no-untyped-call]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def family(batch: int) -> dict[str, Callable[..., Tensor]]:
    found = terms(0.2, torch.arange(batch) % 4, batch, torch.float32)
    y = labels(batch, 5, dtype=torch.float32)
    x = [draw(batch, 6, seed=v, dtype=torch.float32).detach() for v in (5, 6)]
    found["input weighted"] = lambda z: input_weighted_unsupervised(z, x)
    found["L_s"] = lambda z: weighted_supervised(torch.cat(z, 1), y)
    found["MIB"] = lambda z: mib(z, z, [torch.ones_like(view) for view in z])
    number, held = torch.arange(batch) % 4, torch.eye(4)[torch.arange(batch) % 4]
    found["PiCO"] = lambda z: pico(z[0], z[1], z[1], number, number)
    found["ComCo"] = lambda z: comco(z[0], z[1], z[1], number, number, held, held)
    return found


@pytest.mark.parametrize("name", family(4))
def test_memory_is_linear(name: str) -> None:
    small, large = (made(family(batch)[name], batch) for batch in ROWS)
    assert large <= (2 * ROWS[1]) ** 2 / 32
    assert large <= 2.2 * small


@pytest.mark.parametrize("name", family(4))
def test_what_backward_waits_for_is_linear(name: str) -> None:
    """To the byte, however small the pieces are in which it is kept."""
    small, large = (saved(family(batch)[name], batch) for batch in ROWS)
    assert 1.999 * small < large <= 2 * small  # a number a level does not grow


def test_strips_that_autograd_keeps_would_be_found_out() -> None:
    def stripwise(z: list[Tensor]) -> Tensor:
        vectors = torch.cat(z)
        strips = torch.split(vectors, 8)
        return torch.stack([(strip @ vectors.T).exp().sum() for strip in strips]).sum()

    assert made(stripwise, ROWS[1]) <= (2 * ROWS[1]) ** 2 / 32  # each alone is small enough
    small, large = (saved(stripwise, batch) for batch in ROWS)
    assert large > 3.5 * small and large > 4 * (2 * ROWS[1]) ** 2


def test_a_dense_term_would_be_found_out() -> None:
    def dense(z: list[Tensor]) -> Tensor:
        return (torch.cat(z) @ torch.cat(z).T).exp().sum()

    small, large = (made(dense, batch) for batch in ROWS)
    assert large == (2 * ROWS[1]) ** 2
    assert large > 2.2 * small
