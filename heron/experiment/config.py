"""The experiment: one typed YAML file, with dotted overrides and errors that name the remedy."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from heron.base.artefact import Count, fingerprint
from heron.base.dotted import opening, suggest
from heron.base.errors import ConfigError
from heron.base.sections import PathText, Section, check, dump_yaml, parse_yaml, read_tree
from heron.base.shipped import CONFIGS
from heron.data.label_files import chosen_files
from heron.data.options import Data, Negatives, without_locations
from heron.distributed.agreement import versions
from heron.evaluation.metrics import Evaluate
from heron.experiment.options import Optim, Train
from heron.experiment.overrides import override
from heron.losses.named_terms import Terms
from heron.models.options import ModelConfig, Network, Precision

HOST_KEYS = {  # options that may differ from host to host, and change no number
    "run": {"dir"},
    "data": {"cache", "storage_options", "verify", "workers"},
    "train": {"cpu_threads"},
}
TrackerName = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]


class RunFolder(Section):
    """The folder of a run, and whether a run resumes from it.

    Attributes:
        dir: folder of the run; it is created if it does not exist.
        resume: `auto`: continue from the newest complete checkpoint; `force`: also if data or
            options differ from it; `never`: start over and set earlier checkpoints aside.
    """

    dir: PathText
    resume: Literal["auto", "force", "never"] = "never"


class Config(Section):
    """One experiment; each section documents its own keys.

    Attributes:
        seed: seed of the initial weights, the batches, the augmentation and dropout.
        objective: terms of the loss by name or dotted path; their weighted sum is minimised.
        tracking: trackers, besides metrics.jsonl: names of accelerate's, and dotted paths of your
            own; see `training.trackers`.
    """

    seed: Count = 0
    run: RunFolder
    data: Data
    model: ModelConfig = ModelConfig()
    objective: Terms
    optim: Optim = Optim()
    negatives: Negatives = Negatives()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    tracking: list[TrackerName] = ["tensorboard"]

    @model_validator(mode="after")
    def _encoders_of_views(self) -> "Config":
        names = self.data.view_names
        for name in self.model.encoders:
            if name not in names:
                raise ValueError(f"model.encoders.{name} matches no view; {suggest(name, names)}")
        return self

    @property
    def frozen_views(self) -> list[int]:
        """The numbers of the views that `train.frozen_views` embeds once."""
        encoders = [self.model.encoder_of(name)[1] for name in self.data.view_names]
        frozen = [n for n, x in enumerate(encoders) if isinstance(x, Network) and x.freeze]
        return frozen if self.train.frozen_views else []

    @model_validator(mode="after")
    def _some_frozen(self) -> "Config":
        if self.train.frozen_views and not self.frozen_views:
            raise ValueError(
                f"train.frozen_views is {self.train.frozen_views}, but no encoder is frozen: set "
                "freeze: true in the section of a pretrained one, or train.frozen_views: 0"
            )
        return self

    @model_validator(mode="after")
    def _needs_validation(self) -> "Config":
        validated = self.data.protocol.validation > 0
        if not self.evaluate.test and (not validated or self.evaluate.baselines):
            found = "evaluate.baselines is true" if validated else "data.protocol.validation is 0"
            raise ValueError(
                f"evaluate.test is false, but {found}; set a share for validation and no "
                "baselines, which are scored on the test rows"
            )
        if self.train.keep == "best" and not validated:
            raise ValueError(
                "train.keep is best, but data.protocol.validation is 0; set a share for "
                "validation, whose rows choose the best weights, or train.keep: last"
            )
        if self.evaluate.threshold == "fitted" and not validated:
            raise ValueError(
                "evaluate.threshold is fitted, but data.protocol.validation is 0; set a share "
                "for validation, on whose rows it is fitted, or a number such as 0.4"
            )
        return self

    def in_precision(self, precision: Precision) -> "Config":
        """Returns the experiment with `precision` in place of `auto`."""
        if self.train.precision != "auto":
            return self
        train = self.train.model_copy(update={"precision": precision})
        return self.model_copy(update={"train": train})

    @field_validator("tracking")
    @classmethod
    def _no_tracker_twice(cls, names: list[str]) -> list[str]:
        if len(set(names)) < len(names):
            raise ValueError("a tracker is listed twice; remove one of them")
        return names


METHODS = CONFIGS / "methods.yaml"
CLASSIFIERS = ("bce", "cross_entropy")  # terms that a method with `classifier: true` keeps


def load_config(
    path: str | Path, overrides: Sequence[str] = (), method: str | None = None
) -> Config:
    """Returns the experiment of a YAML file, with overrides such as ``optim.lr=0.1``.

    It is the caller's own: classes that it names by dotted path are imported, but never from the
    folder of a model that the file lies in. `load_saved` reads someone else's.

    Args:
        path: of the file.
        overrides: `key.key=value`; a text is taken as it was typed, any other value is read as
            YAML, and `null` removes a section; a number is a list index: `data.views.0.size=64`.
        method: a name in configs/methods.yaml, which then chooses the terms of the objective;
            overrides of terms that the method has still apply.

    Raises:
        ConfigError: the file is missing or no YAML mapping, or keys or values do not fit; the
            message lists the faults with the nearest valid keys.
    """
    tree, folder = read_tree(path), Path(path).parent
    _name_total_steps(tree)  # before overrides, of which train.steps=60 would be the length
    with opening(folder, True) if (folder / "model.json").exists() else nullcontext():
        for text in overrides:
            override(tree, text, Config)
        _keep_one_length(tree, {text.partition("=")[0] for text in overrides})
        if method is not None:
            _apply_method(method, tree)
        return parse_config(tree)


def load_saved(
    folder: Path, overrides: Sequence[str] = (), trust_code: bool | None = False
) -> Config:
    """Returns the experiment of a model's folder, which may be someone else's.

    Classes that it names by dotted path are imported only with `trust_code`, and never from the
    folder, or the folder of the run whose checkpoint it is; None means never, and that errors
    name no option for it. Classes that this process has imported need no trust. Raises the errors
    of `load_config`.
    """
    whole = folder.absolute()
    with opening(whole.parents[1] if whole.parent.name == "checkpoints" else whole, trust_code):
        return load_config(folder / "config.yaml", overrides)


def parse_config(tree: dict[str, Any]) -> Config:
    """Validates a tree of plain values as an experiment; see `load_config` for the errors."""
    return check(Config, tree, "configuration")


def dump_config(config: Config) -> str:
    """Returns the resolved configuration as YAML, enough to run again."""
    return dump_yaml(config.model_dump(mode="json"))


def _name_total_steps(tree: dict[str, Any]) -> None:
    """Renames `steps` to `total_steps` in an older file, which had the run's length there."""
    train = tree.get("train")
    if isinstance(train, dict) and train.get("epochs", 1) is None and "total_steps" not in train:
        train["total_steps"] = train.pop("steps", None)


