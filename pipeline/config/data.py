"""Sections of an experiment that say what it is trained on: data, protocol, views, batches."""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from heron.pipeline.config.augmentations import Augmentations
from heron.pipeline.config.endless import WebDataset
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.sections import BelowOne, Natural, PathText, Positive, Section, Share
from heron.shards.artefact import MANIFEST, Count, Fingerprint
from heron.shards.remote import SECRET


class Protocol(Section):
    """Which rows are labelled, which unlabelled, which choose a configuration and which test it.

    With `folds`, the labelled rows are fold number `fold` of a stratified split into `folds`;
    without, `labelled` rows are drawn with (`seed`, `fold`). The other rows are unlabelled. With
    `test: fold`, it is the other way round: fold number `fold` is tested, and the other folds are
    labelled; folds are shuffled, anew for every `folds` of them. With `validation`, a share of the
    labelled rows is neither trained on, nor as an unlabelled row, nor tested. With
    `complementary`, training sees of each labelled row so many classes that it is not.

    Attributes:
        labelled: how many rows of the split are labelled; `all`: every row.
        folds: folds that the rows are split into, stratified by their labels; null: rows are drawn.
        fold: the fold that is labelled, or the number of the draw.
        seed: of the split into folds, or of the draw.
        complementary: classes that a labelled row is not, which training sees in place of its own;
            null: training sees the labels.
        test: rows that are tested on: `unlabelled`, `fold`, or a split of the data set.
        hide_views: share of all rows from which a stored view is hidden, by its name, for studies;
            which rows is drawn by (`seed`, row), and each keeps a view.
        hide_labels: share of the single labels of labelled rows that is hidden from training, of
            the rows of `hide_label_rows`, for studies, drawn likewise; a row keeps a label.
        hide_label_rows: share of the labelled rows that labels are hidden from.
        partial_rows: whether rows that lack a view that the model sees, and labelled rows that lack
            a label, are trained on (`keep`) or not (`drop`); they are tested in either case.
        validation: share of the labelled rows, stratified by their labels, that is kept for
            validation; the test rows are then scored at the run's end alone.
        stratified: whether the `labelled` rows that are drawn have each label in its proportion.
    """

    labelled: Natural | Literal["all"] = "all"
    folds: Annotated[Natural, Field(ge=2)] | None = None
    fold: Count = 0
    seed: Count = 0
    complementary: Natural | None = None
    test: str = "unlabelled"
    hide_views: dict[str, BelowOne] = {}
    hide_labels: BelowOne = 0.0
    hide_label_rows: Annotated[float, Field(gt=0, le=1)] = 1.0
    partial_rows: Literal["keep", "drop"] = "keep"
    validation: BelowOne = 0.0
    stratified: bool = False

    @model_validator(mode="after")
    def _one_way(self) -> "Protocol":
        if self.folds is not None and self.labelled != "all":
            raise ValueError("give either folds (a fold is labelled) or labelled (a count is)")
        if self.test == "fold" and self.folds is None:
            raise ValueError("test is 'fold', but folds is not there; expected how many: folds: 10")
        if self.folds is not None and self.fold >= self.folds and self.test != "fold":
            raise ValueError(f"fold is {self.fold}; expected 0 to {self.folds - 1}")
        return self


class BatchRows(Section):
    """Rows of the global batch, over all processes.

    Attributes:
        labelled: labelled rows of a step, over all processes; 0: none are read.
        unlabelled: unlabelled rows of a step, over all processes.
    """

    labelled: Count | Literal["all"]
    unlabelled: Count | Literal["all"] = 0


class ModelView(Section):
    """One view the model sees: a stored view of the sample and what is done to it in training.

    Attributes:
        stored: name of a view of the data set.
        name: of the view, by which `model.encoders` knows it; null: `stored`, then `stored-2`, ….
        size: height and width that pictures are resized to, one number for both; null: as stored.
        augment: what is done to the view in training, in this order: crop, color, flip, blur,
            noise, `simclr` for three of them; drop_nodes, perturb_edges, mask_nodes, subgraph; or
            the dotted path of your own.
        tokens: of a text, at most.
        tokenizer: of texts: path of a tokenizer.json, or `bytes`, which needs none.
    """

    stored: str
    name: str | None = None
    size: Annotated[list[Natural], Field(min_length=2, max_length=2)] | None = None
    augment: Augmentations = []
    tokens: Annotated[Natural, Field(le=2**14)] = 77
    tokenizer: PathText = "bytes"

    @field_validator("size", mode="before")
    @classmethod
    def _square(cls, value: Any) -> Any:
        return [value, value] if isinstance(value, int) else value


