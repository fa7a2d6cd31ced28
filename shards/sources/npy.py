"""Arrays in files: an .npz as a whole, an .npy mapped into memory; pickles are refused."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.shards.errors import SourceError
from heron.shards.index import UNREADABLE

PICKLES = "arrays of Python objects are pickles, never decoded"


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the arrays of an .npz by their names; SourceError where it is none."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return dict(stored)
    except UNREADABLE as fault:
        pickles = "allow_pickle" in str(fault) and zipfile.is_zipfile(path)
        reason = PICKLES if pickles else "expected what numpy.savez writes"
        raise SourceError(f"{path.name}: cannot be read: {reason}") from None


def map_npy(path: Path) -> NDArray[Any]:
    """Maps the array of an .npy, read-only, of which only what is used is read.

    What was read leaves memory with the array, so map it anew for each block of rows.
    """
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except UNREADABLE as fault:
        reason = (
            PICKLES
            if "Python objects" in str(fault)
            else f"{fault}; expected what numpy.save writes"
        )
        raise SourceError(f"{path.name}: cannot be read: {reason}") from None
