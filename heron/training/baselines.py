"""Baselines on the same labels: three of scikit-learn, and the plain network."""

import hashlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic_core import to_json

from heron.base.errors import Stopped, TrainingError
from heron.data.dataset import load_or_assign_roles, open_reader
from heron.data.options import Data
from heron.data.rows import Roles
from heron.data.views import Views
from heron.distributed.agreement import versions
from heron.distributed.collectives import on_main, rank
from heron.evaluation.evaluator import Evaluator, Predictions
from heron.evaluation.metrics import Evaluate, Scores
from heron.evaluation.scikit import KINDS, NAMES, Kind, raw_inputs, tune
from heron.experiment.config import CLASSIFIERS, Config, parse_config

SUMMARISED = ("auc_macro", "f1_weighted", "accuracy", "knn_f1_weighted", "knn_accuracy")
FILE = "baselines.json"  # in the run's folder
MOST_BOOSTED = 20  # labels or classes, each of which has trees of its own: with more, hours
LOOK_S = 0.5  # between two looks for a signal


class BackgroundBaselines:
    """scikit-learn's baselines, which a process of their own fits while the networks train.

    Beside a GPU it computes where a core of the main process's machine is idle; where the cores
    train, it has its share of them, or it would never end. It reads the data itself, says what it
    has found, and ends with the main process, however that ends. It writes the scores of each
    baseline to the run's folder; a later start fits only what is not there for the same data,
    options and versions. On the other processes nothing is wanted, and nothing happens.
    """

    def __init__(
        self,
        config: Config,
        evaluator: Evaluator,
        roles: Roles,
        write_report: Callable[[list[str], int], None],  # told of what is to come, and of the step
    ) -> None:
        """Wants something if `evaluate.baselines` does, and rows can be learnt and tested."""
        self.possible = len(roles.labelled) > 0 and len(roles.test) > 0
        wants = self.possible and config.evaluate.fits_columns and rank() == 0
        many = len(evaluator.reader.manifest.labels.names) > MOST_BOOSTED
        kinds = [kind for kind in KINDS if not (many and kind == "boosting")]
        self._wanted = kinds if wants else []
        self._path, self._write_report = Path(config.run.dir) / FILE, write_report
        self._watchdog, self._threads = evaluator.watchdog, torch.get_num_threads()
        self._process: subprocess.Popen[bytes] | None = None
        self._beside_gpu = self._gives_way = evaluator.views.device.type == "cuda"
        data = config.data.model_dump(mode="json") | {"build": None}
        data["fingerprint"] = evaluator.reader.manifest.fingerprint
        data["views"] = [view | {"augment": []} for view in data["views"]]
        options = {key: getattr(config.evaluate, key) for key in ("threshold", "batch")}
        self._asked: dict[str, Any] = {"data": data, "evaluate": options, "inputs": "stored views"}
        packages = {name: version(name) for name in ("scikit-learn", "scipy")}
        facts = json.dumps([self._asked, versions(), packages], sort_keys=True)
        self._facts = hashlib.sha256(facts.encode()).hexdigest()

    @property
    def scores(self) -> Scores:
        """What is known so far, by names such as `logistic_auc_macro`."""
        return {
            f"{kind}_{name}": math.nan if value is None else value
            for kind, of in (_read(self._path, self._facts) if self._wanted else {}).items()
            for name, value in of.items()
        }

    @property
    def to_come(self) -> list[str]:
        """Names of the baselines that are wanted and not fitted yet."""
        known = _read(self._path, self._facts) if self._wanted else {}
        return [NAMES[kind] for kind in self._wanted if kind not in known]

    def start(self, idle: bool | None = None) -> None:
        """Starts a process that fits what is wanted; with `idle` it waits for idle cores."""
        if not self._wanted:
            return
        idle = self._gives_way = self._beside_gpu if idle is None else idle
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "heron.training.baselines"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            process_group=0,  # Ctrl-C is for the run, which ends this process
        )
        asked = {"file": str(self._path), "facts": self._facts, "threads": self._threads}
        asked["kinds"] = self._wanted
        assert self._process.stdin
        self._process.stdin.write(json.dumps(self._asked | asked | {"idle": idle}).encode() + b"\n")
        self._process.stdin.flush()

    def look(self, step: int, steps: int) -> None:
        """Writes the report after `step` of `steps` steps, if the process has ended since."""
        if self._process and self._process.poll() is not None:
            self.close()
            self.report(f"at step {step:,} of {steps:,}", step)

    def report(self, state: str, step: int) -> None:
        """Writes the report of `step` steps if a baseline is known; `state` is the network's."""
        if not self.scores:
            return
        try:
            self._write_report([f"the network ({state})", *self.to_come], step)
        except Exception as error:  # a disk, a chart: other processes train on
            print(f"the report cannot be written yet: {error}", flush=True)

    def wait(self, stopped: Callable[[], object]) -> Scores:
        """Returns the scores of all that is wanted; every process must call it.

        What idle cores have not fitted begins again with its share of them: there may be none.

        Raises:
            Stopped: `stopped()` is true before all is fitted.
            TrainingError: the process that fits them has ended without.
        """

        def work() -> Scores:
            if self._gives_way or (self._process and self._process.poll() is not None):
                self.close()
            if self.to_come and not self._process:
                self.start(idle=False)
            with self._watchdog.busy():
                while self._process and (status := self._process.poll()) is None:
                    if stopped():
                        missing = " and ".join(self.to_come)
                        raise Stopped(f"a signal came; all is saved, but {missing} not yet fitted")
                    time.sleep(LOOK_S)
            self.close()
            if self.to_come:
                raise TrainingError(
                    f"the process that fits {self.to_come[0]} ended with status {status} and "
                    "without scores (-9 is often a lack of memory); run again with "
                    "run.resume=auto, which fits it again"
                )
            return self.scores

        return on_main(work)

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _read(path: Path, facts: str) -> dict[str, dict[str, float | None]]:
    """Returns the scores of each kind of baseline that a file has for these facts."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # what is damaged is fitted again
        content = json.loads(path.read_bytes())
        return dict(content["scores"]) if content["facts"] == facts else {}
    return {}


def compare(
    config: Config,
    background: BackgroundBaselines,
    scores: Scores,  # of the run itself
    train: Callable[[Config], Mapping[str, Any]],  # trains, and returns what result.json holds
    progress: Callable[[list[str]], None],  # told of baselines to come
    stopped: Callable[[], object],  # whether a signal was received
) -> Scores:
    """Returns the scores of a run's baselines on its test rows; every process must call it.

    The plain network is the experiment with the classifier's term alone, trained by the same code
    in the run's subfolder `plain`; it exists if the experiment has that term and another. Scores
    are named `plain_...`, and `logistic_...`, `forest_...` and `boosting_...`, these with the
    options that cross-validation chose.
    """
    if not background.possible:
        return {}
    plain_config = None if config.evaluate.baselines == "scikit-learn" else plain(config)
    same = plain_config is not None and plain_config.objective == config.objective
    to_come = [] if plain_config is None or same else ["the plain network"]
    if to_come or background.to_come:
        progress([*background.to_come, *to_come])
    plain_scores = scores if same else train(plain_config) if plain_config else {}
    found = {f"plain_{k}": plain_scores[k] for k in scores if k in plain_scores}
    return background.wait(stopped) | found


def plain(config: Config) -> Config | None:
    """Returns the experiment with the classifier's term alone, and no projections, or None."""
    tree = config.model_dump(mode="json")
    terms = {k: v for k, v in tree["objective"].items() if k in CLASSIFIERS}
    if not terms:
        return None
    tree["objective"] = terms
    tree["run"]["dir"] = str(Path(config.run.dir) / "plain")
    tree["model"]["matryoshka"] = []
    tree["evaluate"] |= {"baselines": False, "seeds": 1, "cross_view": False}
    if (config.train.keep_by or "").startswith("recall@"):
        tree["train"]["keep_by"] = None
    return parse_config(tree)


