"""Folders of studies, as `heron study` leaves them, with numbers that are known."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from heron.base.artefact import fingerprint

BASE: dict[str, Any] = {"title": "Made up", "base": "configs/frames.yaml"}


def trial(name: str, values: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A line of trials.jsonl: a finished trial, with changes."""
    typed = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
    return {
        "trial": name,
        "status": "done",
        "error": None,
        "values": {"workers": 1, "strategy": "ddp", "seed": None, **values},
        "command": f"accelerate launch pipeline/pretrain.py {typed}",
        "run": f"trials/{name}",
        "result": {"f1_weighted": 0.5, "steps": 9, "strategy": "one process", "version": "1"},
        "measured": {"step_s": 1.0, "samples_per_s": 100.0, "peak_memory_bytes": 5 * 10**8},
    } | changes


def sealed(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line with the fingerprint of what it says."""
    return {**line, "fingerprint": fingerprint(line)}


def study(
    folder: Path,
    trials: Iterable[Mapping[str, Any]],
    batches: Mapping[str, int] | None = None,
    **asked: Any,
) -> Path:
    """Write the folder of a study.

    Args:
        folder: of it.
        trials: its lines.
        batches: rows of the global batch of some trials, which leave a line of metrics then.
        asked: keys of study.yaml; it plans as many trials as have lines, if they do not say.
    """
    folder.mkdir(parents=True)
    lines = list(trials)
    tree = BASE | {"measure": {"x": "optim.lr", "y": ["f1_weighted"]}} | asked
    if not tree.keys() & {"vary", "cases"}:
        tree["cases"] = [{"trial": number} for number in range(max(1, len(lines)))]
    (folder / "study.yaml").write_text(yaml.safe_dump(tree))
    (folder / "trials.jsonl").write_text("".join(json.dumps(sealed(line)) + "\n" for line in lines))
    for line in lines:
        run = folder / line["run"]
        run.mkdir(parents=True, exist_ok=True)
        if rows := (batches or {}).get(line["trial"]):
            metrics = {"step": 0, "loss": 1.0, "samples_per_s": rows / 0.3, "seconds": 0.3}
            (run / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    return folder


def negatives(folder: Path, exponent: float = 1.7, bend: float = 0.0, **asked: Any) -> Path:
    """A study of the negative set: three repeats a size, time a power of |N_i|, bent a little."""
    lines: list[dict[str, Any]] = []
    batches = {}
    for i, size in enumerate((100, 250, 500, 1000, 2500, 5000)):
        for seed in range(3):
            name = f"{len(lines):03}"
            rows = size + 1
            took = 2e-6 * size**exponent * (1 + 0.03 * (seed - 1)) * (1 + bend * (-1) ** i)
            score = 0.55 + 0.02 * size**0.2 + 0.004 * (seed - 1)
            batches[name] = rows
            lines.append(
                trial(
                    name,
                    {"data.batch.unlabelled": rows - 50, "seed": seed},
                    result={"f1_weighted": score, "auc_macro": 0.9},
                    measured={"step_s": took, "samples_per_s": rows / took, "data_wait_s": 1e-4},
                )
            )
    measure = {"x": "data.batch.unlabelled", "y": ["f1_weighted", "step_s"], "fits": ["power"]}
    return study(folder, lines, batches, **({"measure": measure} | asked))
