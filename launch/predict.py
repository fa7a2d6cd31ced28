"""`heron predict`: what a trained model says of each row of a data set, as a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from heron.launch.arguments import Override, UsageError
from heron.launch.retrieval import Role
from heron.pipeline.config.errors import InputError
from heron.shards.atomic import atomic_write

if TYPE_CHECKING:
    from heron.pipeline.evaluation.evaluator import Predictions

FORMATS = (".csv", ".parquet")
COLUMNS = ("row", "key")  # beside the labels


def predict(
    run: Annotated[Path, "folder of a run or a checkpoint"],
    *overrides: Annotated[Override, "of the run's configuration: evaluate.batch=64"],
    out: Annotated[Path, "file to write: .csv or .parquet"],
    data: Annotated[str | None, "folder of shards, or a URL (default: the run's)"] = None,
    split: Annotated[str | None, "rows of one split (default: all)"] = None,
    role: Annotated[Role | None, "rows of one role in the run (default: all)"] = None,
) -> None:
    """Predicts rows of a data set: a line a row, with a probability for each label.

    Columns are the row's number, its key, and the labels by their names. The numbers are those that
    the run's scores are of: the classifier's or, where there is none, those of a linear probe on
    the labelled rows of the run's own data set.

    heron predict runs/faces --role test --out predictions.csv
    heron predict runs/faces --data data/new --out predictions.parquet
    """
    if out.suffix not in FORMATS:
        raise UsageError(f"--out is {out}; expected a file that ends with {' or '.join(FORMATS)}")
    from heron.pipeline.retrieval.predict import predict_rows

    keys, found, labels = predict_rows(run, overrides, data, split, role)
    _write(out, keys, found, labels)
    print(f"{out}: {len(keys):,} rows, {len(labels):,} labels")


def _write(out: Path, keys: Sequence[str], found: "Predictions", labels: Sequence[str]) -> None:
    """Writes the table, all or nothing of it."""
    import pandas as pd

    names = [f"label {name}" if name in COLUMNS else name for name in labels]
    if found.probability is None:
        raise InputError(
            "the model has no classifier, and no labelled row trains a probe; expected a run with "
            "one of them, such as a term bce or cross_entropy"
        )
    table = pd.DataFrame(found.probability, columns=names)
    table.insert(0, "row", found.rows)
    table.insert(1, "key", list(keys))
    with atomic_write(out) as stream:
        if out.suffix == ".csv":
            stream.write(table.to_csv(index=False).encode())
        else:
            table.to_parquet(stream, index=False)
