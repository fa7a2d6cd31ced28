"""Export of a model to one file for other programs: a `torch.export` archive, or ONNX.

The graph includes preprocessing: it standardises vectors, and scales and resizes pictures. Texts
are token ids; the file names the tokenizer. The number of rows is dynamic.
"""

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from heron.base.atomic import new_file
from heron.base.errors import HeronError, InputError
from heron.base.extras import in_a_line, require
from heron.base.shipped import __version__
from heron.data.batches import Batch
from heron.data.decoders import NONE
from heron.data.options import Data
from heron.data.views import Views
from heron.models.heterogeneous import Heterogeneous
from heron.retrieval.embedding_model import ExportLayer, LayerModel, no_layer
from heron.training.signature import Signature

TOLERANCE = 1e-5  # absolute, or relative to the layer's largest number if that is above 1
METADATA = "heron.json"  # extra file of a torch.export archive; in ONNX the property `heron`
TRACED_ROWS, CHECKED_ROWS = 4, 7
Format = Literal["torch", "onnx"]
Rows = dict[str, Tensor]


class ExportError(HeronError):
    """A model cannot be exported."""


class RawLayer(nn.Module):
    """Computes a layer from stored views as evaluation does: no augmentation, no dropout."""

    def __init__(self, model: LayerModel, layer: ExportLayer) -> None:
        """Takes the network and its preprocessing from a model."""
        super().__init__()
        self.network, self.views, self.layer = model.model, model.views, layer

    def forward(self, views: Rows) -> Tensor:
        """Returns float32 [rows, dim] from the stored views by name, each [rows, ...]."""
        return _compute(LayerModel(self.network, self.views), views, self.layer)


def _compute(model: LayerModel, views: Rows, layer: ExportLayer) -> Tensor:
    rows = next(iter(views.values())).shape[0]
    keys = torch.zeros(rows, dtype=torch.int64)  # evaluation draws no numbers
    features = model.features(Batch(views, torch.empty(0, 0), keys, keys, [rows]))
    return LayerModel.layer(features, layer).float()


def export(
    trained: Heterogeneous,
    data: Data,
    signature: Signature,
    out: Path,
    format: Format,
    layer: ExportLayer = "hidden",
    overwrite: bool = False,
) -> None:
    """Writes a file that computes a layer from raw rows without Heron.

    Its inputs have the names of the stored views: float32 [rows, width] for vectors, uint8 [rows,
    height, width, channels] for pictures, int32 [rows, tokens] for texts, padded with -1. Its
    output is float32 [rows, dim]. It computes in float32, whatever `train.precision` is. Before it
    is written, its output for random rows is compared with the model's.

    Args:
        trained: the network to export, which is not changed.
        data: the section of the experiment that trained it, with its views.
        signature: its inputs and labels.
        out: the file, by convention `.pt2` or `.onnx`; it is written atomically.
        format: `torch`, to be called as `torch.export.load(out).module()(views)`; or `onnx`.
        layer: `hidden`, `projection` (unit vectors of the views, concatenated), or `logits`.
        overwrite: move a file that is there aside, to `NAME-1`, instead of refusing it.

    Raises:
        InputError: there is no such format, the model has no such layer, or the file is there.
        ExportError: the model sees graphs, a part of it cannot be traced, or the file computes
            other numbers.
        MissingPackage: ONNX needs the extra `export`.
    """
    if format not in get_args(Format):
        raise InputError(f"format must be 'torch' or 'onnx', got {format!r}")
    network = copy.deepcopy(trained).cpu().float().eval()
    network.precision = "fp32"
    model = LayerModel(network, Views(signature, data, torch.device("cpu")))
    if graphs := [n for n in model.stored if signature.view(n).kind == "graph"]:
        raise ExportError(
            f"view '{graphs[0]}' has graphs, whose encoder cannot be traced; export a model of "
            "numbers or pictures, or use `encode`"
        )
    layers: list[str] = [name for name in model.widths if name != "weight"]
    layers += ["logits"] if network.classifier is not None else []
    if layer not in layers:
        raise no_layer(layer, layers)
    if format == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            require(package, "an export to ONNX")
    graph, rows = RawLayer(model, layer), _draw(signature, model.stored, CHECKED_ROWS)
    with torch.inference_mode():
        expected = _compute(model, rows, layer).numpy()
        network.leave_out_parts(
            lambda: np.array_equal(_compute(model, rows, layer).numpy(), expected)
        )
    with _quiet():
        try:
            program = _trace(graph, _draw(signature, model.stored, TRACED_ROWS))
            write = _onnx if format == "onnx" else _archive
            contents, compute = write(
                program, rows, layer, _describe(signature, model.stored, layer, expected.shape[1])
            )
            computed = compute(rows)
        except Exception as error:  # of torch's tracer, of the converter, of the runtime
            raise ExportError(
                f"cannot export layer '{layer}' to {format}: {in_a_line(error)}; torch.export "
                "must be able to trace the evaluation of all encoders and parts, so check your own"
            ) from error
    difference = float(np.abs(computed - expected).max())
    if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise ExportError(
            f"layer '{layer}' differs by {difference:.1e} after its export to {format}, in "
            f"{CHECKED_ROWS} random rows, and the limit is {TOLERANCE:.0e}, so {out} is not "
            "written; try the other format"
        )
    with new_file(out, overwrite, InputError) as stream:
        stream.write(contents)


