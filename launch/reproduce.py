"""`heron reproduce TABLE`: run a paper's table over its folds, measured beside published."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.verb import Verb
from pipeline.config import Config, load_config
from pipeline.errors import ConfigError
from shards.manifest import MANIFEST

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SCORES = {"F1": "f1_weighted", "AUC": "auc_macro"}


@dataclass(frozen=True)
class Method:
    """One row: the overrides that make the method, and what was published for it.

    Attributes:
        overrides: on the table's configuration.
        published: (mean, std) of each score of `SCORES`, in order.
    """

    overrides: tuple[str, ...]
    published: tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Table:
    """A published table: its experiment, its folds and its methods.

    Attributes:
        config: a file of configs/.
        runs: how many folds were published.
        source: paper and table.
        data: how to get the data and build the shards.
    """

    config: str
    runs: int
    source: str
    data: str
    methods: dict[str, Method]


_UNSUPERVISED = "objective.weighted_unsupervised"
_SUPERVISED = "objective.weighted_supervised"
TABLES = {
    "scene": Table(
        config="scene.yaml",
        runs=5,
        source="HeroCon (KDD 2022), Table 2, Scene",
        data="download scene (Mulan's multi-label data sets) and run: heron shards build mulan "
        "--arff scene-train.arff scene-test.arff --xml scene.xml --out data/scene",
        methods={
            "DNN": Method(
                (f"{_UNSUPERVISED}=null", f"{_SUPERVISED}=null"),
                ((0.5902, 0.0122), (0.8647, 0.0077)),
            ),
            "HeroCon-s": Method(
                (f"{_UNSUPERVISED}=null", f"{_SUPERVISED}.weight=0.01"),
                ((0.6104, 0.0166), (0.8807, 0.0117)),
            ),
            "HeroCon-u": Method(
                (f"{_UNSUPERVISED}.weight=0.3", f"{_SUPERVISED}=null"),
                ((0.6231, 0.0181), (0.8831, 0.0118)),
            ),
            "HeroCon": Method((), ((0.6366, 0.0141), (0.8878, 0.0079))),
        },
    )
}


def reproduce(table: Table, out: Path, overrides: list[str]) -> str:
    """Run what is not there yet, and make the table.

    Args:
        table: what to run.
        out: a folder; each run has its own in it, METHOD-fold, and is kept.
        overrides: on every run.

    Returns:
        The table as Markdown, also written to `out/table.md`.

    Raises:
        ConfigError: the data is not there; says how to get it.
    """
    from pipeline.pretrain import pretrain  # here, so that `heron --help` need not load torch

    for name, method in table.methods.items():
        for fold in range(table.runs):
            folder = out / f"{name}-{fold}"
            config = _config(table, method, fold, folder, overrides)
            if not _is_done(folder, config):
                pretrain(config)
    text = render(table, out)
    (out / "table.md").write_text(text)
    return text


def render(table: Table, out: Path) -> str:
    """The table of runs that are there."""
    from scipy.stats import ttest_ind_from_stats

    lines = [
        f"{table.source}: {table.runs} folds, mean ± std; p of Welch's t-test against published.",
        "",
        "| method | " + " | ".join(f"{s} published | {s} measured | p" for s in SCORES) + " |",
        "|---|" + "---|---|---|" * len(SCORES),
    ]
    for name, method in table.methods.items():
        results = [_result(out / f"{name}-{fold}") for fold in range(table.runs)]
        cells = [name]
        for (mean, std), key in zip(method.published, SCORES.values(), strict=True):
            ours = np.array([result[key] for result in results])
            spread = ours.std(ddof=1) if len(ours) > 1 else 0.0
            p = ttest_ind_from_stats(
                ours.mean(), spread, len(ours), mean, std, table.runs, equal_var=False
            ).pvalue
            cells += [f"{mean:.4f} ± {std:.4f}", f"{ours.mean():.4f} ± {spread:.4f}", f"{p:.2g}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _config(table: Table, method: Method, fold: int, folder: Path, overrides: list[str]) -> Config:
    own = [*method.overrides, f"data.protocol.fold={fold}", f"run.dir={folder}"]
    config = load_config(CONFIGS / table.config, [*overrides, *own])
    if not (Path(config.data.path) / MANIFEST).exists():
        raise ConfigError(f"{config.data.path} holds no shards; {table.data}")
    return config


def _is_done(folder: Path, config: Config) -> bool:
    """Whether the run is there; one of another configuration is not taken for it, nor lost."""
    if not (folder / "result.json").exists():
        return False
    if load_config(folder / "config.yaml") != config:
        raise ConfigError(
            f"{folder} holds a run of another configuration; choose another --out, or remove it"
        )
    return True


def _result(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", choices=sorted(TABLES), help="which published table")
    parser.add_argument("overrides", nargs="*", help="key=value on every run")
    parser.add_argument("--out", type=Path, help="folder of the runs (default: runs/TABLE-table)")


def _run(arguments: argparse.Namespace) -> int:
    out = arguments.out or Path("runs") / f"{arguments.table}-table"
    print(reproduce(TABLES[arguments.table], out, arguments.overrides))
    return 0


REPRODUCE = Verb("run a published table, measured beside published", _add, _run)
