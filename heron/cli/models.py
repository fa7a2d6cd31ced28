"""`heron embed | predict | save | export`: what a trained model computes, and the model as files.

A verb imports what it needs when it runs, so that `heron --help` is quick.
"""

from pathlib import Path
from typing import Annotated, Literal

from heron.base.atomic import new_file
from heron.base.errors import InputError, csv_of
from heron.cli.arguments import Address, Location, Override, Overwrite, Quiet, UsageError, executor
from heron.retrieval.embeddings import Layer, Role, used

FORMATS = (".csv", ".parquet")
COLUMNS = ("row", "key")  # beside the labels
LOST_SHOWN = 5  # lost rows named on the terminal; the manifest names all

Trained = Annotated[Location, "folder of a run, a checkpoint or a saved model, or hf://org/name"]
TrustCode = Annotated[bool, "run classes that the model's folder names by dotted path, if yours"]


def embed(
    run: Annotated[Path, "folder of a run or a checkpoint"],
    *overrides: Annotated[Override, "key=value of the run's configuration: data.workers=4"],
    out: Annotated[Location, "folder to write or to continue, or s3://bucket/folder"],
    split: Annotated[str | None, "rows of one split (default: all)"] = None,
    role: Annotated[Role | None, "rows of one role in the run (default: all)"] = None,
    layers: Annotated[list[Layer] | None, "layers to write (default: all of the model)"] = None,
    dtype: Annotated[Literal["float32", "float16"], "type of the values"] = "float32",
    part_rows: Annotated[int, "rows per file"] = 65_536,
    address: Address = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    trust_code: TrustCode = False,
) -> None:
    """Embeds a data set with a trained model.

    heron embed runs/faces --out embeddings/faces
    heron embed runs/faces --out embeddings/faces --address auto
    """
    from heron.distributed import collectives
    from heron.retrieval import embed as embedding
    from heron.retrieval.embed import Choice

    choice = Choice(split, role, layers, dtype, part_rows)
    options = not quiet, overwrite, trust_code
    if address is None:
        written = embedding.embed(run, out, choice, overrides, *options)
    else:
        from heron.retrieval.embed_tasks import embed_on

        with executor(None, address, gpu=True) as tasks:
            written = embed_on(tasks, run, out, choice, overrides, *options)
    if collectives.rank() == 0:
        layer_widths = (f"{name} {layer.dim}" for name, layer in written.manifest.layers.items())
        print(f"{out}: {len(written):,} embeddings, {', '.join(layer_widths)}")
        manifest = written.manifest
        if said := used(written.views, manifest.missing, manifest.data):
            print(said)
        lost = written.manifest.lost
        for row, fault in list(lost.items())[:LOST_SHOWN]:
            print(f"skipped row {row}: {fault}")
        if len(lost) > LOST_SHOWN:
            print(f"skipped {len(lost):,} rows in all; {out}/manifest.json lists them")
    collectives.close()


def predict(
    run: Annotated[Path, "folder of a run or a checkpoint"],
    *overrides: Annotated[Override, "key=value of the run's configuration: evaluate.batch=64"],
    out: Annotated[Path, "file to write: .csv or .parquet"],
    data: Annotated[Location | None, "folder of shards, or a URL (default: the run's)"] = None,
    split: Annotated[str | None, "rows of one split (default: all)"] = None,
    role: Annotated[Role | None, "rows of one role in the run (default: all)"] = None,
    overwrite: Overwrite = False,
    trust_code: TrustCode = False,
) -> None:
    """Predicts rows of a data set: a line per row, with a probability for each label.

    Columns are the row's number, its key, and the labels by name. As in the run's scores, the
    probabilities are the classifier's or, if the model has none, those of a linear probe on the
    labelled rows of the run's own data set. The data may lack some of the views of the run.

    heron predict runs/faces --role test --out predictions.csv
    heron predict runs/faces --data data/new --out predictions.parquet
    """
    if out.suffix not in FORMATS:
        raise UsageError(f"--out must end with {' or '.join(FORMATS)}, got {out}")
    import pandas as pd

    from heron.retrieval.embedding_model import predict_rows

    with new_file(out, overwrite, InputError) as stream:
        answer = predict_rows(run, overrides, data, split, role, trust_code)
        keys, predictions, labels, note = answer
        names = [f"label {name}" if name in COLUMNS else name for name in labels]
        if predictions.probability is None:
            raise InputError(
                "the model has no classifier, and there is no labelled row to train a probe on; "
                "use a run with one of them, such as one with a term bce or cross_entropy"
            )
        table = pd.DataFrame(predictions.probability, columns=names)
        table.insert(0, "row", predictions.rows)
        table.insert(1, "key", list(keys))
        if out.suffix == ".csv":
            stream.write(csv_of(table.to_csv(index=False)).encode())
        else:
            table.to_parquet(stream, index=False)
    print(f"{out}: {len(keys):,} rows, {len(labels):,} labels")
    if note:
        print(note)


def save(
    run: Trained,
    *,
    out: Annotated[Path | None, "folder to write"] = None,
    push: Annotated[str | None, "publish it on the Hugging Face Hub, as org/name"] = None,
    private: Annotated[bool, "make a new repository of --push private"] = False,
    overwrite: Overwrite = False,
    trust_code: TrustCode = False,
) -> None:
    """Saves a model as a folder that loads anywhere, or publishes it.

    heron save runs/faces --out models/faces
    heron save runs/faces --push org/faces
    """
    from heron.api.model import from_pretrained

    if out is None and push is None:
        raise UsageError("nothing to do; pass --out, --push, or both")
    model = from_pretrained(run, trust_code=trust_code)
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
    layer: Annotated[Literal["hidden", "projection", "logits"], "layer to compute"] = "hidden",
    overwrite: Overwrite = False,
    trust_code: TrustCode = False,
) -> None:
    """Exports a model as one file that takes raw rows and needs no Heron.

    heron export runs/faces --format onnx --out faces.onnx
    """
    from heron.api.model import from_pretrained

    from_pretrained(model, trust_code=trust_code).export(out, format, layer, overwrite)
    print(f"{out}: layer {layer}, {out.stat().st_size:,} bytes, checked against the model")
