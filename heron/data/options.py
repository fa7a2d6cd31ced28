"""Sections of an experiment's training data: data set, protocol, views, batches."""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from heron.base.artefact import MANIFEST, Count, Fingerprint
from heron.base.errors import ConfigError
from heron.base.sections import BelowOne, Natural, PathText, Positive, Section, Share
from heron.data.augmentations import Augmentations
from heron.data.tars import WebDataset
from heron.shards.remote import SECRET

# None is not written, so that roles written before there was the option keep their protocol.
Chosen = Annotated[PathText | None, Field(exclude_if=lambda value: value is None)]


class Protocol(Section):
    """Which rows are labelled, unlabelled, kept for validation, and tested.

    With `folds`, the labelled rows are fold number `fold` of a stratified split into `folds`;
    without it, `labelled` rows are chosen at random with (`seed`, `fold`). The other rows are
    unlabelled. With `test: fold`, fold number `fold` is tested instead and all other folds are
    labelled; the rows are shuffled, and shuffled again after every `folds` folds. With
    `validation`, a share of the labelled rows is neither tested nor trained on, not even without
    labels. With `complementary`, training sees this number of wrong classes of each labelled row.

    Attributes:
        labelled: number of labelled rows in the split; `all`: every row.
        folds: number of folds that the rows are split into, stratified by their labels; null: the
            labelled rows are chosen at random.
        fold: number of the labelled (or tested) fold, or of the random choice.
        seed: seed of the split into folds, or of the random choice.
        complementary: number of wrong classes that training sees in place of a labelled row's own
            class; null: training sees the labels.
        test: rows that are tested on: `unlabelled`, `fold`, or a split of the data set.
        hide_views: for studies: by the name of a stored view, the share of all rows from which it
            is hidden; rows are chosen by (`seed`, row), and each keeps at least one view.
        hide_labels: for studies: the share of single labels that is hidden from training in the
            rows of `hide_label_rows`; chosen the same way, and each row keeps at least one label.
        hide_label_rows: share of the labelled rows from which labels are hidden.
        partial_rows: whether rows that lack a view of the model, and labelled rows that lack a
            label, are trained on (`keep`) or not (`drop`); they are tested in either case.
        validation: share of the labelled rows, stratified by their labels, that is kept for
            validation; the test rows are then scored only at the end of the run.
        stratified: whether each label has the same share in the `labelled` rows as in all rows.
        leave_out: CSV file of samples that are not trained on, by the column key; with a column
            decision only those decided to be wrong, unknown or drop. Rows that are tested or serve
            for validation stay there. null: none.
        label_weights: CSV or parquet file of how much labels count, 0 to 1: key, label, weight, or
            suspicion (1 - weight), as of the labels.parquet of `heron audit`; null: 1.
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
    leave_out: Chosen = None
    label_weights: Chosen = None

    @model_validator(mode="after")
    def _one_selection(self) -> "Protocol":
        if self.folds is not None and self.labelled != "all":
            raise ValueError("set folds (one fold is labelled) or labelled (a count), not both")
        if self.test == "fold" and self.folds is None:
            raise ValueError("test is 'fold', but folds is null; set a number, such as folds: 10")
        if self.folds is not None and self.fold >= self.folds and self.test != "fold":
            raise ValueError(f"fold must be 0 to {self.folds - 1}, got {self.fold}")
        return self


class BatchRows(Section):
    """Rows of the global batch, over all processes.

    Attributes:
        labelled: labelled rows per step, over all processes; 0: none are read.
        unlabelled: unlabelled rows per step, over all processes; 0: none are read.
    """

    labelled: Count | Literal["all"]
    unlabelled: Count | Literal["all"] = 0


class ModelView(Section):
    """One view of the model: a stored view of the sample and its augmentations in training.

    Attributes:
        stored: name of a view of the data set.
        name: name of the view in `model.encoders`; null: that of `stored`, then `stored-2`, ….
        size: height and width that pictures are resized to, one number for both; null: as stored.
        augment: augmentations in training, applied in the given order: crop, color, flip, blur,
            noise, or `simclr` for three of them; drop_nodes, perturb_edges, mask_nodes, subgraph;
            or the dotted path of your own class.
        tokens: maximal number of tokens of a text.
        tokenizer: tokenizer of texts: path of a tokenizer.json, or `bytes`, which needs no file.
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
    """The local cache of remote shards.

    Attributes:
        dir: folder of the cache; null: see `heron.shards.cache`.
        bytes: maximal size of the cache in bytes; null: see `heron.shards.cache`.
    """

    dir: PathText | None = None
    bytes: Natural | None = None


