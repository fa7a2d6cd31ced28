"""`heron predict | save | export`: predictions of a trained model, and the model as files."""

from pathlib import Path
from typing import Annotated, Literal

from heron.cli.arguments import Location, Override, Overwrite, UsageError
from heron.config.errors import InputError
from heron.retrieval.embeddings import Role
from heron.shards.atomic import atomic_write, make_room, refuse_taken

FORMATS = (".csv", ".parquet")
COLUMNS = ("row", "key")  # beside the labels

Trained = Annotated[Location, "folder of a run, a checkpoint or a saved model, or hf://org/name"]


def save(
    run: Trained,
    *,
    out: Annotated[Path | None, "folder to make"] = None,
    push: Annotated[str | None, "org/name on Hugging Face's hub to publish it as"] = None,
    private: Annotated[bool, "a repository that --push makes is private"] = False,
    overwrite: Overwrite = False,
) -> None:
    """Saves a model as a folder that loads anywhere, or publishes it.

    heron save runs/faces --out models/faces
    heron save runs/faces --push org/faces
    """
    from heron.api.model import from_pretrained

    if out is None and push is None:
        raise UsageError("neither --out nor --push is given; expected one of them, or both")
    model = from_pretrained(run)
    if out is not None:
        model.save_pretrained(out, overwrite)
        print(f"{out}: {model}")
    if push is not None:
        model.push_to_hub(push, private or None)
        print(f"https://huggingface.co/{push.removeprefix('hf://').partition('@')[0]}")


def export(
    model: Trained,
    *,
    out: Annotated[Path, "file to write, such as faces.onnx or faces.pt2"],
    format: Annotated[Literal["torch", "onnx"], "torch.export's archive, or ONNX"] = "torch",
    layer: Annotated[Literal["hidden", "projection", "logits"], "what it computes"] = "hidden",
    overwrite: Overwrite = False,
) -> None:
    """Exports a model as one file that takes raw rows and needs no Heron.

    heron export runs/faces --format onnx --out faces.onnx
    """
    from heron.api.model import from_pretrained

    from_pretrained(model).export(out, format, layer, overwrite)
    print(f"{out}: layer {layer}, {out.stat().st_size:,} bytes, as the model computes it")


def predict(
    run: Annotated[Path, "folder of a run or a checkpoint"],
    *overrides: Annotated[Override, "of the run's configuration: evaluate.batch=64"],
    out: Annotated[Path, "file to write: .csv or .parquet"],
    data: Annotated[Location | None, "folder of shards, or a URL (default: the run's)"] = None,
    split: Annotated[str | None, "rows of one split (default: all)"] = None,
    role: Annotated[Role | None, "rows of one role in the run (default: all)"] = None,
    overwrite: Overwrite = False,
) -> None:
    """Predicts rows of a data set: a line per row, with a probability for each label.

    Columns are the row's number, its key, and the labels by name. The probabilities are those that
    the run is scored by: the classifier's or, where there is none, those of a linear probe on the
    labelled rows of the run's own data set. Data may lack some of the views that the run has.

    heron predict runs/faces --role test --out predictions.csv
    heron predict runs/faces --data data/new --out predictions.parquet
    """
    if out.suffix not in FORMATS:
        raise UsageError(f"--out is {out}; expected a file that ends with {' or '.join(FORMATS)}")
    refuse_taken(out, overwrite, InputError)
    import pandas as pd

    from heron.retrieval.embedding_model import predict_rows

    keys, predictions, labels, used = predict_rows(run, overrides, data, split, role)
    names = [f"label {name}" if name in COLUMNS else name for name in labels]
    if predictions.probability is None:
        raise InputError(
            "the model has no classifier, and no labelled row trains a probe; expected a run with "
            "one of them, such as a term bce or cross_entropy"
        )
    table = pd.DataFrame(predictions.probability, columns=names)
    table.insert(0, "row", predictions.rows)
    table.insert(1, "key", list(keys))
    make_room(out, overwrite, InputError)
    with atomic_write(out) as stream:
        if out.suffix == ".csv":
            stream.write(table.to_csv(index=False).encode())
        else:
            table.to_parquet(stream, index=False)
    print(f"{out}: {len(keys):,} rows, {len(labels):,} labels")
    if used:
        print(used)