def _keep_one_length(tree: dict[str, Any], overridden: set[str]) -> None:
    """Has an override of a run's length, in epochs or in steps, replace the other one."""
    train = tree.get("train")
    for given, other in (("epochs", "total_steps"), ("total_steps", "epochs")):
        alone = f"train.{given}" in overridden and f"train.{other}" not in overridden
        if alone and isinstance(train, dict) and train.get(given) is not None:
            train[other] = None


def _apply_method(method: str, tree: dict[str, Any]) -> None:
    """Replaces the objective by a method's terms, with the experiment's options for them."""
    objective: dict[str, Any] = tree.get("objective") or {}
    if not isinstance(objective, dict):
        return  # validation refuses it with the other faults
    methods: dict[str, dict[str, Any]] = parse_yaml(METHODS.read_text(), str(METHODS))
    method = method.lower()
    if method not in methods:
        raise ConfigError(f"unknown method '{method}'; {suggest(method, list(methods))}")
    method_options = methods[method]
    kept = CLASSIFIERS if method_options.get("classifier") else ()
    terms = {
        name: options for name, options in objective.items() if name in kept and options is not None
    }
    if kept and not terms:
        raise ConfigError(
            f"method '{method}' keeps the experiment's classifier, but it has none; add "
            f"objective.{' or objective.'.join(CLASSIFIERS)}"
        )
    for name, options in method_options.get("terms", {}).items():
        own_options = objective.get(name) or {}
        terms[name] = {**own_options, **options} if isinstance(own_options, dict) else own_options
    tree["objective"] = terms


def run_facts(config: Config) -> dict[str, Any]:
    """Returns the configuration and versions, which with the data decide the numbers of a run."""
    tree = config.model_dump(mode="json", exclude={"tracking"})
    tree["data"] = without_locations(tree["data"])
    for section, keys in HOST_KEYS.items():
        for key in keys:
            del tree[section][key]
    return {**tree, "versions": versions()}


def run_fingerprint(config: Config, data: str) -> str:
    """Returns a fingerprint that two runs with the same numbers share: see `run_facts`.

    A run that `train.steps` stops has that of the whole run, whose numbers it has up to there.
    """
    facts = run_facts(config)
    facts["data"]["fingerprint"] = data
    facts |= chosen_files(config.data.protocol)
    del facts["run"]  # only resumption is left in it
    for key in ("steps", "timeout_s", "keep_checkpoints", "save_every_epochs", "save_every_steps"):
        del facts["train"][key]
    return fingerprint(facts)
