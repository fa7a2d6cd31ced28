"""The experiment as one typed YAML file, with dotted overrides and errors that name the remedy."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

import yaml
from pydantic import Field, field_validator, model_validator

from heron.pipeline.config.augmentations import Augmentations
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.model import Model
from heron.pipeline.config.renamed import move_renamed, refuse_renamed
from heron.pipeline.config.sections import (
    BelowOne,
    Natural,
    NonNegative,
    PathText,
    Positive,
    Section,
    Share,
    check,
    override,
    parse_yaml,
    read_tree,
)
from heron.pipeline.config.terms import Terms
from heron.shards.artefact import MANIFEST, Count, Fingerprint


class RunFolder(Section):
    """Where a run leaves what it made."""

    dir: PathText
    resume: Literal["auto", "force", "never"] = "never"


class Protocol(Section):
    """Which rows are labelled, which unlabelled and which are tested on.

    With `folds`, the labelled rows are fold number `fold` of a stratified split into `folds`;
    without, `labelled` rows are drawn with (`seed`, `fold`). The other rows are unlabelled. With
    `complementary`, training sees of each labelled row so many classes that it is not.
    """

    labelled: Natural | Literal["all"] = "all"
    folds: Annotated[Natural, Field(ge=2)] | None = None
    fold: Count = 0
    seed: Count = 0
    complementary: Natural | None = None
    test: str = "unlabelled"

    @model_validator(mode="after")
    def _one_way(self) -> "Protocol":
        if self.folds is not None and self.labelled != "all":
            raise ValueError("give either folds (a fold is labelled) or labelled (a count is)")
        if self.folds is not None and self.fold >= self.folds:
            raise ValueError(f"fold is {self.fold}; expected 0 to {self.folds - 1}")
        return self


class BatchRows(Section):
    """Rows of the global batch, over all processes."""

    labelled: Count | Literal["all"]
    unlabelled: Count | Literal["all"] = 0


class ModelView(Section):
    """One view the model sees: a stored view of the sample and what is done to it in training.

    `size` is the height and width of pictures in pixels, one number for both; null is as stored.
    """

    stored: str
    size: Annotated[list[Natural], Field(min_length=2, max_length=2)] | None = None
    augment: Augmentations = []

    @field_validator("size", mode="before")
    @classmethod
    def _square(cls, value: Any) -> Any:
        return [value, value] if isinstance(value, int) else value


class Cache(Section):
    """Where remote shards are kept, and how many bytes of them; null: see `heron.shards.cache`."""

    dir: PathText | None = None
    bytes: Natural | None = None


class Data(Section):
    """Shards, the protocol over their rows, and the two streams drawn from them.

    `path` is a folder or a URL: s3, https, hf, gs; `storage_options` go to fsspec; `fingerprint`
    (`heron shards show` has it) refuses any other data set that lies there. With `on_error`
    skip, a row that cannot be read gives its place to another, until more than `max_bad_fraction`
    of all rows are bad.
    `verify` compares every shard's checksum before the first step: once a pass over the bytes.
    `draft` decodes JPEGs at 1/2, 1/4 or 1/8 of their size where no view is enlarged by it;
    `decode_size` is the side of the square that pictures of several sizes are decoded to.
    """

    path: PathText
    fingerprint: Fingerprint | None = None
    build: dict[str, Any] | None = None
    split: str = "train"
    protocol: Protocol = Protocol()
    batch: BatchRows
    views: Annotated[list[ModelView], Field(min_length=1)]
    standardise: bool = False
    epoch: Literal["labelled", "unlabelled"] = "unlabelled"
    canonical_streams: Natural | None = None
    window_rows: Natural = 16384
    workers: Count = 0
    verify: bool = True
    draft: bool = True
    decode_size: Natural | None = None
    on_error: Literal["raise", "skip"] = "raise"
    max_bad_fraction: Share = 0.01
    cache: Cache = Cache()
    storage_options: dict[str, Any] = {}

    def refuse_missing(self, remedy: str) -> None:
        """Raises a ConfigError where local shards are not there, and nothing says how to build."""
        local = self.build is None and "://" not in self.path
        if local and not (Path(self.path) / MANIFEST).exists():
            raise ConfigError(f"{self.path} holds no shards; {remedy}")

    @field_validator("path", "storage_options")
    @classmethod
    def _no_secrets(cls, value: Any) -> Any:
        """What a run was configured with is written beside its results."""
        if (secret := _secret(value)) is not None:
            raise ValueError(
                f"{secret} would be written into the run's folder; expected credentials in the "
                "environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or HF_TOKEN"
            )
        return value


def _secret(value: Any, name: str = "") -> str | None:
    """The name of something that looks like a credential, in storage options or in a URL."""
    if isinstance(value, dict):
        return next((s for key, v in value.items() if (s := _secret(v, str(key)))), None)
    words = "secret", "token", "password", "key", "signature"
    if name:
        named = any(word in name.lower() for word in words)
        return name if named and value not in (None, True, False, "anon") else None
    parts = urlsplit(str(value))
    if "://" in str(value) and parts.password:
        return "the password in the URL"
    return next((w for w in parse_qs(parts.query) if any(x in w.lower() for x in words)), None)


class Optim(Section):
    """Optimiser and the schedule of its learning rate.

    `milestones` are the epochs at which schedule `step` multiplies the rate by `gamma`.
    """

    kind: Literal["sgd", "lars", "adam", "adamw"] = "lars"
    lr: Positive = 0.05
    momentum: BelowOne = 0.95
    weight_decay: NonNegative = 0.0
    trust_coefficient: Positive = 0.02
    lars_exclude_1d: bool = False
    schedule: Literal["constant", "cosine", "step"] = "constant"
    milestones: list[Natural] = []
    gamma: Positive = 0.1
    warmup_epochs: Count = 0

    @model_validator(mode="after")
    def _some_milestone(self) -> "Optim":
        if self.schedule == "step" and not self.milestones:
            raise ValueError("schedule is step without milestones; expected epochs: [100, 150]")
        return self


class Negatives(Section):
    """Mined hard negatives: near rows with far labels, beside the random labelled rows.

    `mine` rows are added to every labelled batch. Every `every_steps` steps the labelled rows are
    embedded anew, and the `nearest` of each with far labels are found while training goes on:
    see `pipeline.negatives.mine`.
    """

    mine: Count = 0
    every_steps: Natural = 200
    nearest: Natural = 16


Precision = Literal["fp32", "bf16", "fp64"]


class Train(Section):
    """How long, how often measured for collapse, evaluated, saved, and how a step is computed.

    `micro_batch` bounds the rows of a process that are embedded with a graph at a time; the
    gradient stays that of the whole batch. `precision` bf16 computes the model by autocast; fp64
    has parameters, inputs and losses in float64, which shows exactness.
    `timeout_s` is how long nothing may move before the run ends; on SIGTERM or SIGUSR1 it saves.
    """

    epochs: Natural = 1
    steps: Natural | None = None
    micro_batch: Natural | None = None
    precision: Precision = "fp32"
    measure_every_steps: Natural = 100
    evaluate_every_epochs: Natural | None = None
    save_every_epochs: Natural | None = None
    save_every_steps: Natural | None = None
    keep_checkpoints: Natural = 2
    timeout_s: Natural = 600
    cpu_threads: Natural | None = None


class Evaluate(Section):
    """How predictions are scored, and whether a linear probe makes some: see `evaluation.probe`.

    `probe`: `auto` probes where no term trains a classifier, `always` also beside one.
    `map`: whether the report ends with a map of at most about `map_rows` test rows; `auto` draws it
    where training took two minutes or more: see `training.report.wants_map`.
    `baselines` adds what logistic regression and the plain network reach on the same labels: see
    `evaluation.baselines`.
    """

    probe: Literal["auto", "always", "never"] = "auto"
    threshold: Share = 0.4
    batch: Natural = 512
    map: Literal["auto", "always", "never"] = "auto"
    map_rows: Natural = 1000
    baselines: bool = False


class Config(Section):
    """One experiment."""

    seed: Count = 0
    run: RunFolder
    data: Data
    model: Model = Model()
    objective: Terms
    optim: Optim = Optim()
    negatives: Negatives = Negatives()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()


METHODS = Path(__file__).resolve().parents[2] / "configs" / "methods.yaml"
CLASSIFIERS = ("bce", "cross_entropy")  # what a method with `classifier: true` keeps


def load_config(
    path: str | Path, overrides: Sequence[str] = (), method: str | None = None
) -> Config:
    """Returns the experiment of a YAML file, with overrides such as ``optim.lr=0.1``.

    Args:
        path: of the file.
        overrides: `key.key=value`; the value is read as YAML, `null` takes a section out; a
            number is a place in a list: `data.views.0.size=64`.
        method: a name of configs/methods.yaml, which then chooses the terms of the objective; an
            override of these counts where the method has them.

    Raises:
        ConfigError: the file is missing or no YAML mapping, or a key or value does not fit; the
            message lists every fault with the nearest right key.
    """
    tree = read_tree(path)
    for given in overrides:
        override(tree, given)
    if method is not None:
        _choose(method, tree)
    return parse_config(tree)


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the experiment that a run has written, of this edition or the first.

    Args and Raises: see `load_config`.
    """
    tree = read_tree(path)
    move_renamed(tree)
    for given in overrides:
        override(tree, given)
    return parse_config(tree)


