"""`heron compare | tune`: the scores of methods on the same rows, each given the same search."""

import math
import shlex
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from heron.base.artefact import Count
from heron.base.atomic import locked, save_json
from heron.base.errors import ConfigError
from heron.base.sections import Natural, expand_home
from heron.base.shipped import CONFIGS, find_config
from heron.base.terminal import print_markdown, print_table
from heron.base.workers import Executor
from heron.cli.arguments import (
    Address,
    AtOnce,
    Location,
    MethodName,
    Override,
    Overwrite,
    UsageError,
)
from heron.studies import quick as shorter
from heron.training.tracking import read_result

if TYPE_CHECKING:
    from heron.data.reader import Reader
    from heron.experiment.config import Config
    from heron.studies.comparison import Comparison, Kind
    from heron.studies.search import SearchSettings

QUICK_FOLDS = 5
SPACE = CONFIGS / "tuning" / "default.yaml"
Methods = Annotated[
    tuple[MethodName, ...],
    "from configs/methods.yaml; own: the experiment unchanged; +key=value changes one alone",
]
Score = Annotated[
    str | None, "to choose by (default: accuracy, or auc_macro if rows have several labels)"
]
Ranges = Annotated[Path, "file of the ranges to draw from, like configs/tuning/default.yaml"]
Seed = Annotated[Count, "of the random draws"]
Sampler = Annotated[Literal["random", "optuna"], "random, or optuna: TPE from the fifth trial on"]


