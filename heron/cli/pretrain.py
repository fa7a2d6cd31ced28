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

from heron.cli.arguments import Location, Override
from heron.config.errors import INTERRUPTED, ConfigError, TrainingError
from heron.config.sections import Natural
from heron.config.shipped import ACCELERATE, JOB, LAUNCH, find_config, find_shipped, names_in
from heron.shards.atomic import locked

SIGNALS = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
POLL_S = 0.2
LAUNCHERS = ("accelerate", "hosts", "ray", "slurm")  # folders of `launch`
Configuration = Annotated[
    str | None,
    f"Accelerate configuration: a file, or {', '.join(names_in(ACCELERATE))} "
    "(default: ddp with GPUs, cpu without)",
]


def pretrain(
    config: Annotated[Location, "name of a shipped experiment, or a YAML file"],
    *overrides: Annotated[Override, "key=value of the experiment: optim.lr=0.1"],
    method: Annotated[str | None, "change the experiment to a method: herocon-u"] = None,
    processes: Annotated[Natural | None, "processes to start (default: train in this one)"] = None,
    accelerate: Configuration = None,
    overwrite: Annotated[bool, "move a finished run in the folder aside, and start over"] = False,
) -> int:
    """Trains an experiment, evaluates it and writes its report.

    Exit status: 0 done, 1 error, 75 stopped by a signal with the state saved, 76 a process died.

    heron pretrain faces optim.lr=0.002
    heron pretrain faces --processes 2 --accelerate cpu_zero2 optim.kind=sgd run.dir=runs/zero2
    """
    words = ["--config", str(find_config(config)), *overrides]
    words += ["--method", method] if method else []
    words += ["--overwrite"] if overwrite else []
    if processes is None and accelerate is None:
        from heron.api.job import main

        return main(words)
    if accelerate is None:
        import torch

        accelerate = "ddp" if torch.cuda.is_available() else "cpu"
    file = find_shipped(accelerate, ACCELERATE, "Accelerate configuration")
    return run_together(words, environments(file, processes))


def launchers(out: Annotated[Path, "folder to write"]) -> None:
    """Copies the files that start training on several machines, for you to edit.

    They are a script for SLURM, one for hosts without a scheduler, and Accelerate configurations.

    heron launchers cluster
    """
    if out.exists():
        raise ConfigError(f"{out} already exists; choose a new folder")
    with locked(out):
        for name in LAUNCHERS:
            shutil.copytree(LAUNCH / name, out / name)
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        print(path)


def environments(configuration: Path, processes: int | None) -> list[dict[str, str]]:
    """Returns the environment of each process that accelerate's configuration would start.

    Raises a TrainingError if it is no such configuration, needs several machines, or would start
    fewer processes than requested.
    """
    import yaml
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    count_option = [] if processes is None else ["--num_processes", str(processes)]
    words = ["--config_file", str(configuration), *count_option, "--module", JOB]
    try:
        args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise TrainingError(
            f"accelerate cannot read {configuration} ({' '.join(str(error).split())}); write it "
            "with `accelerate config` or `heron launchers`"
        ) from None
    if args.num_machines > 1:
        raise TrainingError(
            f"{configuration} is for {args.num_machines} machines, but --accelerate starts "
            "processes on one; for several, use hosts/pretrain.sh or slurm/pretrain.sbatch from "
            "`heron launchers FOLDER`"
        )
    if args.num_processes < 1:
        raise TrainingError(
            f"{configuration} must start 1 or more processes, got {args.num_processes}"
        )
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, common = launch.prepare_deepspeed_cmd_env(args)
    elif args.multi_gpu or args.use_fsdp:
        common = launch.prepare_multi_gpu_env(args)
    else:
        if args.num_processes > 1:
            raise TrainingError(
                f"{configuration} starts one process, but {args.num_processes} were requested; "
                "pass --processes 1, or --accelerate cpu, ddp or fsdp"
            )
        _, common = launch.prepare_simple_launcher_cmd_env(args)
        return [common]
    world_size = str(args.num_processes)
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.main_process_port)}
    common |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    ranks = map(str, range(args.num_processes))
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


def run_together(words: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Runs the main job in one process per environment, and waits for all of them.

    SIGTERM, SIGUSR1 and Ctrl-C have all of them save and stop; a second Ctrl-C kills them. Returns
    the highest status of a process, which is 128 plus the signal's number for one that was killed.
    `accelerate launch` would return 1 whatever the status of its processes, and kill those that
    are still saving 30 s after a SIGTERM.
    """
    stopping, interrupts = False, 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping, interrupts
        stopping, interrupts = True, interrupts + (number == signal.SIGINT)

    # The processes inherit this, so that no signal kills them before they set handlers.
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    command = [sys.executable, "-P", "-m", JOB, *words]  # -P: ignore packages in the working folder
    children: list[subprocess.Popen[bytes]] = []
    try:
        for environment in environments:
            children.append(subprocess.Popen(command, env={**os.environ, **environment}))
        for number in SIGNALS:
            signal.signal(number, stop)
        while running := [child for child in children if child.poll() is None]:
            if stopping:  # repeatedly, as a process may not have its handlers yet
                for child in running:
                    child.send_signal(signal.SIGKILL if interrupts > 1 else signal.SIGTERM)
            time.sleep(POLL_S)
    except OSError:  # a process could not be started: the others would wait for it
        for child in children:
            child.kill()
            child.wait()
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if interrupts > 1:
        return INTERRUPTED
    codes = [child.returncode for child in children]
    return max(code if code >= 0 else 128 - code for code in codes)
