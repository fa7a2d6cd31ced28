"""Embeds files: decodes them within limits and prepares them as rows of the shards are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from heron.base.errors import InputError, RetrievalError, ShardError
from heron.data.batches import Batch
from heron.data.decoders import TextDecoder
from heron.data.graphs import GraphDecoder
from heron.data.pictures import PictureDecoder
from heron.experiment.config import load_saved
from heron.retrieval.embedding_model import EmbeddingModel, refuse_options
from heron.retrieval.embeddings import Layer, compared
from heron.retrieval.file_reader import NPY, File, read_file, read_size, upright_picture, vector_row
from heron.retrieval.index_files import IndexManifest
from heron.shards.manifest import View, load_manifest
from heron.shards.show import DRAWABLE_CHANNELS
from heron.training.checkpoint import complete_checkpoints
from heron.training.pretrained import locate, weights_sha256


@dataclass(frozen=True)
class FileVector:
    """The embedding of a sample that files were given of."""

    vector: NDArray[np.float32]  # [dim], zeros for missing views
    given: list[str]  # stored views
    missing: list[str]  # the others that the model sees
    lacking: Sequence[str]  # views that the samples of the index lack
    columns: NDArray[np.bool_] | None  # the numbers of the given views, [dim]; None: all
    compared: NDArray[np.bool_] | None  # of those that the samples have too; None: all
    scale: float = 1.0  # of the given views' numbers by those of samples, since others are missing

    @property
    def compares(self) -> str:
        """What a query compares, in words; "" if it is everything."""
        given = [name for name in self.given if name not in self.lacking]
        if not given:
            raise RetrievalError(
                f"the samples have no {', '.join(self.given)}, and no other view is given; pass a "
                f"file of {', '.join(self.others)}, or use --across on an index of --layer "
                "projection"
            )
        return compared(given, self.others, self.lacking)

    @property
    def others(self) -> list[str]:
        """The views that the samples have and the files are not of."""
        return [name for name in self.missing if name not in self.lacking]


@dataclass(frozen=True)
class FileEncoder:
    """Embeds files by a layer of a model; decodes pictures as the model's data set does."""

    model: EmbeddingModel
    layer: Layer
    lacking: Sequence[str] = ()  # views that the samples lack

    @classmethod
    def open(
        cls,
        run: str,
        data: str,
        index: IndexManifest,
        precision: str | None = None,
        trusted: bool = True,
        trust_code: bool = False,
    ) -> Self:
        """Opens the model whose embeddings an index holds, the newest complete checkpoint first.

        `data` are the shards that were embedded, whose manifest has shapes and statistics;
        `precision` defaults to the run's. `trusted` and `trust_code`: see `SamplePictures.open`.
        Raises a RetrievalError if weights or data are not those of the index, and the errors of
        opening them.
        """
        folder = _checkpoint_with(run, index.checkpoint)
        overrides = [f"train.precision={precision}"] if precision else []
        config = load_saved(folder, overrides, trust_code)
        data_config = config.data.for_data_set(data)
        refuse_options(data_config, trusted)
        config = config.model_copy(update={"data": data_config})
        model = EmbeddingModel.open(folder, config, torch.device("cpu"), trust_code)
        if (fingerprint := model.reader.manifest.fingerprint) != index.data_fingerprint:
            raise RetrievalError(
                f"{data} has the fingerprint {fingerprint[:19]}, but the data set that was "
                f"embedded has {index.data_fingerprint[:19]}; pass that one with --data, or embed "
                "this one"
            )
        return cls(model, index.layer, index.missing)

    def files(self, arguments: Sequence[str], row: int = 0) -> dict[str, Path]:
        """Parses `VIEW=PATH`, or `PATH` where one view alone can read it, for some of the views.

        Raises a RetrievalError that says which views there are, if an argument names none.
        """
        files: dict[str, Path] = {}
        stored = self.model.stored
        for argument in arguments:
            name, equals, path = argument.partition("=")
            if name not in stored or not equals:
                path = argument
                if len(stored) > 1 and equals and not Path(argument).exists():
                    raise RetrievalError(
                        f"--file {argument}: no view named '{name}'; use one of "
                        f"{', '.join(f'{view}=PATH' for view in stored)}"
                    )
                name = self._view_that_reads(path, row)
            if name in files:
                raise RetrievalError(
                    f"--file {argument}: view '{name}' already has a file; pass one file for each "
                    "view"
                )
            files[name] = Path(path)
        return files

    def _view_that_reads(self, file: File, row: int) -> str:
        """Returns the only view that a file fits; else a RetrievalError."""
        stored, faults = self.model.stored, dict[str, str]()
        if len(stored) == 1:
            return stored[0]
        for name in stored:
            try:
                self._row(self.model.reader.view(name), file, row)
            except RetrievalError as fault:
                faults[name] = str(fault)
        fits, said = [name for name in stored if name not in faults], read_file(file)[1]
        if not fits:
            listed = "; ".join(f"'{name}': {fault}" for name, fault in faults.items())
            raise RetrievalError(f"{said} fits none of the views: {listed}")
        if len(fits) > 1:
            raise RetrievalError(
                f"{said} fits several views ({', '.join(fits)}); say which: VIEW=PATH"
            )
        return fits[0]

    def __call__(self, files: File | Mapping[str, File], row: int = 0) -> FileVector:
        """Embeds one sample from a file for some or all of its views.

        A missing view is treated as in training: see `Heterogeneous.embed`. A file without the name
        of its view is that of the only view that can read it.

        Raises a RetrievalError if a file is missing, too large or not of the view's kind, or if
        there is no file or no such view.
        """
        model, view_of = self.model, self.model.reader.view
        if not isinstance(files, Mapping):
            files = {self._view_that_reads(files, row): files}
        try:
            present = model.present(files, 1)
        except InputError as fault:
            raise RetrievalError(str(fault)) from None
        several = len(files) > 1
        rows = {n: self._row(view_of(n), file, row, several) for n, file in files.items()}
        zero, no_rows = torch.zeros(1, dtype=torch.int64), torch.empty(0, 0)
        decoders = model.reader.decoders
        empty = {n: np.zeros(decoders[n].shape, decoders[n].dtype) for n in model.stored}
        stored = {n: torch.from_numpy(array[None]) for n, array in (empty | rows).items()}
        batch = Batch(stored, no_rows, zero, zero, [1], present=present)
        vector = model.forward(batch, [self.layer])[self.layer][0].float()
        if not bool(torch.isfinite(vector).all()):
            raise RetrievalError(
                f"layer '{self.layer}' of the file has NaN or infinite values; check the values in "
                "the file"
            )
        array = np.asarray(vector.numpy(), np.float32)
        missing = [name for name in model.stored if name not in files]
        if present is None and not self.lacking:
            return FileVector(array, [*files], [], [], None, None)
        given = torch.tensor([name in files for name in model.stored_by_view])
        there = torch.tensor([name not in self.lacking for name in model.stored_by_view])
        scale = int(there.sum()) / int(given.sum()) if self.layer == "hidden" else 1.0
        own, both = (model.columns(self.layer, flags) for flags in (given, given & there))
        return FileVector(array, [*files], missing, self.lacking, own, both, scale)

    def across(self, found: FileVector) -> NDArray[np.float32]:
        """Returns a vector, [dim], that is nearest to samples whose other views match a file's.

        The normalised sum of its projections is put in the place of each missing view, and zeros in
        their own, so that the product with a sample's projections is the sum of that vector's
        cosines with the sample's other views. Raises a RetrievalError if no view is missing, or the
        index is of another layer.
        """
        if self.layer != "projection" or found.columns is None or not found.others:
            fault = f"is of layer '{self.layer}'" if found.others else "has no other views"
            raise RetrievalError(
                f"cannot compare files of {', '.join(found.given)} with the samples' other views, "
                f"because the index {fault}; use an index of --layer projection, and a model that "
                "sees more views than these"
            )
        views = self.model.model.classified
        given = found.columns.reshape(views, -1)
        direction = found.vector.reshape(views, -1)[given[:, 0]].sum(0)
        direction /= max(float(np.linalg.norm(direction)), 1e-12)
        others = np.array([name in found.others for name in self.model.stored_by_view])
        return np.where(others[:, None], direction, np.float32(0)).reshape(-1)

    def _row(self, view: View, file: File, row: int, several: bool = False) -> NDArray[Any]:
        """Returns a file's row of a view; `several` says that messages must name the view."""
        data, name = read_file(file)
        if several and isinstance(file, bytes):
            name += f" of view '{view.name}'"
        if view.kind == "image":
            if data.startswith(NPY):
                raise RetrievalError(
                    f"{name} is an npy file, but view '{view.name}' needs a picture"
                )
            return self._picture(view, data, name)
        if view.kind in ("text", "graph"):
            return self._decoded(view, data, name)
        if not data.startswith(NPY):
            raise RetrievalError(
                f"{name} must be an npy file, because view '{view.name}' has vectors of "
                f"{view.shape[0]:,} numbers, but it begins with {data[:8]!r}"
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
            remedy = "; pass a graph in the form that a tar has it" * (view.kind == "graph")
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
                f"the index is {fault}, but a text is compared with the projections of other "
                "views; use an index of --layer projection, and a model with a view of text"
            )
        return self.across(self({texts[0]: text.encode()}))

    def _picture(self, view: View, data: bytes, name: str) -> NDArray[np.uint8]:
        """Returns a picture as the reader would return it from the shards.

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
                raise RetrievalError(f"{name} {fault}; pass a complete picture") from None
            return out
        height, width, channels = decoder.shape
        if channels not in DRAWABLE_CHANNELS:
            raise RetrievalError(
                f"view '{view.name}' has {channels} channels, but {name} can only have 1 or 3; "
                "query by the key of a sample, or by a vector"
            )
        picture = upright_picture(data, name).convert("L" if channels == 1 else "RGB")
        scale = min(picture.width / width, picture.height / height)
        crop_width, crop_height = max(1, round(width * scale)), max(1, round(height * scale))
        left, top = (picture.width - crop_width) // 2, (picture.height - crop_height) // 2
        # Crop first: with a box, `resize` would also see pixels around it.
        cropped = picture.crop((left, top, left + crop_width, top + crop_height))
        resized = cropped.resize((width, height), Image.Resampling.BICUBIC)
        return np.array(resized).reshape(height, width, channels)


def input_kinds(run: str, data: str, trust_code: bool = False) -> dict[str, str]:
    """Returns the kind of each stored view that a run's model sees, without opening the model.

    Raises a CheckpointError without a run, and a ShardError without shards.
    """
    kinds = {view.name: view.kind for view in load_manifest(data).views}
    config = load_saved(locate(run), (), trust_code)
    seen = config.data.views[: 1 if config.model.classify_on == "first_view" else None]
    return {view.stored: kinds[view.stored] for view in seen if view.stored in kinds}


def _checkpoint_with(run: str, sha256: str) -> Path:
    newest = locate(run)
    folders = dict.fromkeys([newest, *complete_checkpoints(Path(run) / "checkpoints")])
    matches = (path for path in folders if weights_sha256(path) == sha256)
    if (folder := next(matches, None)) is None:
        newest_sha256 = weights_sha256(newest)
        raise RetrievalError(
            f"{newest} has weights of sha256 {newest_sha256[:12]}, but the index was made with "
            f"{sha256[:12]}; pass the run or checkpoint of those with --run, or embed and index "
            "again"
        )
    return folder
