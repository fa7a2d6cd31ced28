"""Embeds files: decodes them within limits and prepares them as rows of the shards are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import normalize

from heron.config.errors import RetrievalError
from heron.config.experiment import load_config
from heron.data.batches import Batch
from heron.data.graphs import GraphDecoder
from heron.data.pictures import PictureDecoder
from heron.data.texts import TextDecoder
from heron.retrieval.embedding_model import EmbeddingModel, refuse_options
from heron.retrieval.embeddings import Layer
from heron.retrieval.file_reader import (
    NPY,
    File,
    read_file,
    read_size,
    upright_picture,
    vector_row,
)
from heron.retrieval.index_files import IndexManifest
from heron.shards.errors import ShardError
from heron.shards.manifest import View
from heron.shards.show import DRAWABLE_CHANNELS
from heron.training.checkpoint import complete_checkpoints
from heron.training.pretrained import locate, weights_sha256

FileOrText = TypeVar("FileOrText", str, File)


@dataclass(frozen=True)
class FileEncoder:
    """Embeds files by a layer of a model; decodes pictures as the model's data set does."""

    model: EmbeddingModel
    layer: Layer

    @classmethod
    def open(
        cls,
        run: str,
        data: str,
        index: IndexManifest,
        precision: str | None = None,
        trusted: bool = True,
    ) -> Self:
        """Opens the model whose embeddings an index holds, the newest complete checkpoint first.

        `data` are the shards that were embedded, whose manifest has shapes and statistics;
        `precision` defaults to the run's. `trusted`: see `SamplePictures.open`. Raises a
        RetrievalError if weights or data are not those of the index, and the errors of opening
        them.
        """
        folder = _checkpoint_with(run, index.checkpoint)
        overrides = [f"train.precision={precision}"] if precision else []
        config = load_config(folder / "config.yaml", overrides)
        data_config = config.data.for_data_set(data)
        refuse_options(data_config, trusted)
        config = config.model_copy(update={"data": data_config})
        model = EmbeddingModel.open(folder, config, torch.device("cpu"))
        if (fingerprint := model.reader.manifest.fingerprint) != index.data_fingerprint:
            raise RetrievalError(
                f"{data} has the fingerprint {fingerprint[:19]}; expected "
                f"{index.data_fingerprint[:19]}, that of the data set that was embedded; give it "
                "(--data), or embed this one"
            )
        return cls(model, index.layer)

    def files(self, arguments: Sequence[str]) -> dict[str, Path]:
        """Parses `PATH`, or one `VIEW=PATH` for each view of the model; else RetrievalError."""
        files: dict[str, Path] = {}
        without_view = [a for a in arguments if a.partition("=")[0] not in self.model.stored]
        if len(arguments) == 1 and without_view:
            return {name: Path(path) for name, path in self._by_view(arguments[0]).items()}
        for argument in arguments:
            name, _, path = argument.partition("=")
            if argument in without_view or name in files:
                fault = "is given twice" if name in files else "names no view"
                raise RetrievalError(f"--file {argument} {fault}; expected {self._expected()}")
            files[name] = Path(path)
        self._by_view(files)
        return files

    def _expected(self) -> str:
        return " ".join(f"--file {name}=PATH" for name in self.model.stored)

    def _by_view(self, files: FileOrText | Mapping[str, FileOrText]) -> Mapping[str, FileOrText]:
        stored = self.model.stored
        if not isinstance(files, Mapping):
            if len(stored) > 1:
                raise RetrievalError(
                    f"one file, but the model sees the views {', '.join(stored)}; expected "
                    f"one of each: {self._expected()}"
                )
            return {stored[0]: files}
        is_subset = self.layer == "projection" and files and set(files) <= set(stored)
        if set(files) != set(stored) and not is_subset:
            raise RetrievalError(
                f"files of the views {', '.join(files) or '(none)'}; expected those that the model "
                f"sees: {self._expected()}"
            )
        return files

    def __call__(self, files: File | Mapping[str, File], row: int = 0) -> NDArray[np.float32]:
        """Returns the embedding of one sample, [dim], from a file of each view.

        For projections some of the views suffice, such as a picture alone. Their normalised sum is
        put in the place of each missing view, and zeros in their own, so that the product with a
        sample's projections is the sum of that vector's cosines with the sample's other views.

        Raises a RetrievalError if a view's file is missing, too large or not of the view's kind.
        """
        view_of = self.model.reader.view
        rows = {n: self._row(view_of(n), file, row) for n, file in self._by_view(files).items()}
        zero, no_rows = torch.zeros(1, dtype=torch.int64), torch.empty(0, 0)
        decoders = self.model.reader.decoders
        empty = {n: np.zeros(decoders[n].shape, decoders[n].dtype) for n in self.model.stored}
        stored = {n: torch.from_numpy(array[None]) for n, array in (empty | rows).items()}
        batch = Batch(stored, no_rows, zero, zero, [1])
        vector = self.model.forward(batch, [self.layer])[self.layer][0].float()
        if set(rows) < set(empty):
            views = self.model.views.views[: self.model.model.classified]
            is_given = torch.tensor([view.stored in rows for view in views])
            by_view = vector.view(len(views), -1)
            direction = normalize(by_view[is_given].sum(0), dim=0)
            vector = torch.where(is_given[:, None], torch.zeros(()), direction).flatten()
        if not bool(torch.isfinite(vector).all()):
            raise RetrievalError(
                f"layer '{self.layer}' of the file is not finite; expected finite numbers; look at "
                "the values that it holds"
            )
        return np.asarray(vector.numpy(), np.float32)

    def _row(self, view: View, file: File, row: int) -> NDArray[Any]:
        data, name = read_file(file)
        if view.kind == "image":
            if data.startswith(NPY):
                raise RetrievalError(
                    f"{name} is an npy file; expected a JPEG or a PNG, as view '{view.name}' holds "
                    "pictures"
                )
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
        """Returns the token ids of a text, or the row of a graph from the bytes of a tar member."""
        decoder = self.model.reader.decoders[view.name]
        assert isinstance(decoder, TextDecoder | GraphDecoder)
        row = np.empty(decoder.shape, np.int32)
        try:
            decoder.decode(data, row)
        except (ValueError, ShardError) as fault:
            remedy = "; expected a graph, as its member of a tar" * (view.kind == "graph")
            raise RetrievalError(f"{name} {fault}{remedy}") from None
        return row

    def text(self, text: str) -> NDArray[np.float32]:
        """Returns a vector, [dim], that is nearest to samples whose other views match a text.

        Raises a RetrievalError if the model sees no text, or the index is of another layer.
        """
        reader = self.model.reader
        texts = [name for name in self.model.stored if reader.view(name).kind == "text"]
        if not texts or self.layer != "projection":
            fault = f"of layer '{self.layer}'" if texts else "of a model that sees no text"
            raise RetrievalError(
                f"the index is {fault}; a text is compared with the projections of other views: "
                "expected an index of --layer projection, and a model with a view of text"
            )
        return self({texts[0]: text.encode()})

    def _picture(self, view: View, data: bytes, name: str) -> NDArray[np.uint8]:
        """Returns a picture as the reader would, had it been in the shards.

        A picture of the stored size, or of any size if the shards' vary, is decoded by the very
        same code. Others are centre-cropped to the stored aspect ratio and resampled.
        """
        size = read_size(data, name)
        decoder, reader = self.model.reader.decoders[view.name], self.model.reader
        assert isinstance(decoder, PictureDecoder)
        in_tar = reader.manifest.block_rows is None
        if in_tar and (decoder.varying or size == view.shape[:2]):
            out = np.empty(decoder.shape, np.uint8)
            try:
                decoder.decode(data, out)
            except ValueError as fault:
                raise RetrievalError(f"{name} {fault}; expected a whole picture") from None
            return out
        height, width, channels = decoder.shape
        if channels not in DRAWABLE_CHANNELS:
            raise RetrievalError(
                f"view '{view.name}' has {channels} channels, which {name} cannot hold; expected a "
                "view of 1 or 3; ask by the key of a sample, or by a vector"
            )
        picture = upright_picture(data, name).convert("L" if channels == 1 else "RGB")
        scale = min(picture.width / width, picture.height / height)
        crop_width, crop_height = max(1, round(width * scale)), max(1, round(height * scale))
        left, top = (picture.width - crop_width) // 2, (picture.height - crop_height) // 2
        # Crop first: with a box, `resize` would also see pixels around it.
        cropped = picture.crop((left, top, left + crop_width, top + crop_height))
        resized = cropped.resize((width, height), Image.Resampling.BICUBIC)
        return np.array(resized).reshape(height, width, channels)


def _checkpoint_with(run: str, sha256: str) -> Path:
    newest = locate(run)
    folders = dict.fromkeys([newest, *complete_checkpoints(Path(run) / "checkpoints")])
    matches = (path for path in folders if weights_sha256(path) == sha256)
    if (folder := next(matches, None)) is None:
        newest_sha256 = weights_sha256(newest)
        raise RetrievalError(
            f"{newest} has weights of sha256 {newest_sha256[:12]}; expected {sha256[:12]}, those "
            "that the index was made with; give their run or checkpoint (--run), or embed and "
            "index again"
        )
    return folder