def other_seeds(config: Config) -> list[Config]:
    """Returns the experiment with each further seed of `evaluate.seeds`, in a folder of its own."""
    trees = []
    for seed in range(config.seed + 1, config.seed + config.evaluate.seeds):
        tree = config.model_dump(mode="json")
        tree["seed"], tree["run"]["dir"] = seed, str(Path(config.run.dir) / f"seed-{seed}")
        tree["evaluate"] |= {"seeds": 1, "map": "never"}
        if tree["evaluate"]["baselines"]:  # scikit-learn's use no seed
            only = config.evaluate.baselines == "scikit-learn"
            tree["evaluate"]["baselines"] = False if only else "plain"
        trees.append(tree)
    return [parse_config(tree) for tree in trees]


def summary(
    results: Sequence[Mapping[str, Any]], name: str
) -> tuple[list[str], list[list[str]]] | None:
    """Returns head and rows of a table of the run `name` and its baselines; None without scores.

    For several results, one per seed, cells are means and standard deviations.
    """
    rows = {name: "", f"{name}, validation": "validation_", "the plain network": "plain_"}
    rows |= {NAMES[kind]: f"{kind}_" for kind in KINDS}
    values = {
        (title, score): [result[prefix + score] for result in results if prefix + score in result]
        for title, prefix in rows.items()
        for score in SUMMARISED
    }
    scores = [k for k in SUMMARISED if any(values[title, k] for title in rows)]
    lines = [
        [title, *(_mean_std(values[title, k]) for k in scores)]
        for title in rows
        if any(values[title, k] for k in scores)
    ]
    return (["", *scores], lines) if lines else None


