"""Room for batches: used again when nobody holds it, and never before."""

import gc
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch

from heron.pipeline.data.slots import Slots

FORMS = {"view": ((3, 5), "float32"), "rows": ((3,), "int64"), "none": ((0, 4), "int64")}


def test_arrays_of_a_slot_do_not_overlap() -> None:
    slots = Slots(FORMS, readers=2, count=2)
    numbers = [slots.take(reader) for reader in (0, 0, 1, 1)]
    assert numbers == [0, 1, 2, 3]
    for number in numbers:
        room = slots.room(number)
        for name, (shape, dtype) in FORMS.items():
            assert (room[name].shape, room[name].dtype) == (shape, np.dtype(dtype))
            room[name][:] = number
    for number in numbers:
        assert all((array == number).all() for array in slots.room(number).values())


@pytest.mark.parametrize("hold", ["array", "tensor", "row", "back"])
def test_a_slot_is_taken_again_only_when_nothing_holds_it(hold: str) -> None:
    slots = Slots(FORMS, readers=1, count=1)
    slot = slots.take(0)
    assert slot == 0
    room = slots.lend(slot)
    array = room["view"]
    tensor = torch.from_numpy(array)
    held: Any = {"array": array, "tensor": tensor, "row": tensor[1:], "back": tensor.numpy()}[hold]
    del room, array, tensor
    gc.collect()
    assert slots.take(0) is None
    held[:] = 7
    del held
    gc.collect()
    assert slots.take(0) == 0


def test_without_a_slot_there_is_new_room() -> None:
    slots = Slots(FORMS, readers=1, count=1)
    room = slots.room(None)
    assert {name: (array.shape, array.dtype.name) for name, array in room.items()} == FORMS


def _fill(slots: Slots, reader: int, answers: Any) -> None:
    slot = slots.take(reader)
    slots.room(slot)["view"][:] = reader + 1
    answers.put(slot)


def test_another_process_fills_the_same_memory() -> None:
    context = multiprocessing.get_context("forkserver")
    slots, answers = Slots(FORMS, readers=2, count=1), context.Queue()
    for reader in range(2):
        process = context.Process(target=_fill, args=(slots, reader, answers))
        process.start()
        assert answers.get(timeout=60) == reader
        process.join()
        room = slots.lend(reader)
        assert (room["view"] == reader + 1).all()
        assert slots.take(reader) is None
        del room
        assert slots.take(reader) == reader
