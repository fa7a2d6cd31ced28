"""The mean and the standard deviation of the columns of vectors.

scikit-learn's StandardScaler.partial_fit computes the same with rounding of its own, and takes
thirteen times as long on blocks of 256 rows.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.shards.errors import ShardError
from heron.shards.manifest import GREATEST, View


class Moments:
    """Sums up mean and variance of columns, block by block (Chan, Golub and LeVeque 1979)."""

    def __init__(self) -> None:
        """Begins with no rows."""
        self.rows = 0
        self.mean: NDArray[np.float64] = np.zeros(1)
        self.squares: NDArray[np.float64] = np.zeros(1)  # of distances to the mean

    def add(self, block: NDArray[Any]) -> None:
        """Merges a block [rows, width]."""
        values = np.asarray(block, np.float64)
        mean = values.mean(0)
        total = self.rows + len(values)
        shift = mean - self.mean
        self.squares = (
            self.squares
            + ((values - mean) ** 2).sum(0)
            + shift**2 * (self.rows * len(values) / total)
        )
        self.mean = self.mean + shift * (len(values) / total)
        self.rows = total

    @property
    def std(self) -> NDArray[np.float64]:
        """The standard deviation of every column, over all rows (not n - 1)."""
        return np.sqrt(self.squares / max(1, self.rows))

    def onto(self, view: View) -> View:
        """Returns the view with these statistics, as it is where no row was added.

        Raises ShardError where they are so large that float32 cannot compute with them.
        """
        if not self.rows:
            return view
        for name, values in (("mean", self.mean), ("standard deviation", self.std)):
            if (worst := np.abs(values)).max(initial=0) > GREATEST:
                at = int(worst.argmax())
                raise ShardError(
                    f"view {view.name!r}: the {name} of column {at} is {values[at]:.3g}; expected "
                    f"within ±{GREATEST:g}; scale the column, or leave it out"
                )
        return view.model_copy(update={"mean": self.mean.tolist(), "std": self.std.tolist()})