def _mean_std(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    return f"{np.mean(values):.4f}{spread}"


def _scores_of(
    kind: Kind,
    evaluator: Evaluator,
    labelled: Predictions,
    test: Predictions,
    validation: Predictions | None = None,
) -> Scores:
    """Tunes a classifier on labelled inputs; returns its scores, and the chosen options."""
    stored = zip(evaluator.views.views, evaluator.views.shapes, strict=True)
    shapes = {view.stored: tuple(shape) for view, shape in stored}  # each stored view once
    views = len(shapes) if len({*shapes.values()}) == 1 else 1

    def inputs(predictions: Predictions) -> NDArray[np.float32]:
        assert predictions.hidden is not None
        return predictions.hidden.reshape(len(predictions.y), views, -1)

    def predicted(predictions: Predictions) -> Predictions:
        return replace(predictions, probability=tuned.predict(inputs(predictions)))

    tuned = tune(kind, inputs(labelled), labelled.y, evaluator.exclusive)
    if tuned.edge:
        print(f"baselines: {NAMES[kind]}: {tuned.edge}")
    threshold = evaluator.threshold(predicted(validation) if validation else None)
    return evaluator.score(predicted(test), threshold) | tuned.options


def main() -> None:
    """Fits what a line on standard input asks for, and writes its file; ends with its input."""
    asked = json.loads(sys.stdin.readline())
    threads = os.listdir("/proc/self/task") if asked["idle"] else []
    threading.Thread(target=lambda: os._exit(len(os.read(0, 1))), daemon=True).start()
    for thread in threads:  # but not the one that waits for the end
        with suppress(OSError):  # where a sandbox forbids it
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(asked["threads"])
    path, facts = Path(asked["file"]), asked["facts"]
    known, inputs = _read(path, facts), list[Predictions]()
    for kind in asked["kinds"]:
        if kind not in known and not inputs:
            data, options = Data(**asked["data"]), Evaluate(**asked["evaluate"])
            reader = open_reader(data)
            roles = load_or_assign_roles(reader, data)
            evaluator = Evaluator(reader, Views(reader, data, torch.device("cpu")), options)
            rows = [roles.labelled, roles.test, *([roles.validation] if evaluator.fits else [])]
            inputs = [raw_inputs(evaluator, of_role) for of_role in rows]
        if kind not in known:
            print(f"baselines: fitting {NAMES[kind]} beside the run", flush=True)
            known[kind] = dict(_scores_of(kind, evaluator, *inputs))
            part, content = path.with_suffix(".part"), {"facts": facts, "scores": known}
            part.write_bytes(to_json(content, inf_nan_mode="null"))
            part.replace(path)
        found = ((name, known[kind].get(name)) for name in SUMMARISED)
        scores = ", ".join(f"{name} {value:.4f}" for name, value in found if value is not None)
        print(f"to beat: {scores}, by {NAMES[kind]} on the same labelled rows", flush=True)


if __name__ == "__main__":
    main()