def _describe(
    signature: Signature, stored: Sequence[str], layer: ExportLayer, width: int
) -> dict[str, Any]:
    return {
        "heron": __version__,
        "layer": layer,
        "width": width,
        "views": {name: list(rows.shape[1:]) for name, rows in _draw(signature, stored, 1).items()},
        "tokenizers": {
            entry.view.name: entry.text.tokenizer
            for entry in signature.inputs
            if entry.text is not None and entry.view.name in stored
        },
        "labels": signature.label_names,
        "label_kind": signature.label_kind,
    }


def _draw(signature: Signature, stored: Sequence[str], rows: int) -> Rows:
    """Draws rows as shards may hold them: vectors about the mean, noisy pictures, any tokens."""
    generator, drawn = np.random.default_rng(0), Rows()
    inputs = {entry.view.name: entry for entry in signature.inputs}
    for name in stored:
        view, decoded = inputs[name].view, inputs[name].decoded
        if (text := inputs[name].text) is not None:
            ids = generator.integers(signature.vocabulary(name), size=(rows, text.tokens))
            ids[np.arange(text.tokens) >= generator.integers(1, text.tokens + 1, (rows, 1))] = NONE
            drawn[name] = torch.from_numpy(ids.astype(np.int32))
            continue
        if decoded is not None:
            drawn[name] = torch.from_numpy(generator.integers(0, 256, (rows, *decoded), np.uint8))
            continue
        values = generator.normal(size=(rows, *view.shape))
        if view.mean is not None and view.std is not None:
            values = values * np.array(view.std) + np.array(view.mean)
        drawn[name] = torch.from_numpy(values.astype(np.float32))
    return drawn


def _trace(graph: RawLayer, rows: Rows) -> torch.export.ExportedProgram:
    row_count = torch.export.Dim("rows")
    shapes = {"views": {name: {0: row_count} for name in rows}}
    with torch.no_grad():
        return torch.export.export(graph, (rows,), dynamic_shapes=shapes)


Exported = tuple[bytes, Callable[[Rows], NDArray[np.float32]]]  # the file, and how to run it


def _archive(
    program: torch.export.ExportedProgram, rows: Rows, layer: str, metadata: Mapping[str, Any]
) -> Exported:
    """Returns the bytes of a torch.export archive, and a function that runs it reloaded."""
    stream = BytesIO()
    torch.export.save(program, stream, extra_files={METADATA: json.dumps(metadata)})
    loaded = torch.export.load(BytesIO(stream.getvalue())).module()

    def compute(rows: Rows) -> NDArray[np.float32]:
        with torch.no_grad():
            return np.asarray(loaded(rows))

    return stream.getvalue(), compute


def _onnx(
    program: torch.export.ExportedProgram, rows: Rows, layer: str, metadata: Mapping[str, Any]
) -> Exported:
    """Returns the bytes of an ONNX file, and a function that runs it by onnxruntime."""
    import onnxruntime

    exported = torch.onnx.export(
        program, dynamo=True, verbose=False, input_names=list(rows), output_names=[layer]
    )
    assert exported is not None  # dynamo=True always returns a program
    exported.model.producer_name, exported.model.producer_version = "heron", __version__
    exported.model.metadata_props["heron"] = json.dumps(metadata)
    contents = exported.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(contents, providers=["CPUExecutionProvider"])

    def compute(rows: Rows) -> NDArray[np.float32]:
        (output,) = session.run(None, {name: x.numpy() for name, x in rows.items()})
        return np.asarray(output)

    return contents, compute


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the warnings of torch's exporters."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
