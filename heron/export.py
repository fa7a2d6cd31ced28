"""Models as one file for other programs: a `torch.export` archive, or ONNX.

What comes before the network is in the graph: vectors are standardised, pictures scaled and brought
to the model's size. Texts are token ids; the file tells the tokenizer. The number of rows is free.
"""

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import heron
from heron.model import ExportLayer, Model, no_layer
from heron.pipeline.config.errors import InputError
from heron.pipeline.config.extras import require
from heron.pipeline.data.batches import Batch
from heron.pipeline.data.texts import NONE
from heron.pipeline.retrieval.layers import LayerModel
from heron.shards.atomic import atomic_write
from heron.shards.errors import HeronError

TOLERANCE = 1e-5  # of a number, or of the layer's largest where that is above 1
METADATA = "heron.json"  # in a torch.export archive; of ONNX the property `heron`
TRACED_ROWS, CHECKED_ROWS = 4, 7
Format = Literal["torch", "onnx"]
Rows = dict[str, Tensor]


class ExportError(HeronError):
    """A model that cannot be exported."""


class RawLayer(nn.Module):
    """A layer of stored views, as evaluation computes it: nothing is augmented or dropped."""

    def __init__(self, model: LayerModel, layer: ExportLayer) -> None:
        """Keeps the network, and what makes its inputs."""
        super().__init__()
        self.network, self.views, self.layer = model.model, model.views, layer

    def forward(self, views: Rows) -> Tensor:
        """Returns float32 [rows, dim] of the stored views by name, each [rows, ...]."""
        return _compute(LayerModel(self.network, self.views), views, self.layer)


def _compute(model: LayerModel, views: Rows, layer: ExportLayer) -> Tensor:
    rows = next(iter(views.values())).shape[0]
    keys = torch.zeros(rows, dtype=torch.int64)  # evaluation draws no numbers
    found = model.features(Batch(views, torch.empty(0, 0), keys, keys, [rows]))
    return LayerModel.layer(found, layer).float()


def export(model: Model, out: Path, format: Format, layer: ExportLayer = "hidden") -> None:
    """Writes a file that computes a layer of raw rows without Heron.

    Its inputs are named as the stored views: float32 [rows, width], uint8 [rows, height, width,
    channels], or of texts int32 [rows, tokens], -1 behind the last token; its output is float32
    [rows, dim]. It computes in float32, whatever `train.precision` is. What the file gives of drawn
    rows is compared with the model's own first.

    Args:
        model: to export; it stays as it is.
        out: the file, by custom `.pt2` or `.onnx`; it appears whole or not at all.
        format: `torch`, which `torch.export.load(out).module()` calls with a mapping of the views;
            or `onnx`.
        layer: `hidden`, `projection` (unit vectors of the views, side by side), or `logits`.

    Raises:
        InputError: there is no such format, or the model has no such layer.
        ExportError: it sees graphs, a part of it cannot be traced, or the file gives other numbers.
        MissingPackage: ONNX needs the extra `export`.
    """
    if format not in get_args(Format):
        raise InputError(f"format is {format!r}; expected 'torch' or 'onnx'")
    network = copy.deepcopy(model.network).cpu().float().eval()
    network.precision = "fp32"
    model = Model(network, model.config, model.signature, torch.device("cpu"))
    if graphs := [n for n in model.views if model.signature.view(n).kind == "graph"]:
        raise ExportError(
            f"view '{graphs[0]}' holds graphs, whose encoder cannot be traced; expected views of "
            "numbers or pictures; use `encode`"
        )
    there: list[str] = [name for name in model.layers if name != "weight"]
    there += ["logits"] if network.classifier is not None else []
    if layer not in there:
        raise no_layer(layer, there)
    if format == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            require(package, "an export to ONNX")
    graph, rows = RawLayer(model._model, layer), _draw(model, CHECKED_ROWS)
    with torch.inference_mode():
        wanted = _compute(model._model, rows, layer).numpy()
        network.leave_out_parts(
            lambda: np.array_equal(_compute(model._model, rows, layer).numpy(), wanted)
        )
    with _quiet():
        try:
            program = _trace(graph, _draw(model, TRACED_ROWS))
            write = _onnx if format == "onnx" else _archive
            data, compute = write(program, rows, layer, describe(model, layer, wanted.shape[1]))
            found = compute(rows)
        except Exception as error:  # of torch's tracer, of the converter, of the runtime
            raise ExportError(
                f"layer '{layer}' cannot be exported to {format}: {_line(error)}; expected "
                "encoders and parts whose evaluation torch.export can trace; look at your own"
            ) from error
    off = float(np.abs(found - wanted).max())
    if not off <= TOLERANCE * max(1.0, float(np.abs(wanted).max())):
        raise ExportError(
            f"layer '{layer}' differs after its export to {format} by {off:.1e} in {CHECKED_ROWS} "
            f"drawn rows; expected {TOLERANCE:.0e} at most; {out} is not written; try the other "
            "format"
        )
    with atomic_write(out) as stream:
        stream.write(data)


