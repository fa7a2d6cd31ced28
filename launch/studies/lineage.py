"""Population based training: a run that goes on from another's weights, with other values."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heron.launch.studies.ledger import write_rows
from heron.pipeline.config.errors import CheckpointError
from heron.pipeline.config.experiment import Config, dump_config, load_config
from heron.pipeline.data.mined import MINED
from heron.pipeline.training import checkpoint
from heron.pipeline.training.run_lock import Hold
from heron.pipeline.training.tracking import read_metrics

LINEAGE = "lineage.jsonl"


def exploit(source: Path, config: Config, values: Mapping[str, Any]) -> None:
    """Makes a run go on from a copy of another run's checkpoint, under its own configuration.

    The optimiser's state and mined negatives come along; the checkpoint then says that it was made
    with the new values, so that `run.resume=auto` goes on from it. The run's lineage.jsonl, which
    says which weights it had when, is written last: after an interruption all of it is done again.

    Args:
        source: a checkpoint's folder, at a step that the run that takes it has not passed.
        config: of the run that takes it.
        values: of what varies, in `config`.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        Held: a worker still has the run's folder.
    """
    if fault := checkpoint.damage(source):
        raise CheckpointError(
            f"{source} is damaged ({fault}), and {config.run.dir} was to go on from it; bring it "
            "back, or begin the study anew in another folder"
        )
    donor = load_config(source / "config.yaml")
    run = Path(config.run.dir)
    snapshot = checkpoint.load(source, donor)
    texts = {
        "config.yaml": dump_config(config),
        "model.json": (source / "model.json").read_text(),
    }
    line = {
        "step": snapshot.position.step,
        "from": Path(donor.run.dir).name,
        "values": dict(values),
    }
    with Hold(run) as hold:
        hold.acquire()
        shutil.rmtree(run / MINED, ignore_errors=True)
        if (tables := Path(donor.run.dir) / MINED).is_dir():
            shutil.copytree(tables, run / MINED)
        checkpoint.save(run / "checkpoints", snapshot, texts, newest=1)  # its own are of no use now
        write_rows(run / LINEAGE, [*of(run), line])


def of(run: Path) -> list[dict[str, Any]]:
    """Returns what a run has taken over: at which step, from which trial, and its values then."""
    return read_metrics(run / LINEAGE)
