"""A file through the model: decoded with limits, brought to its input as the shards' rows are."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.config.experiment import load_config
from heron.pipeline.data.batches import Batch
from heron.pipeline.data.reader import Reader
from heron.pipeline.data.streams import open_reader
from heron.pipeline.data.views import Views
from heron.pipeline.models.heterogeneous import Features, Heterogeneous
from heron.pipeline.retrieval.embedder import layer_vectors
from heron.pipeline.retrieval.embeddings import Layer
from heron.pipeline.retrieval.given import NPY, File, look, read, upright, vector_row
from heron.pipeline.training.checkpoint import complete
from heron.pipeline.training.pretrained import from_pretrained, input_shapes, locate
from heron.shards.manifest import MANIFEST, View
from heron.shards.show import DRAWN
from heron.shards.sources.base import sha256

G = TypeVar("G", str, File)


@dataclass(frozen=True)
class Encoder:
    """A model, and the shapes and statistics of the data set that it was trained on.

    Attributes:
        model: for evaluation.
        reader: of the data set, whose pictures are decoded as these are.
        views: makes the model's inputs.
        layer: of the model, whose vectors are wanted.
    """

    model: Heterogeneous
    reader: Reader
    views: Views
    layer: Layer

    @classmethod
    def open(
        cls,
        run: str,
        data: str,
        layer: Layer,
        checkpoint: str,
        data_sha256: str,
        precision: str | None = None,
    ) -> Self:
        """Open the model whose embeddings an index holds.

        Args:
            run: folder of a run, whose newest complete checkpoint is tried first, or a checkpoint.
            data: the shards that were embedded: their manifest has shapes and statistics.
            layer: of the model.
            checkpoint: sha256 of the weights that the index was made with.
            data_sha256: of the manifest of those shards.
            precision: that the model computed in; None: that of the run.

        Raises:
            RetrievalError: the weights or the data are others.
            CheckpointError: there is no checkpoint, or it cannot be read.
            ConfigError, ShardError: there is no such data set, or it does not fit the run.
        """
        folder = _with_weights(run, checkpoint)
        overrides = [f"train.precision={precision}"] if precision else []
        config = load_config(folder / "config.yaml", overrides)
        known = config.data.model_copy(update={"path": data})
        reader = open_reader(known)
        found = hashlib.sha256(reader.store.read_bytes(MANIFEST)).hexdigest()
        if found != data_sha256:
            raise RetrievalError(
                f"{data}: the sha256 of its manifest is {found[:12]}; expected {data_sha256[:12]}, "
                "that of the data set that was embedded; give it (--data), or embed this one"
            )
        views = Views(reader, known, torch.device("cpu"))
        if (wanted := input_shapes(folder)) != (shapes := [list(s) for s in views.shapes]):
            raise RetrievalError(
                f"the views of {data} are {shapes}; expected {wanted}, which the model of {folder} "
                "was trained on; give the data that was embedded (--data)"
            )
        model = from_pretrained(folder)
        model.precision = config.train.precision
        return cls(model, reader, views, layer)

    @property
    def needed(self) -> list[str]:
        """The stored views that the model sees, each once."""
        seen = self.views.views[: self.model.classified]
        return list(dict.fromkeys(view.stored for view in seen))

    def files(self, asked: Sequence[str]) -> dict[str, Path]:
        """Texts such as `PATH`, or `VIEW=PATH` of each view, as a file of each view that is seen.

        Raises:
            RetrievalError: they are not of the views that the model sees, each once.
        """
        found: dict[str, Path] = {}
        lone = [text for text in asked if text.partition("=")[0] not in self.needed]
        if len(asked) == 1 and lone:
            return {name: Path(path) for name, path in self._files(asked[0]).items()}
        for text in asked:
            name, _, path = text.partition("=")
            if text in lone or name in found:
                what = "is given twice" if name in found else "names no view"
                raise RetrievalError(f"--file {text} {what}; expected {self._wanted()}")
            found[name] = Path(path)
        self._files(found)
        return found

    def _wanted(self) -> str:
        return " ".join(f"--file {name}=PATH" for name in self.needed)

    def __call__(self, given: File | Mapping[str, File], row: int = 0) -> NDArray[np.float32]:
        """The embedding of one sample, [dim].

        Args:
            given: path or bytes of its file; of several views, a file each by the view's name.
            row: of an array that has several.

        Raises:
            RetrievalError: a view's file is missing, too large or not what the view is.
        """
        files = self._files(given)
        rows = {name: self._row(self.reader.view(name), files[name], row) for name in self.needed}
        one, none = torch.zeros(1, dtype=torch.int64), torch.empty(0, 0)
        batch = Batch({n: torch.from_numpy(x[None]) for n, x in rows.items()}, none, one, one, [1])
        with torch.inference_mode():
            inputs = self.views(batch, train=False, first=self.model.classified)
            found: Features = self.model(inputs, batch.keys, batch.parts)
            vector = layer_vectors(found, self.layer)[0]
        if not bool(torch.isfinite(vector).all()):
            raise RetrievalError(
                f"layer '{self.layer}' of the file is not finite; expected finite numbers; look at "
                "the values that it holds"
            )
        return np.asarray(vector.float().numpy(), np.float32)

    def _files(self, given: G | Mapping[str, G]) -> Mapping[str, G]:
        """The file of each view."""
        if not isinstance(given, Mapping):
            if len(self.needed) > 1:
                raise RetrievalError(
                    f"one file, but the model sees the views {', '.join(self.needed)}; expected "
                    f"one of each: {self._wanted()}"
                )
            return {self.needed[0]: given}
        if set(given) != set(self.needed):
            raise RetrievalError(
                f"files of the views {', '.join(given) or '(none)'}; expected those that the model "
                f"sees: {self._wanted()}"
            )
        return given

    def _row(self, view: View, file: File, row: int) -> NDArray[Any]:
        """One row of a stored view, out of a file."""
        data, name = read(file)
        if view.kind == "image":
            if data.startswith(NPY):
                raise RetrievalError(
                    f"{name} is an npy file; expected a JPEG or a PNG, as view '{view.name}' holds "
                    "pictures"
                )
            return self._picture(view, data, name)
        if not data.startswith(NPY):
            raise RetrievalError(
                f"{name} begins with {data[:8]!r}; expected an npy file, as view '{view.name}' "
                f"holds vectors of {view.shape[0]:,}"
            )
        return vector_row(np.frombuffer(data, np.uint8), name, row, view.shape[0])

    def _picture(self, view: View, data: bytes, name: str) -> NDArray[np.uint8]:
        """A picture as the reader would give it, had it been in the shards.

        One of the stored size, or of any where the shards' are of several, is decoded by the very
        same code. Others are brought to that size: the largest part about the centre of the same
        shape, resampled. So are those that EXIF says lie otherwise, which are first turned.
        """
        size, turned = look(data, name)
        canvas = self.reader.canvases[view.name]
        in_tar = self.reader.manifest.block_rows is None
        if in_tar and not turned and (canvas.varying or size == view.shape[:2]):
            out = np.empty(canvas.shape, np.uint8)
            try:
                canvas.decode(data, out)
            except ValueError as fault:
                raise RetrievalError(f"{name} {fault}; expected a whole picture") from None
            return out
        height, width, channels = canvas.shape
        if channels not in DRAWN:
            raise RetrievalError(
                f"view '{view.name}' has {channels} channels, which {name} cannot hold; expected a "
                "view of 1 or 3; ask by the key of a sample, or by a vector"
            )
        picture = upright(data, name).convert("L" if channels == 1 else "RGB")
        scale = min(picture.width / width, picture.height / height)
        across, down = max(1, round(width * scale)), max(1, round(height * scale))
        left, top = (picture.width - across) // 2, (picture.height - down) // 2
        part = picture.crop((left, top, left + across, top + down))  # or resizing sees beyond it
        fitted = part.resize((width, height), Image.Resampling.BICUBIC)
        return np.array(fitted).reshape(height, width, channels)


def _with_weights(run: str, wanted: str) -> Path:
    """The checkpoint of a run that has these weights."""
    newest = locate(run)
    found = sha256(newest / "model.safetensors")
    others = [path for path in complete(Path(run) / "checkpoints") if path != newest]
    for path in [] if found == wanted else others:
        if sha256(path / "model.safetensors") == wanted:
            return path
    if found != wanted:
        raise RetrievalError(
            f"{newest} has weights of sha256 {found[:12]}; expected {wanted[:12]}, those that the "
            "index was made with; give their run or checkpoint (--run), or embed and index again"
        )
    return newest
