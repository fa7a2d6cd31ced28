"""`heron pretrain | launchers`: the main job, and the files that start it on a cluster."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

from heron.base.atomic import locked
from heron.base.errors import INTERRUPTED, LOST, STOPPED, ConfigError, TrainingError
from heron.base.sections import Natural
from heron.base.shipped import ACCELERATE, JOB, LAUNCH, find_config, find_shipped, names_in
from heron.base.terminal import print_error
from heron.cli.arguments import Location, Override

SIGNALS = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
POLL_S = 0.2
TELL_S, END_S = 10.0, 300.0  # until others get SIGTERM, and SIGKILL, once one process has ended
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
    with locked(out):
        if out.exists():
            raise ConfigError(f"{out} already exists; choose a new folder")
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

    SIGTERM, SIGUSR1 and Ctrl-C have all of them save and stop; a second Ctrl-C kills them. Once one
    has ended, the others have `END_S` seconds to end too: see `_hasten`. Returns the highest status
    of a process, which is 128 plus the signal's number for one that was killed, `LOST` for one that
    had to be killed here, and that of the first to fail for one that saved since it was told to.
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
    first, waited = 0, 0.0  # the first that ended, and for how long others did not
    killed: Collection[int] = ()
    try:
        for environment in environments:
            children.append(subprocess.Popen(command, env={**os.environ, **environment}))
        for number in SIGNALS:
            signal.signal(number, stop)
        while running := [rank for rank, child in enumerate(children) if child.poll() is None]:
            if stopping:  # repeatedly, as a process may not have its handlers yet
                for rank in running:
                    children[rank].send_signal(signal.SIGKILL if interrupts > 1 else signal.SIGTERM)
            if len(running) < len(children):
                ended = (rank for rank in range(len(children)) if rank not in running)
                first = first if waited else max(ended, key=lambda rank: _status(children[rank]))
                killed = killed or _hasten(children, running, first, waited)
                waited += POLL_S  # not by the clock, which goes on while a terminal stops all
            if waited > 2 * END_S:
                break  # a disk that does not answer keeps even a killed process
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
    statuses = [LOST if n in killed else _status(child) for n, child in enumerate(children)]
    if statuses[first] not in (0, STOPPED):
        statuses = [status for status in statuses if status != STOPPED]
    return max(statuses)


def _hasten(
    children: Sequence["subprocess.Popen[bytes]"], running: Sequence[int], first: int, waited: float
) -> Sequence[int]:
    """Has the processes that still run end, `waited` seconds after the `first` one; by rank.

    One that was stopped goes on at once, since it would answer nothing but SIGKILL. After `TELL_S`
    they get SIGTERM, unless the first ended well, and after `END_S`, in which a checkpoint may
    still be written, SIGKILL. Returns those that it killed.
    """
    status = _status(children[first])
    for rank in running:
        if _is_stopped(children[rank].pid):
            print_error("error", f"rank {rank} was stopped (SIGSTOP or Ctrl-Z); it goes on, to end")
            children[rank].send_signal(signal.SIGCONT)
        if waited >= TELL_S and status not in (0, STOPPED):
            children[rank].send_signal(signal.SIGTERM)
    if waited < END_S:
        return ()
    for rank in running:
        children[rank].kill()
    ranks = ", ".join(f"rank {rank} (process {children[rank].pid})" for rank in running)
    print_error(
        "error",
        f"{ranks} had not ended {END_S:g} s after rank {first} ended with status {status}, and was "
        "killed; run again with run.resume=auto to continue from the last checkpoint",
    )
    return running


def _status(child: "subprocess.Popen[bytes]") -> int:
    code: int = child.returncode
    return code if code >= 0 else 128 - code


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has just ended, or this is no Linux
        return False
    return state == "T"
