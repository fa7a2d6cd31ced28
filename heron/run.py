"""Experiments from Python: read a configuration, pretrain, and look at the run."""

import atexit
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heron.pipeline.config import experiment
from heron.pipeline.config.experiment import Config
from heron.pipeline.config.shipped import find_config

if TYPE_CHECKING:  # both load torch, which a configuration does without
    from heron.model import Model


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        folder: where it left its checkpoints, config.yaml, metrics.jsonl, report.html and
            result.json.
        scores: of the last weights on the test rows, by name, such as `f1_weighted` and
            `auc_macro` (see `heron.metrics`); those of baselines have the prefix `logistic_` or
            `plain_`. Empty where no test row has a label.
        result: all that result.json holds: the scores, steps, seconds, versions and more.
    """

    folder: Path
    scores: dict[str, Any]
    result: dict[str, Any]

    def model(self) -> "Model":
        """Returns the trained model: see `heron.from_pretrained`."""
        from heron.model import from_pretrained

        return from_pretrained(self.folder)


def load_config(name_or_path: str | Path, *overrides: str, method: str | None = None) -> Config:
    """Returns an experiment as typed, frozen sections: `config.optim.lr`.

    Args:
        name_or_path: a shipped experiment, such as "scene", or the path of a YAML file.
        overrides: `key.key=value`; the value is read as YAML, and `null` takes a section out; a
            number is a place in a list: `data.views.0.size=64`.
        method: of configs/methods.yaml, such as "herocon-u"; it then chooses the terms of the
            objective, and an override of these counts where the method has them.

    Raises:
        ConfigError: there is no such experiment or method, or a key or a value does not fit; the
            message lists every fault with the nearest right key.
    """
    return experiment.load_config(find_config(name_or_path), overrides, method)


def pretrain(config: Config) -> Run:
    """Trains an experiment, evaluates it and writes its report.

    It runs in this process; under `accelerate launch` or `torchrun` all processes call it
    together, and train as one. With `data.workers` above 0 the call must stand under
    `if __name__ == "__main__":`, as processes that read import the script.

    Raises:
        HeronError: the configuration, the data, a checkpoint or the loss is not what it should be.
        Stopped: SIGTERM or SIGUSR1 came, and the state is saved: run again with
            `run.resume=auto` to go on.
        Lost: another process is gone.
    """
    from heron.pipeline import pretrain as job
    from heron.pipeline.distributed import collectives
    from heron.pipeline.training.tracking import scores_of

    atexit.register(collectives.close)  # or torch warns of a process group that was left open
    result = job.pretrain(config)
    return Run(Path(config.run.dir), scores_of(result), result)
