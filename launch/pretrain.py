"""`heron pretrain | launchers`: the main job, and the files that start it on a cluster."""

import shutil
from pathlib import Path
from typing import Annotated

from heron.launch.arguments import Override
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.sections import Natural
from heron.pipeline.config.shipped import ACCELERATE, find_config, find_shipped, names_in

LAUNCHERS = ("accelerate", "hosts", "slurm")  # folders beside this file
Configuration = Annotated[
    str | None,
    f"accelerate's configuration: a file, or {', '.join(names_in(ACCELERATE))} "
    "(default: ddp with GPUs, cpu without)",
]


def pretrain(
    config: Annotated[str, "name of a shipped experiment, or a YAML file"],
    *overrides: Annotated[Override, "key=value of the experiment: optim.lr=0.1"],
    method: Annotated[str | None, "make the experiment into a method: herocon-u"] = None,
    processes: Annotated[Natural | None, "processes on this machine (default: this one)"] = None,
    accelerate: Configuration = None,
) -> int:
    """Trains an experiment, evaluates it and writes its report.

    Status 0: done; 1: an error; 75: a signal came, the state is saved; 76: a process is dead.

    heron pretrain faces optim.lr=0.002
    heron pretrain faces --processes 2 --accelerate cpu_zero2 optim.kind=sgd
    """
    words = ["--config", str(find_config(config)), *overrides]
    words += ["--method", method] if method else []
    if processes is None and accelerate is None:
        from heron.pipeline.pretrain import main

        return main(words)
    from heron.launch.processes import environments, run_together

    if accelerate is None:
        import torch

        accelerate = "ddp" if torch.cuda.is_available() else "cpu"
    file = find_shipped(accelerate, ACCELERATE, "accelerate's configuration")
    return run_together(words, environments(file, processes))


def launchers(out: Annotated[Path, "folder to make"]) -> None:
    """Copies what starts the main job on several machines, for you to edit.

    That is a script for SLURM, one for hosts without a scheduler, and accelerate's configurations.

    heron launchers cluster
    """
    if out.exists():
        raise ConfigError(f"{out} is there already; expected a new folder: choose another")
    for name in LAUNCHERS:
        shutil.copytree(ACCELERATE.parent / name, out / name)
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        print(path)
