"""What decides the numbers of a run, and the fingerprint that runs of the same numbers share."""

from typing import Any

from heron.base.artefact import fingerprint
from heron.data.options import without_locations
from heron.distributed.agreement import versions
from heron.experiment.config import Config

HOST_KEYS = {  # options that may differ from host to host, and change no number
    "run": {"dir"},
    "data": {"cache", "storage_options", "verify", "workers"},
    "train": {"cpu_threads"},
}


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
    del facts["run"]  # only resumption is left in it
    for key in ("steps", "timeout_s", "keep_checkpoints", "save_every_epochs", "save_every_steps"):
        del facts["train"][key]
    return fingerprint(facts)
