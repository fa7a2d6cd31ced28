"""`heron pretrain | launchers`: the main job, and the files that start it on a cluster."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

from heron.launch.arguments import Override
from heron.pipeline.config.errors import INTERRUPTED, ConfigError, TrainingError
from heron.pipeline.config.sections import Natural
from heron.pipeline.config.shipped import ACCELERATE, find_config, find_shipped, names_in

SIGNALS = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
POLL_S = 0.2
JOB = "heron.pipeline.pretrain"
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


def environments(configuration: Path, processes: int | None) -> list[dict[str, str]]:
    """Returns the environment of each process that accelerate's configuration asks for.

    Raises a TrainingError where it is none, asks for several machines, or would start fewer
    processes than are asked for.
    """
    import yaml
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    number = [] if processes is None else ["--num_processes", str(processes)]
    words = ["--config_file", str(configuration), *number, "--module", JOB]
    try:
        asked, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise TrainingError(
            f"{configuration} is no configuration that accelerate reads "
            f"({' '.join(str(error).split())}); expected one that `accelerate config` or "
            "`heron launchers` writes"
        ) from None
    if asked.num_machines > 1:
        raise TrainingError(
            f"{configuration} asks for {asked.num_machines} machines; expected one: of several, "
            "take hosts/pretrain.sh or slurm/pretrain.sbatch of `heron launchers FOLDER`"
        )
    if asked.num_processes < 1:
        raise TrainingError(
            f"{configuration} asks for {asked.num_processes} processes; expected 1 or more"
        )
    if asked.use_deepspeed:
        asked.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, common = launch.prepare_deepspeed_cmd_env(asked)
    elif asked.multi_gpu or asked.use_fsdp:
        common = launch.prepare_multi_gpu_env(asked)
    else:
        if asked.num_processes > 1:
            raise TrainingError(
                f"asked for {asked.num_processes} processes, of which {configuration} starts one; "
                "expected --processes 1, or a configuration for several: take cpu, ddp or fsdp"
            )
        _, common = launch.prepare_simple_launcher_cmd_env(asked)
        return [common]
    several = str(asked.num_processes)
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(asked.main_process_port)}
    common |= {"WORLD_SIZE": several, "LOCAL_WORLD_SIZE": several}
    ranks = map(str, range(asked.num_processes))
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


def run_together(words: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Runs the main job in a process of each environment, and waits for all of them.

    SIGTERM, SIGUSR1 and Ctrl-C have all of them save and stop; a second Ctrl-C kills them. The
    status is the highest of a process; 128 more than the signal's number where one killed it.
    `accelerate launch` would end with status 1 whatever that of its processes was, and kill those
    that are still saving 30 s after a SIGTERM.
    """
    told, interrupts = False, 0

    def tell(number: int, frame: FrameType | None) -> None:
        nonlocal told, interrupts
        told, interrupts = True, interrupts + (number == signal.SIGINT)

    # The processes ignore signals until they listen themselves: else one would kill them.
    before = {one: signal.signal(one, signal.SIG_IGN) for one in SIGNALS}
    command = [sys.executable, "-P", "-m", JOB, *words]  # -P: no package of the working folder
    children: list[subprocess.Popen[bytes]] = []
    try:
        for environment in environments:
            children.append(subprocess.Popen(command, env={**os.environ, **environment}))
        for one in SIGNALS:
            signal.signal(one, tell)
        while running := [child for child in children if child.poll() is None]:
            if told:  # again and again, for one that did not listen yet
                for child in running:
                    child.send_signal(signal.SIGKILL if interrupts > 1 else signal.SIGTERM)
            time.sleep(POLL_S)
    except OSError:  # a process could not be started: the others would wait for it
        for child in children:
            child.kill()
            child.wait()
        raise
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if interrupts > 1:
        return INTERRUPTED
    codes = [child.returncode for child in children]
    return max(code if code >= 0 else 128 - code for code in codes)
