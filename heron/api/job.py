"""Pretrain: the main job, from configuration to report.

    accelerate launch -m heron.api.job --config scene optim.lr=0.1

The training loop is `training/trainer.py`. It runs on one CPU, one GPU, or many of either with
DistributedDataParallel, FSDP2 or DeepSpeed's ZeRO 0 to 3; only the accelerate configuration
differs. The default experiment is `faces`. The exit status is 0 at the end, 1 after an error, 75
when a signal was received and the state is saved, 76 when a process is dead or hangs, 130 after a
second Ctrl-C.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heron.base.cores import release_freed_memory, share_cores

if __name__ == "__main__":
    share_cores()  # before torch is imported

from heron.base.errors import (
    AGAIN,
    INTERRUPTED,
    LOST,
    STOPPED,
    ConfigError,
    DiskFull,
    HeronError,
    Lost,
    Stopped,
    TrainingError,
)
from heron.base.shipped import find_config
from heron.base.terminal import print_error
from heron.data.batches import worker_count
from heron.distributed import collectives
from heron.distributed.signals import StopSignals
from heron.distributed.watchdog import Watchdog, leave
from heron.experiment.config import Config, load_config
from heron.report.run_report import write_report
from heron.training.launch import end, fail, resolve_precision
from heron.training.run_lock import RunLock
from heron.training.trainer import Trainer

EXPECTED = (HeronError, OSError)
GO_ON = "run again with run.resume=auto to continue"
DEFAULT = "faces"


def pretrain(config: Config, overwrite: bool = False) -> dict[str, Any]:
    """Trains, evaluates and reports; every process is given the same experiment.

    A finished run in the folder is refused; with `overwrite` it is moved aside, whole.

    Returns:
        What the run's result.json holds.

    Raises:
        HeronError: the configuration, the data, a checkpoint or the loss is at fault.
        Stopped: a signal was received, and the state is saved.
        Lost: another process is gone.
    """
    if overwrite and config.run.resume != "never":
        raise ConfigError(
            f"--overwrite starts again, but run.resume={config.run.resume} continues; remove one "
            "of them"
        )
    config = resolve_precision(config)
    watchdog = Watchdog(config.train.timeout_s)
    run_lock = RunLock(Path(config.run.dir))
    with StopSignals(worker_count(config.data) > 0) as signals, watchdog, run_lock:
        try:
            return Trainer(config, watchdog, signals, write_report).run(run_lock, overwrite)
        except RuntimeError as error:
            if "deterministic implementation" in str(error):
                raise TrainingError(
                    "train.deterministic is true, but a kernel has no deterministic "
                    f"implementation: {error}; use another encoder, or set train.deterministic: "
                    "false"
                ) from error
            if not (watchdog.started and collectives.is_lost(error)):
                raise
            raise Lost(f"{watchdog.final_report()}; {error}") from error
        except DiskFull as error:
            again = "run again with run.resume=auto: the checkpoints are kept"
            raise DiskFull(str(error).replace(AGAIN, again)) from None
        finally:
            release_freed_memory()


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status. Expected faults print one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default=DEFAULT, help="experiment: a file, or a shipped name")
    parser.add_argument("--method", help="terms of a method of configs/methods.yaml")
    parser.add_argument("--overwrite", action="store_true", help="move a finished run aside")
    parser.add_argument("overrides", nargs="*", help="key=value, such as optim.lr=0.1")
    arguments = parser.parse_intermixed_args(words)
    try:
        config = find_config(arguments.config)
        experiment = load_config(config, arguments.overrides, arguments.method)
        _refuse_missing_shards(experiment, config)
        pretrain(experiment, arguments.overwrite)
    except Stopped as stopped:
        if collectives.rank() == 0:
            print_error("stopped", f"{stopped}; {GO_ON}")
        return end(STOPPED)
    except KeyboardInterrupt:
        if collectives.rank() == 0:
            print_error("stopped", f"immediately, by Ctrl-C, at the newest checkpoint; {GO_ON}")
        leave(INTERRUPTED)
    except Lost as lost:
        print_error("error", f"another process died: {lost}; {GO_ON}")
        leave(LOST)  # leaving the process group would wait for the one that is gone
    except EXPECTED as error:
        whose = f"rank {collectives.rank()}: " if collectives.world_size() > 1 else ""
        print_error("error", f"{whose}{error}")
        return fail()
    except Exception:
        traceback.print_exc()
        return fail()
    return end(0)


def _refuse_missing_shards(experiment: Config, path: Path) -> None:
    """Raises ConfigError with the command that builds them, if a comment of the file has it."""
    folder = experiment.data.path
    lines = [line.removeprefix("# ") for line in path.read_text().splitlines()]
    builds = [line for line in lines if line.startswith("heron shards build")]
    command = next((line for line in builds if line.endswith(f" --out {folder}")), None)
    if command and experiment.data.build is None and not Path(folder).exists():
        raise ConfigError(f"there are no shards in {folder}; build them with `{command}`")


if __name__ == "__main__":
    sys.exit(main())
