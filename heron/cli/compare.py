"""`heron compare | tune`: the scores of methods on the same rows, each given the same search."""

import shlex
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from heron.cli.arguments import Location, MethodName, Override, Overwrite
from heron.config.errors import ConfigError
from heron.config.sections import Natural
from heron.config.shipped import CONFIGS, find_config
from heron.shards.artefact import Count
from heron.shards.atomic import save_json
from heron.shards.terminal import print_markdown, print_table
from heron.training.tracking import read_result

if TYPE_CHECKING:
    from heron.data.reader import Reader
    from heron.studies.search import SearchSettings

SPACE = CONFIGS / "tuning" / "default.yaml"
Methods = Annotated[
    tuple[MethodName, ...], "of configs/methods.yaml; own: the experiment as it stands"
]
Trials = Annotated[Natural, "of each; the first is the experiment as it stands"]
Score = Annotated[
    str | None, "that choices are made by (default: accuracy of one class, auc_macro of several)"
]
Ranges = Annotated[Path, "file of what is drawn, as configs/tuning/default.yaml"]
Seed = Annotated[Count, "of the draws"]


def compare(
    *overrides: Annotated[Override, "key=value of the experiment, for all methods"],
    config: Annotated[Location, "name of a shipped experiment, or a YAML file"],
    methods: Methods = ("dnn", "herocon"),
    baselines: Annotated[
        tuple[Literal["logistic", "forest"], ...], "scikit-learn's, on raw features and on each"
    ] = ("logistic", "forest"),
    folds: Annotated[Natural, "folds, or draws of the labelled rows"] = 10,
    first: Annotated[Count, "first of them"] = 0,
    trials: Trials = 8,
    seed: Seed = 0,
    score: Score = None,
    space: Ranges = SPACE,
    out: Annotated[Path | None, "folder of all that is made (default: runs/CONFIG-compare)"] = None,
    overwrite: Overwrite = False,
) -> None:
    """Says whether pretraining helps on your data: methods, tuned alike, on the same rows.

    In each fold every method has the same number of trials, of which the validation rows, a share
    of the labelled ones, choose the best; only that one reads the test rows, once. The same command
    goes on where it was stopped, and with more --folds keeps those that it has.

    heron compare --config scene --methods dnn herocon simclr --trials 8
    """
    settings, reader = _search_settings(
        config, overrides, space, trials, seed, score, out, "compare", overwrite
    )
    from heron.data.protocol import assign
    from heron.studies.comparison import (
        Comparison,
        FoldResult,
        load_or_compute,
        score_method,
        score_raw,
        shared_rows,
    )

    # All are checked before the first run, so that an invalid one costs no run.
    experiments = {
        fold: {name: settings.experiment(name, fold) for name in methods}
        for fold in range(first, first + folds)
    }
    baselines = tuple(dict.fromkeys(baselines))
    rows, roles = defaultdict[str, list[FoldResult]](list), []
    for fold, by_method in experiments.items():
        results: list[FoldResult] = []
        for name, experiment in by_method.items():
            folder = settings.out / f"fold-{fold}" / name
            work = partial(score_method, settings, experiment, name, folder, baselines)
            results += load_or_compute(
                settings, reader, experiment, f"{name}-{fold}", baselines, work
            )
        experiment = by_method[methods[0]]
        for kind in baselines:
            work = partial(score_raw, settings, experiment, kind)
            results += load_or_compute(
                settings, reader, experiment, f"{kind}-raw-{fold}", (kind,), work
            )
        for result in results:
            rows[result.name].append(result)
        roles.append(assign(reader, experiment.data.split, experiment.data.protocol))
    comparison = Comparison(
        f"{reader.manifest.dataset}: {len(roles[0].labelled):,} labelled, "
        f"{len(roles[0].validation):,} validation and {len(roles[0].test):,} test rows; "
        f"{trials} trials of each method",
        settings.score,
        reader.manifest.labels.kind != "multi_label",
        [*experiments],
        rows,
        shared_rows([r.labelled for r in roles], [r.test for r in roles]),
    )
    print_markdown(comparison.write(settings.out))


