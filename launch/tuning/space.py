"""What a search varies of an experiment, and the values of each of its trials."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from heron.launch.studies.study import DIGITS, Range, Values
from heron.pipeline.config.experiment import CLASSIFIERS, Config
from heron.pipeline.config.sections import Section, check, read_tree

LEAST_TAU = 0.003  # see `config.terms.Temperature`


class Space(Section):
    """Ranges that the trials of a search are drawn from, as a file of `configs/tuning/` has them.

    Attributes:
        rate: factors of `optim.lr`; null: it stays.
        dropout: of every encoder that has one, in place of the experiment's; null: it stays.
        weight: factors of the weight of each term that trains no classifier; null: they stay.
        tau: factors of the temperature of each term that has one; null: they stay.
        vary: further keys of the experiment, and the values or the range of each.
    """

    rate: Range | None = None
    dropout: Range | None = None
    weight: Range | None = None
    tau: Range | None = None
    vary: dict[str, Values] = {}

    def draw(self, config: Config, seed: int, trial: int) -> dict[str, Any]:
        """Returns what a trial changes of an experiment, by dotted key; none of trial 0.

        A number is drawn with (seed, trial, key), so that methods that share an option are given
        the same.
        """
        if trial == 0:
            return {}
        changes: dict[str, Any] = {}
        for key, base, values in self._ranges(config):
            random = np.random.default_rng([seed, trial, zlib.crc32(key.encode())])
            if not isinstance(values, Range):
                changes[key] = values[int(random.integers(len(values)))]
            elif base is None:
                changes[key] = values.draw(random)
            else:
                changes[key] = float(f"{base * values.draw(random):.{DIGITS}g}")
            if key.endswith(".tau"):
                changes[key] = max(changes[key], LEAST_TAU)
        return changes

    def _ranges(self, config: Config) -> Iterator[tuple[str, float | None, Values]]:
        """Yields the keys that vary, the value that a factor is of, and the range."""
        tree = config.model_dump(mode="json")
        if self.rate:
            yield "optim.lr", config.optim.lr, self.rate
        encoders = {"encoder": tree["model"]["encoder"]}
        own = tree["model"].get("encoders") or {}
        encoders |= {f"encoders.{name}": one for name, one in own.items()}
        for name, encoder in encoders.items():
            if self.dropout and "dropout" in encoder:
                yield f"model.{name}.dropout", None, self.dropout
        for name, options in tree["objective"].items():
            if self.weight and name not in CLASSIFIERS and options.get("weight"):
                yield f"objective.{name}.weight", options["weight"], self.weight
            if self.tau and options.get("tau"):
                yield f"objective.{name}.tau", options["tau"], self.tau
        for key, values in self.vary.items():
            yield key, None, values


def load_space(path: Path) -> Space:
    """Reads a file of ranges; ConfigError where it is missing or does not fit."""
    return check(Space, read_tree(path, "ranges", "rate"), f"ranges {path}")