def describe(model: Model, layer: ExportLayer, width: int) -> dict[str, Any]:
    """Returns what the file says of itself, as JSON."""
    return {
        "heron": heron.__version__,
        "layer": layer,
        "width": width,
        "views": {name: list(rows.shape[1:]) for name, rows in _draw(model, 1).items()},
        "tokenizers": {
            one.view.name: one.text.tokenizer
            for one in model.signature.inputs
            if one.text is not None and one.view.name in model.views
        },
        "labels": model.labels,
        "label_kind": model.signature.label_kind,
    }


def _draw(model: Model, rows: int) -> Rows:
    """Returns rows as they may lie in the shards: about the mean, noise, or any tokens."""
    draw, found = np.random.default_rng(0), Rows()
    inputs = {one.view.name: one for one in model.signature.inputs}
    for name in model.views:
        view, decoded = inputs[name].view, inputs[name].decoded
        if (text := inputs[name].text) is not None:
            ids = draw.integers(model.signature.vocabulary(name), size=(rows, text.tokens))
            ids[np.arange(text.tokens) >= draw.integers(1, text.tokens + 1, (rows, 1))] = NONE
            found[name] = torch.from_numpy(ids.astype(np.int32))
            continue
        if decoded is not None:
            found[name] = torch.from_numpy(draw.integers(0, 256, (rows, *decoded), np.uint8))
            continue
        values = draw.normal(size=(rows, *view.shape))
        if view.mean is not None and view.std is not None:
            values = values * np.array(view.std) + np.array(view.mean)
        found[name] = torch.from_numpy(values.astype(np.float32))
    return found


def _trace(graph: RawLayer, rows: Rows) -> torch.export.ExportedProgram:
    free = torch.export.Dim("rows")
    shapes = {"views": {name: {0: free} for name in rows}}
    with torch.no_grad():
        return torch.export.export(graph, (rows,), dynamic_shapes=shapes)


Computed = tuple[bytes, Callable[[Rows], NDArray[np.float32]]]


def _archive(
    program: torch.export.ExportedProgram, rows: Rows, layer: str, facts: Mapping[str, Any]
) -> Computed:
    """Returns the bytes of a torch.export archive, and what they compute when read again."""
    stream = BytesIO()
    torch.export.save(program, stream, extra_files={METADATA: json.dumps(facts)})
    loaded = torch.export.load(BytesIO(stream.getvalue())).module()

    def compute(rows: Rows) -> NDArray[np.float32]:
        with torch.no_grad():
            return np.asarray(loaded(rows))

    return stream.getvalue(), compute


def _onnx(
    program: torch.export.ExportedProgram, rows: Rows, layer: str, facts: Mapping[str, Any]
) -> Computed:
    """Returns the bytes of an ONNX file, and what onnxruntime computes of them."""
    import onnxruntime

    made = torch.onnx.export(
        program, dynamo=True, verbose=False, input_names=list(rows), output_names=[layer]
    )
    assert made is not None  # as it is with dynamo
    made.model.producer_name, made.model.producer_version = "heron", heron.__version__
    made.model.metadata_props["heron"] = json.dumps(facts)
    data = made.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def compute(rows: Rows) -> NDArray[np.float32]:
        (found,) = session.run(None, {name: given.numpy() for name, given in rows.items()})
        return np.asarray(found)

    return data, compute


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out what torch's exporters say of their own insides."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
