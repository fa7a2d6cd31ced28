"""Methods side by side over the same folds: one table, paired intervals, and what they say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic_core import to_json

from heron.launch.repeats import Interval, corrected_interval, describe, mean_std
from heron.launch.studies.text import markdown
from heron.launch.tuning.scored import Row
from heron.pipeline.data.plan import Rows
from heron.shards.atomic import atomic_write

SHOWN = {  # by whether classes exclude each other; the score that was asked for stands first
    True: ("accuracy", "f1_macro", "auc_macro"),
    False: ("auc_macro", "map", "f1_weighted"),
}


def shared_rows(labelled: Sequence[Rows], test: Sequence[Rows]) -> float:
    """Returns how much two folds have in common, from 0 to 1, as the correlation of their scores.

    It is the lesser of two shares, averaged over pairs of folds: of the training rows, and of the
    test rows. Where nine tenths are drawn for training it is about Nadeau and Bengio's share of the
    test rows; where a few labelled rows are drawn, and the others tested, the share of these few;
    and 0 for the disjoint labelled folds of `data.protocol.folds`.
    """
    pairs = list(combinations(range(len(labelled)), 2))
    if not pairs:
        return 0.0
    shares = [
        [len(np.intersect1d(rows[i], rows[j])) / max(1, len(rows[i])) for i, j in pairs]
        for rows in (labelled, test)
    ]
    return float(min(map(np.mean, shares)))


@dataclass(frozen=True)
class Comparison:
    """Rows of the table, each with what every fold found.

    Attributes:
        title: of the data set and how much was searched.
        score: that choices were made by, and differences are of.
        exclusive: whether classes exclude each other.
        folds: numbers of the folds that all rows have.
        rows: of each fold in order, by the name of the row.
        shared: see `shared_rows`.
    """

    title: str
    score: str
    exclusive: bool
    folds: Sequence[int]
    rows: Mapping[str, Sequence[Row]]
    shared: float

    @property
    def plain(self) -> str | None:
        """The plain network: the first method without a term beside the classifier's."""
        return next(
            (n for n, r in self.rows.items() if not r[0].pretrained and " on " not in n), None
        )

    @property
    def against(self) -> str:
        """The row that the others are set against: the plain network, or else the first."""
        return self.plain or next(iter(self.rows))

    def of(self, name: str, score: str) -> pd.Series:
        """Returns a row's test score in each fold."""
        return pd.Series([row.scores.get(score) for row in self.rows[name]], dtype=float)

    def less(self, name: str, other: str) -> Interval:
        """Returns a row less another, over the folds."""
        return corrected_interval(
            self.of(name, self.score) - self.of(other, self.score), self.shared
        )

    def first(self, pretrained: bool) -> str | None:
        """Returns the row, with or without pretraining, that the validation rows put first."""
        names = [name for name, rows in self.rows.items() if rows[0].pretrained == pretrained]
        means = {n: np.mean([row.validation for row in self.rows[n]]) for n in names}
        return max(names, key=lambda name: means[name], default=None)

    def verdicts(self) -> list[str]:
        """Returns sentences that answer: does pretraining help on these data?

        It helps where it is above the row without pretraining that the validation rows put first,
        and above the one that tests best too: few validation rows may have chosen badly.
        """
        ours, theirs = self.first(True), self.first(False)
        lines = []
        if ours and theirs:
            found = self.less(ours, theirs)
            told = (
                f"{ours} less {theirs}, each the first of its kind by the validation rows, is "
                f"{found.shown} of {self.score}"
            )
            hardest = max(
                (name for name, rows in self.rows.items() if not rows[0].pretrained),
                key=lambda name: self.of(name, self.score).mean(),
            )
            if found.sign > 0 and (harder := self.less(ours, hardest)).sign <= 0:
                found, theirs = harder, hardest
                told += f", but less {hardest}, which tests best of those without, {harder.shown}"
            begin = {
                1: "Pretraining helps on these data",
                0: "Pretraining makes no difference that these folds show",
                -1: "Pretraining does not help on these data",
            }[found.sign]
            lines.append(f"{begin}: {told}; take {ours if found.sign > 0 else theirs}.")
        if self.plain and self.plain != theirs:
            for name, rows in self.rows.items():
                if rows[0].pretrained and " on " not in name:
                    found = self.less(name, self.plain)
                    word = {1: "above", 0: "not told from", -1: "below"}[found.sign]
                    lines.append(f"{name} is {word} the plain network: {found.shown}.")
        return lines

    def scores(self) -> list[str]:
        """Returns the names of the scores that are shown."""
        return list(dict.fromkeys([self.score, *SHOWN[self.exclusive]]))

    def markdown(self) -> str:
        """Returns the table and the sentences."""
        against = self.against
        heads = ["", *self.scores(), "validation", f"{self.score} less {against}"]
        lines = []
        for name, rows in self.rows.items():
            scores = [mean_std(*describe(self.of(name, score))[:2]) for score in self.scores()]
            validation = f"{np.mean([row.validation for row in rows]):.4f}"
            less = "–" if name == against else self.less(name, against).shown
            lines.append([name, *scores, validation, less])
        first, *_, last = [*self.folds, self.folds[-1]]
        folds = f"fold {first}" if first == last else f"folds {first} to {last}"
        how = (
            f"Mean ± standard deviation of the test rows over {folds}; choices by "
            f"{self.score} of the validation rows. In brackets the 95 % interval of the mean "
            "paired difference (Nadeau and Bengio's corrected t; the folds share "
            f"{self.shared:.2f} of their rows)."
        )
        verdicts = "\n".join(self.verdicts())
        return f"{self.title}\n\n{markdown(heads, lines)}\n{how}\n\n{verdicts}\n"

    def write(self, out: Path) -> str:
        """Writes compare.md and compare.json, and returns the text."""
        text, against = self.markdown(), self.against
        tree = {
            "title": self.title,
            "score": self.score,
            "folds": self.folds,
            "shared": self.shared,
            "verdicts": self.verdicts(),
            "rows": {
                name: {"folds": rows, "less": self.less(name, against) if name != against else None}
                for name, rows in self.rows.items()
            },
        }
        data = to_json(tree, indent=1, inf_nan_mode="null") + b"\n"
        for name, content in {"compare.md": text.encode(), "compare.json": data}.items():
            with atomic_write(out / name) as stream:
                stream.write(content)
        return text