def tune(
    config: Annotated[Location, "name of a shipped experiment, or a YAML file"],
    *overrides: Annotated[Override, "key=value of the experiment, for all methods"],
    methods: Methods = ("own",),
    trials: Trials = 16,
    seed: Seed = 0,
    score: Score = None,
    space: Ranges = SPACE,
    out: Annotated[Path | None, "folder of all that is made (default: runs/CONFIG-tune)"] = None,
    overwrite: Overwrite = False,
) -> None:
    """Searches rate, dropout, weights and temperatures by validation rows, equally for each method.

    It writes each method's best experiment as OUT/METHOD.yaml, whose run scores the test rows; no
    test row is read before. The same command goes on where it was stopped.

    heron tune scene --methods dnn herocon --trials 16
    """
    settings, _ = _search_settings(
        config, overrides, space, trials, seed, score, out, "tune", overwrite
    )
    from heron.config.experiment import dump_config, parse_config
    from heron.studies.search import search

    refuse_other_score(settings, methods)
    lines = list[list[str]]()
    # All are checked before the first run, so that an invalid one costs no run.
    experiments = {name: settings.experiment(name, None) for name in methods}
    for name, experiment in experiments.items():
        best, rows = search(settings, experiment, settings.out / name)
        tree = best.config.model_dump(mode="json")
        tree["run"] = {"dir": str(settings.out / f"{name}-best"), "resume": "never"}
        tree["evaluate"]["test"] = True
        path, chosen = settings.out / f"{name}.yaml", dump_config(parse_config(tree))
        command = shlex.join(["heron", "pretrain", str(path)])
        path.write_text(f"# {best.description}; {command}\n{chosen}")
        save_json(settings.out / f"{name}.json", {"score": settings.score, "trials": rows})
        best_score, base_score = rows[best.number]["validation"], rows[0]["validation"]
        as_it_stands = "nan" if base_score is None else f"{base_score:.4f}"
        lines.append([name, as_it_stands, f"{best_score:.4f}", best.description])
    print_table(["", f"{settings.score} as it stands", "best", "with"], lines, headed=False)


def refuse_other_score(settings: "SearchSettings", methods: Sequence[str]) -> None:
    """Raises a ConfigError where an earlier search chose by another score, whose choice is kept."""
    for path in (settings.out / f"{name}.json" for name in methods):
        if path.exists() and (score := read_result(path).get("score")) != settings.score:
            raise ConfigError(
                f"{path.with_suffix('.yaml')} was chosen by {score}, not by {settings.score}; "
                "choose another --out, or add --overwrite, which moves the whole folder aside"
            )


def folder_of(config: str, verb: str) -> Path:
    """Returns the default folder of a search."""
    return Path("runs") / f"{find_config(config).stem}-{verb}"


def _search_settings(
    config: str,
    overrides: Sequence[str],
    space: Path,
    trials: int,
    seed: int,
    score: str | None,
    out: Path | None,
    verb: str,
    overwrite: bool,
) -> "tuple[SearchSettings, Reader]":
    """Returns the settings of a search, and its data set, which is built where it is missing."""
    from heron.config.experiment import load_config
    from heron.data.dataset import build_data, open_reader
    from heron.studies.search import SearchSettings, load_space
    from heron.training.earlier_run import begin_anew

    path = find_config(config)
    data = load_config(path, overrides).data
    if data.webdataset is not None:
        raise ConfigError(
            "data.webdataset streams rows without numbers, of which no fold can be made; expected "
            "indexed shards: `heron shards index`, then data.webdataset=null and data.path"
        )
    data.refuse_missing("build it with `heron shards build`: see the first lines of the experiment")
    build_data(data)
    reader = open_reader(data)
    if (kind := reader.manifest.labels.kind) == "none":
        raise ConfigError(f"{data.path} has no labels; expected some: without, nothing is compared")
    score = score or ("auc_macro" if kind == "multi_label" else "accuracy")
    folder = out or folder_of(config, verb)
    settings = SearchSettings(path, overrides, load_space(space), trials, seed, score, folder)
    if overwrite:
        begin_anew(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return settings, reader
