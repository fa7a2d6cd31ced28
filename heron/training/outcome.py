"""What a run leaves when its training has ended: its report, with a map of features or not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from heron.config.experiment import Config
from heron.config.training import Evaluate
from heron.data.reader import Reader
from heron.data.rows import Roles, Rows
from heron.evaluation.evaluator import Predictions

UNSCORED = Predictions(None, None, np.empty((0, 0), np.float32), np.empty(0, np.int64))
LONG_S = 120.0  # of training, compared with which a map costs little


class WriteReport(Protocol):
    """Writes the report of a run into its folder, from what its evaluation has found."""

    def __call__(
        self,
        folder: Path,
        config: Config,
        result: Mapping[str, Any],
        predictions: Predictions,
        embedding: Predictions | None,
        reader: Reader,
    ) -> Path:
        """Returns the path of the report."""


def wants_map(setting: Literal["auto", "always", "never"], train_seconds: float) -> bool:
    """Returns whether the report has a map and neighbours of test rows, which take seconds.

    `auto` includes them if training took long, counting the time before it was resumed.
    """
    return setting == "always" or (setting == "auto" and train_seconds >= LONG_S)


def map_rows(roles: Roles, options: Evaluate) -> Rows:
    """Returns about `evaluate.map_rows` rows for the map: test, validation or unlabelled ones."""
    rows = roles.test if options.test else roles.validation
    rows = rows if len(rows) else roles.unlabelled
    return rows[:: max(1, len(rows) // options.map_rows)]
