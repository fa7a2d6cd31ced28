"""The processes of one machine that train together: started, told to stop, and waited for.

`accelerate launch` would end with status 1 whatever that of its processes was, and kill those that
are still saving 30 s after a SIGTERM.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from heron.pipeline.config.errors import INTERRUPTED, TrainingError

SIGNALS = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
POLL_S = 0.2
JOB = "heron.pipeline.pretrain"


def environments(configuration: Path, processes: int | None) -> list[dict[str, str]]:
    """Returns the environment of each process that an accelerate configuration asks for.

    Args:
        configuration: as `accelerate config` writes it.
        processes: in its place; None: as many as it says.

    Raises:
        TrainingError: it is none, or asks for several machines.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    number = [] if processes is None else ["--num_processes", str(processes)]
    words = ["--config_file", str(configuration), *number, "--module", JOB]
    try:
        asked, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TrainingError(
            f"{configuration} is no configuration that accelerate reads ({error}); expected one "
            "that `accelerate config` or `heron launchers` writes"
        ) from None
    if asked.num_machines > 1:
        raise TrainingError(
            f"{configuration} asks for {asked.num_machines} machines; expected one: of several, "
            "take hosts/pretrain.sh or slurm/pretrain.sbatch of `heron launchers FOLDER`"
        )
    if asked.use_deepspeed:
        asked.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, common = launch.prepare_deepspeed_cmd_env(asked)
    elif asked.multi_gpu:
        common = launch.prepare_multi_gpu_env(asked)
    else:
        _, common = launch.prepare_simple_launcher_cmd_env(asked)
        return [common]
    several = str(asked.num_processes)
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(asked.main_process_port)}
    common |= {"WORLD_SIZE": several, "LOCAL_WORLD_SIZE": several}
    ranks = map(str, range(asked.num_processes))
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


def run_together(words: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Runs the main job in a process of each environment, and waits for all of them.

    SIGTERM, SIGUSR1 and Ctrl-C have all of them save and stop; a second Ctrl-C kills them.

    Args:
        words: arguments of `pipeline/pretrain.py`.
        environments: of the processes.

    Returns:
        The highest status of a process; 128 more than the signal's number where one killed it.
    """
    told, interrupts = False, 0

    def tell(number: int, frame: FrameType | None) -> None:
        nonlocal told, interrupts
        told, interrupts = True, interrupts + (number == signal.SIGINT)

    # The processes ignore signals until they listen themselves: else one would kill them.
    before = {one: signal.signal(one, signal.SIG_IGN) for one in SIGNALS}
    command = [sys.executable, "-P", "-m", JOB, *words]  # -P: no package of the working folder
    children = [subprocess.Popen(command, env={**os.environ, **one}) for one in environments]
    try:
        for one in SIGNALS:
            signal.signal(one, tell)
        while running := [child for child in children if child.poll() is None]:
            if told:  # again and again, for one that did not listen yet
                for child in running:
                    child.send_signal(signal.SIGKILL if interrupts > 1 else signal.SIGTERM)
            time.sleep(POLL_S)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if interrupts > 1:
        return INTERRUPTED
    codes = [child.returncode for child in children]
    return max(code if code >= 0 else 128 - code for code in codes)