def parse_config(tree: dict[str, Any]) -> Config:
    """Returns a tree of plain values as an experiment; see `load_config` for the errors."""
    refuse_renamed(tree)
    return check(Config, tree, "the configuration")


def dump_config(config: Config) -> str:
    """Returns the resolved configuration as YAML, enough to run again."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _choose(method: str, tree: dict[str, Any]) -> None:
    """Makes an experiment into a method, with the options that it gives the method's parts."""
    given: dict[str, Any] = tree.get("objective") or {}
    if not isinstance(given, dict):
        return  # which is refused with the other faults
    methods: dict[str, dict[str, Any]] = parse_yaml(METHODS.read_text(), str(METHODS))
    if method not in methods:
        near = difflib.get_close_matches(method, methods, 1, 0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(methods)}"
        raise ConfigError(f"unknown method '{method}'; {hint}")
    chosen = methods[method]
    kept = CLASSIFIERS if chosen.get("classifier") else ()
    terms = {
        name: options for name, options in given.items() if name in kept and options is not None
    }
    if kept and not terms:
        raise ConfigError(
            f"method '{method}' keeps the experiment's classifier, and it has none; expected "
            f"objective.{' or objective.'.join(CLASSIFIERS)}"
        )
    for name, options in chosen.get("terms", {}).items():
        asked = given.get(name) or {}
        terms[name] = {**asked, **options} if isinstance(asked, dict) else asked
    tree["objective"] = terms
