"""Experiments from Python: load a configuration, pretrain, inspect the run."""

import atexit
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heron.base.errors import ConfigError
from heron.base.shipped import find_config
from heron.experiment import config as experiment
from heron.experiment.config import Config

if TYPE_CHECKING:  # it loads torch, which configurations do not need
    from heron.api.model import Model


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: the folder of its checkpoints, config.yaml, metrics.jsonl, report.html and
            result.json.
        scores: scores of the last weights on the test rows, by name, such as `f1_weighted` and
            `auc_macro` (see `heron.metrics`); those of baselines have the prefix `plain_`,
            `logistic_` or `forest_`. Empty if no test row has a label.
        result: the contents of result.json: the scores, steps, seconds, versions and more.
    """

    folder: Path
    scores: dict[str, Any]
    result: dict[str, Any]

    def model(self) -> "Model":
        """Loads the trained model; see `heron.from_pretrained`."""
        from heron.api.model import from_pretrained

        return from_pretrained(self.folder, trust_code=True)  # this process has trained it


def load_config(name_or_path: str | Path, *overrides: str, method: str | None = None) -> Config:
    """Loads an experiment as typed, frozen sections: `config.optim.lr`.

    Args:
        name_or_path: a shipped experiment, such as "scene", or the path of a YAML file.
        overrides: `key.key=value`, where a text is taken as it is and any other value is read as
            YAML. `null` removes a section; a number in the key indexes a list:
            `data.views.0.size=64`.
        method: a method of configs/methods.yaml, such as "herocon-u". It selects the terms of the
            objective; overrides of other terms are then ignored.

    Raises:
        ConfigError: there is no such experiment or method, or a key or a value is invalid; the
            message lists every fault, with the nearest valid key.
    """
    return experiment.load_config(find_config(name_or_path), overrides, method)


def pretrain(config: Config, overwrite: bool = False) -> Run:
    """Trains an experiment, evaluates it and writes its report.

    It runs in this process; under `accelerate launch` or `torchrun` all processes call it and
    train as one. With `data.workers` above 0 the call must be guarded by
    `if __name__ == "__main__":`, since worker processes import the script.

    Args:
        config: what `heron.load_config` returns.
        overwrite: move a finished run in `config.run.dir` aside, whole, instead of refusing it.

    Raises:
        HeronError: the configuration, the data, a checkpoint or the loss is invalid, `config` is a
            name or a path, or the folder holds a finished run.
        Stopped: SIGTERM or SIGUSR1 arrived, and the state is saved; run again with
            `run.resume=auto` to continue.
        Lost: another process died.
    """
    from heron.api import job
    from heron.distributed import collectives
    from heron.training.tracking import scores_of

    if not isinstance(config, Config):
        raise ConfigError(
            "config must be what heron.load_config returns: "
            f"heron.pretrain(heron.load_config(...)), got {config!r}"
        )
    atexit.register(collectives.close)  # else torch warns of an open process group
    result = job.pretrain(config, overwrite)
    return Run(Path(config.run.dir), scores_of(result), result)