class Cache(Section):
    """Where remote shards are kept, and how many bytes of them.

    Attributes:
        dir: folder that remote shards are kept in; null: see `heron.shards.cache`.
        bytes: most bytes that are kept there; null: see `heron.shards.cache`.
    """

    dir: PathText | None = None
    bytes: Natural | None = None


class SourceShare(Section):
    """A data set that batches take a share of.

    Attributes:
        path: folder of shards, or a URL.
        weight: its share of every batch is this of the sum of all weights.
    """

    path: Annotated[PathText, Field(min_length=1)]
    weight: Positive = 1.0


# In a URL that is not the whole text: behind `pipe:` and a command, or behind `simplecache::`.
PASSWORD = re.compile(r"://[^/?#\s]*:[^/?#\s]+@")


def _or_nothing(path: Any) -> Any:
    """Returns "" for null, with which an override takes a file's path out."""
    return "" if path is None else path


class Data(Section):
    """Shards, the protocol over their rows, and the two streams drawn from them.

    Attributes:
        path: folder of shards, or a URL: s3, https, hf, gs; may be left out with `webdataset`.
        sources: instead of path, data sets of the same views and labels, of each of which every
            batch takes a share, by their weights; null: the one at path.
        balance: `labels`: labelled rows are drawn of each class, or of each label, in turn; null:
            each row once an epoch.
        webdataset: a stream of tars without an index, which the run then trains on.
        fingerprint: of the data set, by `heron shards show`; any other is refused. null: any.
        build: source and options that build shards that are not there; null: they must be there.
        split: rows that are trained on, labelled or not.
        roles: folder of `heron shards protocol`, which wrote the role of each row; null: they are
            found at the start, which reads the labels of all rows where the protocol needs them.
        views: what the model sees of a sample.
        standardise: whether vectors are standardised by the training rows' means and standard
            deviations.
        epoch: stream whose rows make an epoch.
        canonical_streams: streams that a batch is drawn from, whatever the number of processes;
            null: the most, up to 64, that divide the batch.
        window_rows: rows that are shuffled together.
        workers: processes that read beside each training process; 0: it reads itself. auto: for
            pictures beside a GPU the cores that a training process has to itself but one, 16 at
            most, and beside a CPU a quarter of them; for what needs no decoding 1 and 0.
        verify: whether every shard's checksum is compared before the first step, once a file.
        draft: whether JPEGs are decoded at 1/2, 1/4 or 1/8 of their size if that enlarges no view.
        decode_size: side of the square that pictures of several sizes are decoded to; null: of one.
        on_error: a row that cannot be read gives its place to another (`skip`) or ends the run.
        max_bad_fraction: share of all rows that may be bad before `skip` ends the run.
        storage_options: options of fsspec, which holds no credentials: those are the environment's.
    """

    path: Annotated[PathText, BeforeValidator(_or_nothing)] = ""
    sources: Annotated[list[SourceShare], Field(min_length=1)] | None = None
    balance: Literal["labels"] | None = None
    webdataset: WebDataset | None = None
    fingerprint: Fingerprint | None = None
    build: dict[str, Any] | None = None
    split: str = "train"
    protocol: Protocol = Protocol()
    roles: PathText | None = None
    batch: BatchRows
    views: Annotated[list[ModelView], Field(min_length=1)]
    standardise: bool = False
    epoch: Literal["labelled", "unlabelled"] = "unlabelled"
    canonical_streams: Natural | None = None
    window_rows: Natural = 16384
    workers: Count | Literal["auto"] = 0
    verify: bool = True
    draft: bool = True
    decode_size: Natural | None = None
    on_error: Literal["raise", "skip"] = "raise"
    max_bad_fraction: Share = 0.01
    cache: Cache = Cache()
    storage_options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _some_data(self) -> "Data":
        others = [k for k in ("path", "webdataset", "build") if getattr(self, k)]
        if self.sources is not None and others:
            raise ValueError(
                f"sources and {others[0]} are both given; expected one of them: set the other "
                "to null"
            )
        if self.balance is not None and self.webdataset is not None:
            raise ValueError("balance needs an index, and webdataset has none; leave it out")
        if not self.path and self.webdataset is None and self.sources is None:
            raise ValueError("path is missing; expected a folder of shards or a URL: path=FOLDER")
        if not self.path and self.build is not None:
            raise ValueError("build needs path, the folder to build in")
        if not self.path and self.webdataset is not None and not self.webdataset.views:
            raise ValueError(
                "webdataset has neither image nor vector; expected the members of a sample that "
                "are views, such as image: [jpg], or path, a data set with the same members"
            )
        if self.path and self.webdataset is not None and self.webdataset.declares:
            raise ValueError(
                "webdataset has image, vector, label or classes beside path, whose manifest says "
                "what lies in a sample; leave them out, or path"
            )
        return self

    @model_validator(mode="after")
    def _view_names(self) -> "Data":
        if len(set(names := self.view_names)) < len(names):
            raise ValueError(f"views have the names {', '.join(names)}; expected a name for each")
        return self

    @property
    def view_names(self) -> list[str]:
        """Names of the views, in order."""
        seen, names = Counter[str](), []
        for view in self.views:
            seen[view.stored] += 1
            again = f"-{seen[view.stored]}" if seen[view.stored] > 1 else ""
            names.append(view.name or view.stored + again)
        return names

    @property
    def paths(self) -> list[str]:
        """Where the shards are: of the one data set, or of each of the mixture."""
        return [self.path] if self.sources is None else [one.path for one in self.sources]

    @property
    def missing(self) -> list[str]:
        """Local shards that are not there, where nothing says how to build them."""
        if self.build is not None:
            return []
        local = (path for path in self.paths if "://" not in path and path != "")
        return [path for path in local if not (Path(path) / MANIFEST).exists()]

    def at(self, path: str) -> "Data":
        """Returns the section for another data set alone, whole: nothing else is opened."""
        protocol = self.protocol.model_copy(update={"hide_views": {}, "hide_labels": 0.0})
        elsewhere = {"path": path, "sources": None, "webdataset": None, "protocol": protocol}
        elsewhere |= {"roles": None}
        return self.model_copy(update=elsewhere)

    def refuse_missing(self, remedy: str) -> None:
        """Raises a ConfigError where local shards are not there, and nothing says how to build."""
        for path in self.missing:
            raise ConfigError(f"{path} holds no shards; {remedy}")

    @field_validator("path", "storage_options", "webdataset", "sources")
    @classmethod
    def _no_secrets(cls, value: Any) -> Any:
        """What a run was configured with is written beside its results."""
        many = value.labelled + value.unlabelled if isinstance(value, WebDataset) else [value]
        many = [one.path for one in value] if isinstance(value, list) else many
        if (secret := next(filter(None, map(_secret, many)), None)) is not None:
            raise ValueError(
                f"{secret} would be written into the run's folder; expected credentials in the "
                "environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or HF_TOKEN"
            )
        return value


def without_places(data: dict[str, Any]) -> dict[str, Any]:
    """Returns a section as plain values, less where the data sets lie: fingerprints say which."""
    sources = data.get("sources") and [source["weight"] for source in data["sources"]]
    places = "path", "roles"
    return {key: value for key, value in data.items() if key not in places} | {"sources": sources}


def _secret(value: Any, name: str = "") -> str | None:
    """The name of something that looks like a credential, in storage options or in a URL."""
    if isinstance(value, dict):
        return next((s for key, v in value.items() if (s := _secret(v, str(key)))), None)
    if name:
        return name if SECRET.search(name) and value not in (None, True, False, "anon") else None
    parts = urlsplit(str(value))
    if "://" in str(value) and (parts.password or PASSWORD.search(str(value))):
        return "the password in the URL"
    return next(filter(SECRET.search, parse_qs(parts.query)), None)
