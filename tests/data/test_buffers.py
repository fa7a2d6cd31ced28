"""Buffers of batches: used again when nothing refers to them, and never before."""

import gc
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch

from heron.data.batches import BufferPool

SPECS = {"view": ((3, 5), "float32"), "rows": ((3,), "int64"), "none": ((0, 4), "int64")}


def test_arrays_of_a_buffer_do_not_overlap() -> None:
    pool = BufferPool(SPECS, readers=2, count=2)
    numbers = [pool.acquire(reader) for reader in (0, 0, 1, 1)]
    assert numbers == [0, 1, 2, 3]
    for number in numbers:
        buffer = pool.buffer(number)
        for name, (shape, dtype) in SPECS.items():
            assert (buffer[name].shape, buffer[name].dtype) == (shape, np.dtype(dtype))
            buffer[name][:] = number
    for number in numbers:
        assert all((array == number).all() for array in pool.buffer(number).values())


@pytest.mark.parametrize("hold", ["array", "tensor", "row", "back"])
def test_a_buffer_is_used_again_only_when_nothing_holds_it(hold: str) -> None:
    pool = BufferPool(SPECS, readers=1, count=1)
    number = pool.acquire(0)
    assert number == 0
    buffer = pool.release_after_use(number)
    array = buffer["view"]
    tensor = torch.from_numpy(array)
    held: Any = {"array": array, "tensor": tensor, "row": tensor[1:], "back": tensor.numpy()}[hold]
    del buffer, array, tensor
    gc.collect()
    assert pool.acquire(0) is None
    held[:] = 7
    del held
    gc.collect()
    assert pool.acquire(0) == 0


def test_without_a_free_buffer_there_is_a_new_one() -> None:
    pool = BufferPool(SPECS, readers=1, count=1)
    buffer = pool.buffer(None)
    assert {name: (array.shape, array.dtype.name) for name, array in buffer.items()} == SPECS


def _fill(pool: BufferPool, reader: int, answers: Any) -> None:
    number = pool.acquire(reader)
    pool.buffer(number)["view"][:] = reader + 1
    answers.put(number)


def test_another_process_fills_the_same_memory() -> None:
    context = multiprocessing.get_context("forkserver")
    pool, answers = BufferPool(SPECS, readers=2, count=1), context.Queue()
    for reader in range(2):
        process = context.Process(target=_fill, args=(pool, reader, answers))
        process.start()
        assert answers.get(timeout=60) == reader
        process.join()
        buffer = pool.release_after_use(reader)
        assert (buffer["view"] == reader + 1).all()
        assert pool.acquire(reader) is None
        del buffer
        assert pool.acquire(reader) == reader