def compare(
    *overrides: Annotated[
        str, "the experiment, unless --config is given; key=value for all methods"
    ],
    config: Annotated[Location | None, "name of a shipped experiment, or a YAML file"] = None,
    quick: Annotated[
        bool, "about five minutes: one trial, shorter runs, 2,000 labelled rows at most"
    ] = False,
    methods: Annotated[
        tuple[MethodName, ...], "as in tune (default: dnn herocon; with --quick dnn own)"
    ] = (),
    baselines: Annotated[
        tuple[Literal["logistic", "forest", "boosting"], ...],
        "scikit-learn's classifiers, on raw features and on those of each method",
    ] = ("logistic", "forest"),
    folds: Annotated[
        Natural | None, "folds, or draws of the labelled rows (default: 10; with --quick 5)"
    ] = None,
    first: Annotated[Count, "first fold"] = 0,
    trials: Annotated[
        Natural | None, "per method, the first unchanged (default: 8; with --quick 1)"
    ] = None,
    seed: Seed = 0,
    score: Score = None,
    space: Ranges = SPACE,
    sampler: Sampler = "random",
    address: Address = None,
    at_once: AtOnce = None,
    out: Annotated[
        Path | None, "output folder (default: runs/CONFIG-compare or CONFIG-quick)"
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Says whether pretraining helps on your data: methods, tuned alike, on the same rows.

    In each fold every method has the same number of trials, of which the validation rows, a share
    of the labelled ones, choose the best; only that one reads the test rows, once. The same command
    goes on where it was stopped, and with more --folds keeps those that it has.

    heron compare --config scene --methods dnn herocon simclr --trials 8
    heron compare mine.yaml --methods own own+data.protocol.leave_out=reports/audit/decisions.csv
    heron compare --quick mine.yaml
    """
    config, words = split(config, overrides)
    folds, trials = folds or (QUICK_FOLDS if quick else 10), trials or (1 if quick else 8)
    if quick:
        methods = methods or _quick_methods(config, words)
        raw = "".join(f", {name} on raw features" for name in baselines)
        shorter.announce(f"{folds} folds of {' and '.join(methods)}, {trials} trial of each{raw}")
    from heron.studies.engine import executor

    methods = methods or ("dnn", "herocon")
    verb = "quick" if quick else "compare"
    words = with_threads(find_config(config), words, address, at_once)
    with _search_settings(
        config, words, space, sampler, trials, seed, score, out, verb, overwrite
    ) as (settings, reader):
        baselines = tuple(dict.fromkeys(baselines))
        numbers = range(first, first + folds)
        if quick:
            settings = shorter.shortened(settings, reader, methods, baselines, [*numbers])
        # All are checked before the first run, so that an invalid one costs no run.
        experiments = {
            fold: {name: settings.experiment(name, fold) for name in methods} for fold in numbers
        }
        threads = next(iter(experiments[first].values())).train.cpu_threads
        with executor(address, at_once, threads) as runs_on:
            on_features = () if quick else baselines
            comparison = _run_folds(settings, reader, experiments, baselines, on_features, runs_on)
        _, taken = comparison.verdict()
        options, is_raw = taken.partition(" on raw features")[:2]
        if is_raw:
            path = settings.out / "results" / f"{options}-raw-{first}.json"
            print(f"{taken} is from scikit-learn; its options are in {path}")
        print_markdown(comparison.write(settings.out))


def _run_folds(
    settings: "SearchSettings",
    reader: "Reader",
    experiments: "Mapping[int, Mapping[str, Config]]",
    baselines: "Sequence[Kind]",
    on_features: "Sequence[Kind]",
    executor: Executor,
) -> "Comparison":
    """Runs each fold's methods, and scikit-learn's on raw features and on each method's."""
    from heron.data.protocol import assign
    from heron.studies.comparison import (
        Comparison,
        FoldResult,
        load_or_compute,
        score_method,
        score_raw,
        shared_rows,
    )
    from heron.studies.engine import Job, run_jobs

    started, jobs, roles = time.monotonic(), list[Job[list[FoldResult]]](), []
    for fold, by_method in experiments.items():
        for name, experiment in by_method.items():
            folder = settings.out / f"fold-{fold}" / shorter.as_file(name)
            work = partial(score_method, settings, experiment, name, folder, on_features)
            file = f"{shorter.as_file(name)}-{fold}"
            jobs.append(load_or_compute(settings, reader, experiment, file, on_features, work))
        plain = next(iter(by_method)).partition("+")[0]  # whatever a method leaves out
        experiment = settings.experiment(plain, fold)
        for kind in baselines:
            file = f"{kind}-raw-{fold}"
            work = partial(score_raw, settings, experiment, kind, file)
            jobs.append(load_or_compute(settings, reader, experiment, file, (kind,), work))
        roles.append(assign(reader, experiment.data.split, experiment.data.protocol))
    ended, in_a_fold = list[int](), len(jobs) // len(experiments)

    def tell(job: int) -> None:
        ended.append(job)
        if len(ended) == in_a_fold < len(jobs):
            minutes = (time.monotonic() - started) * (len(jobs) / in_a_fold - 1) / 60
            print(f"the other {len(roles) - 1} folds take about {minutes:.1f} minutes", flush=True)

    rows = defaultdict[str, list[FoldResult]](list)
    for results in run_jobs(jobs, executor, tell):
        for result in results:
            rows[result.name].append(result)
    return Comparison(
        f"{reader.manifest.dataset}: {len(roles[0].labelled):,} labelled, "
        f"{len(roles[0].validation):,} validation and {len(roles[0].test):,} test rows; "
        f"{settings.trials} trials of each method",
        settings.score,
        reader.manifest.labels.kind != "multi_label",
        [*experiments],
        rows,
        shared_rows([r.labelled for r in roles], [r.test for r in roles]),
    )


def with_threads(
    config: Path, overrides: Sequence[str], address: str | None, at_once: int | None
) -> list[str]:
    """Returns overrides that give each task one thread, unless the experiment has a number."""
    from heron.experiment.config import load_config
    from heron.studies.engine import is_parallel

    own = not is_parallel(address, at_once) or load_config(config, overrides).train.cpu_threads
    return [*overrides] if own else [*overrides, "train.cpu_threads=1"]


def split(config: str | None, words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the experiment, which may be among the words, and the overrides."""
    named = [word for word in words if "=" not in word]
    if config is not None:
        named.append(config)
    if len(named) != 1:
        raise UsageError(
            f"pass exactly one experiment (a name or a file), got {', '.join(named) or 'none'}"
        )
    return expand_home(named[0]), [word for word in words if "=" in word]


def _quick_methods(config: str, words: Sequence[str]) -> tuple[str, ...]:
    """Returns the experiment as it stands and, where it adds to a classifier, the plain network."""
    from heron.experiment.config import CLASSIFIERS, load_config

    terms = {*load_config(find_config(config), words).objective.terms()}
    return ("dnn", "own") if terms & {*CLASSIFIERS} and terms - {*CLASSIFIERS} else ("own",)


def tune(
    config: Annotated[Location, "name of a shipped experiment, or a YAML file"],
    *overrides: Annotated[Override, "key=value for all methods"],
    quick: Annotated[bool, "about five minutes: shorter runs, 2,000 labelled rows at most"] = False,
    methods: Methods = ("own",),
    trials: Annotated[
        Natural | None, "per method, the first unchanged (default: 16; with --quick 8)"
    ] = None,
    seed: Seed = 0,
    score: Score = None,
    space: Ranges = SPACE,
    sampler: Sampler = "random",
    address: Address = None,
    at_once: AtOnce = None,
    out: Annotated[
        Path | None, "output folder (default: runs/CONFIG-tune or CONFIG-tune-quick)"
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Searches rate, dropout, crops, weights and temperatures by validation rows, for each method.

    It writes each method's best experiment as OUT/METHOD.yaml, whose run scores the test rows; no
    test row is read before. The same command goes on where it was stopped.

    heron tune scene --methods dnn herocon --trials 16
    heron tune --quick mine.yaml
    """
    words = with_threads(find_config(config), overrides, address, at_once)
    trials, verb = trials or (8 if quick else 16), "tune-quick" if quick else "tune"
    if quick:
        shorter.announce(f"{trials} trials of {' and '.join(methods)}")
    from heron.data.protocol import assign
    from heron.experiment.config import dump_config, parse_config
    from heron.studies.engine import executor, run_jobs
    from heron.studies.search import apply, search

    with _search_settings(
        config, words, space, sampler, trials, seed, score, out, verb, overwrite
    ) as (settings, reader):
        for path in (
            settings.out / f"{shorter.as_file(name)}.json" for name in methods
        ):  # its choice is kept
            if path.exists() and (earlier := read_result(path).get("score")) != settings.score:
                raise ConfigError(
                    f"{path.with_suffix('.yaml')} was chosen by {earlier}, not by "
                    f"{settings.score}; choose another --out, or add --overwrite, which moves the "
                    "whole folder aside"
                )
        lines = list[list[str]]()
        # All are checked before the first run, so that an invalid one costs no run.
        whole = {name: settings.experiment(name, None) for name in methods}
        if quick:
            settings = shorter.shortened(settings, reader, methods, (), [None])
        experiments = {name: settings.experiment(name, None) for name in methods}
        first = next(iter(experiments.values()))
        with executor(address, at_once, first.train.cpu_threads) as runs_on:
            jobs = [
                search(settings, own, settings.out / shorter.as_file(name))
                for name, own in experiments.items()
            ]
            found = run_jobs(jobs, runs_on)
        for name, (best, rows) in zip(experiments, found, strict=True):
            tree = whole[name].model_dump(mode="json")
            apply(best.values, tree)
            file = shorter.as_file(name)
            tree["run"] = {"dir": str(settings.out / f"{file}-best"), "resume": "never"}
            tree["evaluate"]["test"] = True
            path, chosen = settings.out / f"{file}.yaml", dump_config(parse_config(tree))
            command = shlex.join(["heron", "pretrain", str(path)])
            path.write_text(f"# {best.description}; {command}\n{chosen}")
            save_json(settings.out / f"{file}.json", {"score": settings.score, "trials": rows})
            best_score, base_score = rows[best.number]["validation"], rows[0]["validation"]
            as_it_stands = "nan" if base_score is None else f"{base_score:.4f}"
            lines.append([name, as_it_stands, f"{best_score:.4f}", best.description])
        if settings.score == "accuracy" and trials > 1:
            count = len(assign(reader, first.data.split, first.data.protocol).validation)
            error = 0.5 / math.sqrt(max(count, 1))
            print(f"by {count:,} validation rows: a gain not well above {error:.3f} may be chance")
        print_table(["", f"{settings.score} as it stands", "best", "with"], lines, headed=False)


def folder_of(config: str, verb: str) -> Path:
    """Returns the default folder of a search."""
    return Path("runs") / f"{find_config(config).stem}-{verb}"


@contextmanager
def _search_settings(
    config: str,
    overrides: Sequence[str],
    space: Path,
    sampler: Literal["random", "optuna"],
    trials: int,
    seed: int,
    score: str | None,
    out: Path | None,
    verb: str,
    overwrite: bool,
) -> "Iterator[tuple[SearchSettings, Reader]]":
    """Gives the settings of a search and its data set, built if need be, and locks its folder."""
    from heron.data.dataset import build_data, open_reader
    from heron.experiment.config import load_config
    from heron.studies.search import SearchSettings, load_space
    from heron.training.earlier_run import begin_anew

    path = find_config(config)
    data = load_config(path, overrides).data
    if data.webdataset is not None:
        raise ConfigError(
            "data.webdataset streams rows without numbers, so there are no folds; index the shards "
            "(`heron shards index`), then set data.webdataset=null and data.path"
        )
    data.refuse_missing(
        "build it with `heron shards build`; the first lines of the experiment say how"
    )
    build_data(data)
    reader = open_reader(data)
    if (kind := reader.manifest.labels.kind) == "none":
        raise ConfigError(
            f"{data.path} has no labels, so there is nothing to compare by; add labels"
        )
    score = score or ("auc_macro" if kind == "multi_label" else "accuracy")
    folder = out or folder_of(config, verb)
    ranges = load_space(space)
    settings = SearchSettings(path, overrides, ranges, trials, seed, score, folder, sampler)
    with locked(folder):
        if overwrite:
            begin_anew(folder)
        folder.mkdir(parents=True, exist_ok=True)
        yield settings, reader
