"""A file through the model: decoded with limits, brought to its input as the shards' rows are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import normalize

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.config.experiment import load_run_config
from heron.pipeline.data.batches import Batch
from heron.pipeline.data.graphs import GraphDecoder
from heron.pipeline.data.pictures import PictureDecoder
from heron.pipeline.data.texts import TextDecoder
from heron.pipeline.retrieval.embeddings import Layer
from heron.pipeline.retrieval.given import NPY, File, look, read, upright, vector_row
from heron.pipeline.retrieval.index_files import IndexManifest
from heron.pipeline.retrieval.layers import EmbeddingModel, refuse_options
from heron.pipeline.training.checkpoint import complete
from heron.pipeline.training.pretrained import locate, weights_sha256
from heron.shards.errors import ShardError
from heron.shards.manifest import View
from heron.shards.show import DRAWN


@dataclass(frozen=True)
class FileEncoder:
    """Embeds files by a layer of a model; pictures are decoded as those of its data set are."""

    model: EmbeddingModel
    layer: Layer

    @classmethod
    def open(
        cls,
        run: str,
        data: str,
        index: IndexManifest,
        precision: str | None = None,
        own: bool = True,
    ) -> Self:
        """Opens the model whose embeddings an index holds.

        Of a run, the newest complete checkpoint is tried first. `data` are the shards that were
        embedded, whose manifest has shapes and statistics; `precision` is by default the run's.
        `own`: see `SamplePictures.open`.

        Raises:
            RetrievalError: the weights or the data are others.
            CheckpointError, ConfigError, ShardError: model or data cannot be opened.
        """
        folder = _with_weights(run, index.checkpoint)
        overrides = [f"train.precision={precision}"] if precision else []
        config = load_run_config(folder / "config.yaml", overrides)
        known = config.data.at(data)
        refuse_options(known, own)
        config = config.model_copy(update={"data": known})
        model = EmbeddingModel.open(folder, config, torch.device("cpu"))
        if (found := model.reader.manifest.fingerprint) != index.data_fingerprint:
            raise RetrievalError(
                f"{data} has the fingerprint {found[:19]}; expected {index.data_fingerprint[:19]}, "
                "that of the data set that was embedded; give it (--data), or embed this one"
            )
        return cls(model, index.layer)

    def files(self, asked: Sequence[str]) -> dict[str, Path]:
        """Reads `PATH`, or `VIEW=PATH` of each view, as a file of each view that is seen.

        Raises:
            RetrievalError: one is of no view that the model sees, or of the same as another.
        """
        found: dict[str, Path] = {}
        for text in asked:
            name, _, path = text.partition("=")
            known = name in self.model.stored
            if not known and len(asked) == 1:
                return dict.fromkeys(self._by_view(text), Path(text))
            if not known or name in found:
                what = "is given twice" if known else "names no view"
                raise RetrievalError(f"--file {text} {what}; expected {self._wanted()}")
            found[name] = Path(path)
        return found

    def _wanted(self) -> str:
        return " ".join(f"--file {name}=PATH" for name in self.model.stored)

    def _by_view(self, given: File | Mapping[str, File]) -> Mapping[str, File]:
        """Returns the file of each view."""
        stored = self.model.stored
        if not isinstance(given, Mapping):
            if len(stored) > 1:
                raise RetrievalError(
                    f"one file, but the model sees the views {', '.join(stored)}; expected "
                    f"one of each: {self._wanted()}"
                )
            return {stored[0]: given}
        some = self.layer == "projection" and given and set(given) <= set(stored)
        if set(given) != set(stored) and not some:
            raise RetrievalError(
                f"files of the views {', '.join(given) or '(none)'}; expected those that the model "
                f"sees: {self._wanted()}"
            )
        return given

    def __call__(self, given: File | Mapping[str, File], row: int = 0) -> NDArray[np.float32]:
        """Returns the embedding of one sample, [dim], out of the file of each view.

        Of projections some views will do, such as a picture alone: they stand in the place of the
        others, so that the product with a sample's projections is the sum of the cosines of its
        other views with them.

        Raises:
            RetrievalError: a view's file is missing, too large or not what the view is.
        """
        view = self.model.reader.view
        rows = {n: self._row(view(n), file, row) for n, file in self._by_view(given).items()}
        one, none = torch.zeros(1, dtype=torch.int64), torch.empty(0, 0)
        decoders = self.model.reader.decoders
        empty = {n: np.zeros(decoders.shape(n), decoders.dtype(n)) for n in self.model.stored}
        stored = {n: torch.from_numpy(array[None]) for n, array in (empty | rows).items()}
        batch = Batch(stored, none, one, one, [1])
        vector = self.model.forward(batch, [self.layer])[self.layer][0].float()
        if set(rows) < set(empty):
            views = self.model.views.views[: self.model.model.classified]
            given_ones = torch.tensor([one.stored in rows for one in views])
            parts = vector.view(len(views), -1)
            known = normalize(parts[given_ones].sum(0), dim=0)
            vector = torch.where(given_ones[:, None], torch.zeros(()), known).flatten()
        if not bool(torch.isfinite(vector).all()):
            raise RetrievalError(
                f"layer '{self.layer}' of the file is not finite; expected finite numbers; look at "
                "the values that it holds"
            )
        return np.asarray(vector.numpy(), np.float32)

    def _row(self, view: View, file: File, row: int) -> NDArray[Any]:
        """Returns one row of a stored view, out of a file."""
        data, name = read(file)
        if view.kind == "image":
            return self._picture(view, data, name)
        if view.kind in ("text", "graph"):
            return self._decoded(view, data, name)
        if not data.startswith(NPY):
            raise RetrievalError(
                f"{name} begins with {data[:8]!r}; expected an npy file, as view '{view.name}' "
                f"holds vectors of {view.shape[0]:,}"
            )
        return vector_row(np.frombuffer(data, np.uint8), name, row, view.shape[0])

    def _decoded(self, view: View, data: bytes, name: str) -> NDArray[np.int32]:
        """Returns the token ids of a text, or the row of a graph out of its member of a tar."""
        decoder = self.model.reader.decoders[view.name]
        assert isinstance(decoder, TextDecoder | GraphDecoder)
        row = np.empty(decoder.shape, np.int32)
        try:
            decoder.decode(data, row)
        except (ValueError, ShardError) as fault:
            wanted = "; expected a graph, as its member of a tar" * (view.kind == "graph")
            raise RetrievalError(f"{name} {fault}{wanted}") from None
        return row

    def text(self, text: str) -> NDArray[np.float32]:
        """Returns what finds samples whose other views are near to a text, [dim].

        Raises:
            RetrievalError: the model sees no text, or the index is of another layer.
        """
        reader = self.model.reader
        texts = [name for name in self.model.stored if reader.view(name).kind == "text"]
        if not texts or self.layer != "projection":
            what = f"of layer '{self.layer}'" if texts else "of a model that sees no text"
            raise RetrievalError(
                f"the index is {what}; a text is compared with the projections of other views: "
                "expected an index of --layer projection, and a model with a view of text"
            )
        return self({texts[0]: text.encode()})

    def _picture(self, view: View, data: bytes, name: str) -> NDArray[np.uint8]:
        """Returns a picture as the reader would give it, had it been in the shards.

        One of the stored size, or of any where the shards' are of several, is decoded by the very
        same code. Others are brought to that size: the largest part about the centre of the same
        shape, resampled. So are those that EXIF says lie otherwise, which are first turned.
        """
        size, turned = look(data, name)
        decoder, reader = self.model.reader.decoders[view.name], self.model.reader
        assert isinstance(decoder, PictureDecoder)
        in_tar = reader.manifest.block_rows is None
        if in_tar and not turned and (decoder.varying or size == view.shape[:2]):
            out = np.empty(decoder.shape, np.uint8)
            try:
                decoder.decode(data, out)
            except ValueError as fault:
                raise RetrievalError(f"{name} {fault}; expected a whole picture") from None
            return out
        height, width, channels = decoder.shape
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
    """Finds the checkpoint of a run that has these weights."""
    newest = locate(run)
    folders = dict.fromkeys([newest, *complete(Path(run) / "checkpoints")])
    found = (path for path in folders if weights_sha256(path) == wanted)
    if (folder := next(found, None)) is None:
        other = weights_sha256(newest)
        raise RetrievalError(
            f"{newest} has weights of sha256 {other[:12]}; expected {wanted[:12]}, those that the "
            "index was made with; give their run or checkpoint (--run), or embed and index again"
        )
    return folder