class SourceShare(Section):
    """A data set that has a share of every batch.

    Attributes:
        path: folder of shards, or a URL.
        weight: its share of every batch is its weight over the sum of all weights.
    """

    path: Annotated[PathText, Field(min_length=1)]
    weight: Positive = 1.0


class Negatives(Section):
    """Mined hard negatives: near rows with far labels, beside the random labelled rows.

    See `heron.training.mining`.

    Attributes:
        mine: number of mined hard negatives that are added to every labelled batch; 0: none.
        every_steps: steps after which the labelled rows are embedded again; hard negatives are then
            searched for while training continues.
        nearest: number of hard negatives searched for each row.
        gpu: whether the search runs on a GPU.
    """

    mine: Count = 0
    every_steps: Natural = 200
    nearest: Natural = 16
    gpu: bool = False


# For a URL inside of a text, after `pipe:` and a command, or after `simplecache::`.
PASSWORD = re.compile(r"://[^/?#\s]*:[^/?#\s]+@")
KEYS = re.compile(r"keys(?![a-z])", re.I)  # in the name of a number, which counts them


class Data(Section):
    """Shards, the protocol over their rows, and the streams of batches drawn from them.

    Attributes:
        path: folder of shards, or a URL: s3, https, hf, gs; may be left out with `webdataset`.
        sources: instead of path: data sets of the same views and labels, each of which has a share
            of every batch by its weight; null: the data set at path.
        balance: `labels`: labelled rows come from each class, or label, in turn; null: each
            row comes once per epoch.
        webdataset: a stream of tars without an index, which the run then trains on.
        fingerprint: required fingerprint of the data set, as `heron shards show` prints it; null:
            any.
        build: source and options to build the shards if they do not exist; null: they must exist.
        split: split of the data set that is trained on, labelled rows and unlabelled ones.
        roles: folder written by `heron shards protocol`, with the role of each row; null: roles are
            assigned at the start, which reads the labels of all rows if the protocol needs them.
        views: the views of a sample that the model sees.
        standardise: whether vectors are standardised by the means and standard deviations of the
            training rows.
        epoch: the stream whose pass over its rows is an epoch.
        canonical_streams: number of streams that a batch is taken from, whatever the number of
            processes; null: the largest divisor of the batch up to 64.
        window_rows: number of rows that are shuffled together.
        workers: loader processes of each training process; 0: it reads itself. auto: for pictures
            on a GPU, one less than the cores per training process, up to 16, and on a CPU a quarter
            of these cores; for data that needs no decoding, 1 on a GPU and 0 on a CPU.
        verify: whether the checksum of every shard is compared before the first step, once per
            file.
        draft: whether JPEGs are decoded at 1/2, 1/4 or 1/8 of their size if that enlarges no view.
        decode_size: side of the square that pictures of several sizes are decoded to; null: 8/7 of
            the largest view's size. Leave it out for pictures of one size.
        on_error: whether a row that cannot be read is replaced by another (`skip`) or ends the run
            (`raise`).
        max_bad_fraction: share of all rows that may be unreadable before `skip` ends the run.
        storage_options: options of fsspec, without credentials, which belong in the environment.
    """

    path: Annotated[PathText, BeforeValidator(lambda path: "" if path is None else path)] = ""
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
        conflicting = [k for k in ("path", "webdataset", "build") if getattr(self, k)]
        if self.sources is not None and conflicting:
            raise ValueError(
                f"sources and {conflicting[0]} cannot both be set; set one of them to null"
            )
        if self.balance is not None and self.webdataset is not None:
            raise ValueError("balance needs an index, but webdataset has none; remove balance")
        if not self.path and self.webdataset is None and self.sources is None:
            raise ValueError("path is missing; set it to a folder or URL of shards: path=FOLDER")
        if not self.path and self.build is not None:
            raise ValueError("build needs path, the folder to build in")
        if not self.path and self.webdataset is not None and not self.webdataset.views:
            raise ValueError(
                "webdataset has neither image nor vector; name the members of a sample that are "
                "views, such as image: [jpg], or set path to a data set with the same members"
            )
        if self.path and self.webdataset is not None and self.webdataset.declares:
            raise ValueError(
                "webdataset sets image, vector, label or classes, but path is set too, and its "
                "manifest already says what is in a sample; remove those keys, or path"
            )
        if len(set(names := self.view_names)) < len(names):
            raise ValueError(f"view names must be unique, got {', '.join(names)}")
        return self

    @property
    def view_names(self) -> list[str]:
        """Names of the views, in order."""
        counts, names = Counter[str](), []
        for view in self.views:
            counts[view.stored] += 1
            suffix = f"-{counts[view.stored]}" if counts[view.stored] > 1 else ""
            names.append(view.name or view.stored + suffix)
        return names

    @property
    def paths(self) -> list[str]:
        """Paths of the data sets: the one at `path`, or those of all sources."""
        return [self.path] if self.sources is None else [source.path for source in self.sources]

    @property
    def missing(self) -> list[str]:
        """Paths of local data sets that do not exist and that no `build` can make."""
        if self.build is not None:
            return []
        local = (path for path in self.paths if "://" not in path and path != "")
        return [path for path in local if not (Path(path) / MANIFEST).exists()]

    def for_data_set(self, path: str) -> "Data":
        """Returns the section for the data set at `path` alone, with all of its views and labels.

        `fingerprint` stays where `path` is that of this section.
        """
        own = {"hide_views": {}, "hide_labels": 0.0, "leave_out": None, "label_weights": None}
        protocol = self.protocol.model_copy(update=own)
        update = {"path": path, "sources": None, "webdataset": None, "protocol": protocol}
        update |= {"roles": None, "fingerprint": self.fingerprint if path == self.path else None}
        return self.model_copy(update=update)

    def refuse_missing(self, remedy: str) -> None:
        """Raises a ConfigError if local shards do not exist and no `build` can make them."""
        for path in self.missing:
            raise ConfigError(f"{path} has no shards; {remedy}")

    @field_validator("path", "storage_options", "webdataset", "sources")
    @classmethod
    def _no_secrets(cls, value: Any) -> Any:
        """Refuses credentials, since a run's configuration is written beside its results."""
        values = value.labelled + value.unlabelled if isinstance(value, WebDataset) else [value]
        values = [source.path for source in value] if isinstance(value, list) else values
        if (secret := next(filter(None, map(_secret, values)), None)) is not None:
            raise ValueError(
                f"{secret} would be written into the run's folder; pass credentials in the "
                "environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or HF_TOKEN"
            )
        return value


def without_locations(data: dict[str, Any]) -> dict[str, Any]:
    """Removes the locations of data sets from a plain section: fingerprints identify them."""
    sources = data.get("sources") and [source["weight"] for source in data["sources"]]
    places = "path", "roles"
    return {key: value for key, value in data.items() if key not in places} | {"sources": sources}


def _secret(value: Any, name: str = "") -> str | None:
    """Returns the name of what looks like a credential in storage options or a URL, or None."""
    if isinstance(value, dict):
        return next((s for key, v in value.items() if (s := _secret(v, str(key)))), None)
    if name:
        text = KEYS.sub("", name) if isinstance(value, int | float) else name
        return name if SECRET.search(text) and value not in (None, True, False, "anon") else None
    parts = urlsplit(str(value))
    if "://" in str(value) and (parts.password or PASSWORD.search(str(value))):
        return "the password in the URL"
    return next(filter(SECRET.search, parse_qs(parts.query)), None)
