"""The map of an open index, as the page of `heron serve` shows it and an outline cuts it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from heron.config.errors import RetrievalError
from heron.retrieval.index import Index
from heron.retrieval.map import MAP, Region
from heron.retrieval.samples import REMEDY, map_array

GRID = 2**16 - 1  # the largest coordinate of the integer grid that the page draws
MAX_CORNERS = 100  # of an outline, at most


@dataclass(frozen=True)
class SampleMap:
    """The map of an open index, on a grid whose longer side is 0 to `GRID`."""

    how: str  # the projection, in words
    grid: NDArray[np.uint16]  # [N, 2]
    regions: list[Region]  # as in the manifest, with x and y on the grid

    @classmethod
    def of(cls, index: Index) -> Self | None:
        """Reads an index's map, None if it has none; RetrievalError if its file is damaged."""
        record = index.manifest.map
        if record is None:
            return None
        xy = map_array(index.folder / MAP, REMEDY)
        if xy.dtype.str != "<f4" or xy.shape != (len(index), 2) or not np.isfinite(xy).all():
            raise RetrievalError(
                f"{index.folder / MAP} is {xy.dtype.str} {xy.shape}; expected finite "
                f"<f4 ({len(index)}, 2); {REMEDY}"
            )
        low, high = xy.min(0), xy.max(0)
        scale = GRID / max(float((high - low).max()), 1e-30)
        regions = [
            Region(x=(r.x - low[0]) * scale, y=(r.y - low[1]) * scale, names=r.names)
            for r in record.regions
        ]
        return cls(record.how, np.rint((xy - low) * scale).astype(np.uint16), regions)

    @cached_property
    def bytes(self) -> bytes:
        """The grid as little-endian numbers: x and y of each sample."""
        return self.grid.astype("<u2").tobytes()

    def inside(self, outline: str) -> NDArray[np.bool_]:
        """Returns which samples lie within an outline, bool [N], by the even-odd rule.

        `outline` has 3 to `CORNERS` corners, "x,y,x,y,...", from 0 to `GRID` + 1. A sample lies in
        the middle of its grid cell, and so never on an edge along the grid. Raises a RetrievalError
        if it is no outline.
        """
        words = outline.split(",")
        valid = all(word.isascii() and word.isdigit() and len(word) <= 5 for word in words)
        if not valid or len(words) % 2 or not 3 <= len(words) // 2 <= MAX_CORNERS:
            raise RetrievalError(
                f"an outline of {len(words)} numbers; expected 3 to {MAX_CORNERS} corners, "
                f"x,y,x,y, whole numbers of 0 to {GRID + 1}; draw it on the map"
            )
        from matplotlib.path import Path as Outline  # here: no other use of an index needs it

        corners = np.array(words, np.int64).reshape(-1, 2)
        # Most samples lie far from most outlines: test only those in the bounding box.
        in_box = ((self.grid >= corners.min(0)) & (self.grid < corners.max(0))).all(1)
        inside = np.zeros(len(self.grid), bool)
        inside[in_box] = Outline(corners).contains_points(self.grid[in_box] + 0.5)
        return inside
