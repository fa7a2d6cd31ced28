"""Logistic regression and the forest, fitted beside the run by a process of their own.

A run that is stopped has them in its folder and its report; a resumed one does not fit them again;
the scores are those of scikit-learn on the arrays that were written.
"""

import errno
import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from heron.api.job import main as job
from heron.api.job import pretrain
from heron.base.errors import Stopped, TrainingError
from heron.evaluation.metrics import fitted_threshold
from heron.evaluation.scikit import NAMES
from heron.experiment.config import dump_config
from heron.training.baselines import FILE, BackgroundBaselines
from heron.training.tracking import read_metrics
from heron.training.trainer import Trainer
from tests import forked
from tests.evaluation.known import EXCLUSIVE, TRAIN, Known, config, opened, scores, write
from tests.experiments import frames

Reports = list[tuple[list[str], int]]
ON: dict[str, Any] = {"evaluate": {"baselines": True, "batch": 32}}
KEPT: dict[str, Any] = {"data": {"protocol": {"validation": 0.4}}}
FITTED: dict[str, Any] = {"evaluate": {**ON["evaluate"], "threshold": "fitted"}}


def beside(folder: Path, kind: str, **changes: Any) -> tuple[BackgroundBaselines, Reports]:
    """The baselines of a known set, and where the reports that it asks for are noted."""
    evaluator, _, streams = opened(folder, kind, **changes)
    asked: Reports = []
    made = BackgroundBaselines(
        config(folder, kind, **changes),
        evaluator,
        streams.roles,
        lambda to_come, step: asked.append((to_come, step)),
    )
    return made, asked


def inputs(known: Known, rows: Any) -> NDArray[np.float64]:
    """The views side by side, standardised; a view that a row lacks has the mean of the others."""
    scaled = [(x - np.nanmean(x[:TRAIN], 0)) / np.nanstd(x[:TRAIN], 0) for x in known.views]
    columns = np.concatenate([x[rows] for x in scaled], 1).astype(np.float32)
    filled = np.where(np.isnan(columns), np.nanmean(columns.astype(float), 0), columns)
    return np.asarray(filled.astype(np.float32))


def predicted(known: Known, kind: str, options: dict[str, float], rows: Any, asked: Any) -> Any:
    """scikit-learn's probabilities with the options that were chosen, a model a label or of all."""
    x, queries, y = inputs(known, rows), inputs(known, asked), known.y[rows]
    if kind == "logistic":
        scaler = StandardScaler().fit(x.astype(float))
        x, queries = scaler.transform(x.astype(float)), scaler.transform(queries.astype(float))
    out = np.empty((len(asked), 4))
    whole = not np.isnan(y).any()
    if kind == "forest" and (known.kind in EXCLUSIVE or whole):
        forest = _forest(x, options).fit(x, y.argmax(1) if known.kind in EXCLUSIVE else y)
        found = forest.predict_proba(queries)
        return found if known.kind in EXCLUSIVE else np.stack([p[:, 1] for p in found], 1)
    if known.kind in EXCLUSIVE and kind == "boosting":
        found = np.zeros((len(asked), 4))
        boosting = _boosting(options).fit(x, y.argmax(1))
        found[:, boosting.classes_] = boosting.predict_proba(queries)
        return found
    if known.kind in EXCLUSIVE:
        logistic = LogisticRegression(C=options["c"], max_iter=1000, tol=1e-8)
        return logistic.fit(x, y.argmax(1)).predict_proba(queries)
    for label in range(4):
        has = ~np.isnan(y[:, label])
        model: Any = LogisticRegression(C=options.get("c", 1.0))
        if kind != "logistic":
            model = _forest(x, options) if kind == "forest" else _boosting(options)
        out[:, label] = model.fit(x[has], y[has, label]).predict_proba(queries)[:, 1]
    return out


def _forest(x: Any, options: dict[str, float]) -> RandomForestClassifier:
    share = min(1.0, options["factor"] / np.sqrt(x.shape[1]))
    leaf = int(options["leaf"])
    return RandomForestClassifier(200, max_features=share, min_samples_leaf=leaf, random_state=0)


def _boosting(options: dict[str, float]) -> HistGradientBoostingClassifier:
    return HistGradientBoostingClassifier(
        learning_rate=options["rate"], max_leaf_nodes=8, min_samples_leaf=int(options["leaf"]),
        early_stopping=False, random_state=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "whole", "changes"),
    [
        ("complementary", False, ON),
        ("multi_label", True, KEPT | FITTED),
        ("multi_label", False, ON),
    ],
)
def test_the_scores_are_those_of_scikit_learn(
    kind: str, whole: bool, changes: dict[str, Any], tmp_path: Path
) -> None:
    known = write(tmp_path, kind, whole)
    (tmp_path / "run").mkdir()
    made, _ = beside(tmp_path, kind, **changes)
    _, _, streams = opened(tmp_path, kind, **changes)
    made.start()
    found, roles = made.wait(lambda: False), streams.roles
    assert found == made.scores and not made.to_come
    for name in ("logistic", "forest", "boosting"):
        its = {k.removeprefix(f"{name}_"): v for k, v in found.items() if k.startswith(name)}
        threshold = 0.4
        if changes is not ON:
            held = predicted(known, name, its, roles.labelled, roles.validation)
            threshold = fitted_threshold(
                held.astype(np.float32), known.y[roles.validation].astype(np.float32)
            )
            assert its["threshold"] == pytest.approx(threshold, abs=1e-3)
        probability = predicted(known, name, its, roles.labelled, known.test)
        expected = scores(probability, known.y[known.test], kind, threshold)
        assert {k: its[k] for k in expected} == pytest.approx(expected, abs=1e-9)


def test_what_is_known_is_said_reported_and_not_fitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "multi_class", whole=True)
    (tmp_path / "run").mkdir()
    first, asked = beside(tmp_path, "multi_class", **ON)
    assert first.to_come == [*NAMES.values()] and not first.scores
    first.start(idle=False)  # others may use every core
    first.look(1, 9)
    assert asked == []
    while not asked:
        first.look(2, 9)
        time.sleep(0.05)
    assert asked == [(["the network (at step 2 of 9)"], 2)]
    told = []
    for kind, name in NAMES.items():
        names = "auc_macro", "f1_weighted", "accuracy"
        values = ", ".join(f"{score} {first.scores[f'{kind}_{score}']:.4f}" for score in names)
        told += [f"baselines: fitting {name} beside the run"]
        told += [f"to beat: {values}, by {name} on the same labelled rows"]
    assert capfd.readouterr().out.splitlines() == told
    assert first.wait(lambda: True) == first.scores

    again, reports = beside(tmp_path, "multi_class", **ON)
    assert again.scores == first.scores and not again.to_come
    again.start(idle=False)
    while not reports:
        again.look(4, 9)
        time.sleep(0.05)
    assert capfd.readouterr().out.splitlines() == told[1::2]  # nothing is fitted
    again.report("stopped at step 7 of 9", 7)
    assert reports[-1] == (["the network (stopped at step 7 of 9)"], 7)

    # Other labelled rows, another threshold, another version: they are fitted anew.
    fewer: dict[str, Any] = {"data": {"protocol": {"labelled": 40}}}
    other: dict[str, Any] = {"evaluate": {**ON["evaluate"], "threshold": 0.3}}
    for changes in (ON | fewer, other):
        assert not beside(tmp_path, "multi_class", **changes)[0].scores
    stored = json.loads((tmp_path / "run" / FILE).read_text())
    for content in ("{", "[]", "{}", json.dumps(stored | {"facts": "sha256:0"})):
        (tmp_path / "run" / FILE).write_text(content)
        assert not beside(tmp_path, "multi_class", **ON)[0].scores
    monkeypatch.setattr("heron.training.baselines.version", lambda name: "0.1")
    (tmp_path / "run" / FILE).write_text(json.dumps(stored))
    assert not beside(tmp_path, "multi_class", **ON)[0].scores


def test_without_rows_to_learn_or_without_the_wish_nothing_is_fitted(tmp_path: Path) -> None:
    write(tmp_path, "none", whole=True)
    made, _ = beside(tmp_path, "none", **ON)
    assert not made.possible and made.to_come == []
    (other := tmp_path / "other").mkdir()
    write(other, "multi_class", whole=True)
    made, asked = beside(other, "multi_class", evaluate={"baselines": "plain"})
    made.start()
    made.report("stopped at step 3 of 9", 3)
    assert made.wait(lambda: True) == {} and asked == []


def test_a_signal_and_a_process_that_fails_are_said(tmp_path: Path) -> None:
    write(tmp_path, "multi_class", whole=True)
    made, _ = beside(tmp_path, "multi_class", **ON)
    made.start()
    with pytest.raises(
        Stopped,
        match="saved, but logistic regression and random forest and gradient boosting not yet",
    ):
        made.wait(lambda: True)
    made.close()
    made._asked["data"]["path"] = str(tmp_path / "nowhere")
    with pytest.raises(TrainingError, match=r"regression ended with status 1 .* run.resume=auto"):
        made.wait(lambda: False)
    made.close()  # twice is once


def long_run(folder: Path) -> list[str]:
    """The words of a run that does not end by itself."""
    train = {"epochs": 100_000, "steps": 1_000_000, "save_every_steps": 50}
    made = frames(folder, train=train, evaluate={**ON["evaluate"], "map": "never"})
    (folder / "long.yaml").write_text(dump_config(made))
    return ["--config", str(folder / "long.yaml")]


def slow(words: Sequence[str]) -> int:
    """The main job, with a pause in each step, so that a core is idle where others compute."""
    step = Trainer.step

    def pause(self: Trainer, t: int, source: Any) -> None:
        time.sleep(0.03)
        step(self, t, source)

    Trainer.step = pause  # type: ignore[method-assign]
    return job(words)


def living(marker: str) -> list[int]:
    """The processes that fit baselines in a run's session, by what their command line has."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            line = (path.parent / "cmdline").read_bytes()
            if b"heron.training.baselines" in line and marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def until(report: Path, run: forked.Command, text: str) -> str:
    """The report, once it has a text."""
    deadline = time.monotonic() + 300
    while text not in (found := report.read_text() if report.exists() else ""):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate(1)[0][-2000:]
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_stopped_has_them_and_does_not_fit_them_again(
    number: int, tmp_path: Path
) -> None:
    environment = os.environ | {"HERON_TEST_RUN": str(tmp_path)}
    words, folder = long_run(tmp_path), tmp_path / "run"
    run = forked.start(words, tmp_path, slow, environment)
    while not (folder / FILE).exists():
        assert run.poll() is None, run.communicate()[0][-2000:]
        begun = living(str(tmp_path))
        time.sleep(0.02)
    assert len(begun) == 1
    until(folder / "report.html", run, "boosting 0.")
    run.send_signal(number)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == (-9 if number == signal.SIGKILL else 75), said[-2000:]
    written, text = (folder / FILE).read_bytes(), (folder / "report.html").read_text()
    for kind, its in json.loads(written)["scores"].items():
        assert f"{kind} {its['auc_macro']:.3f}" in text
    assert not (folder / "result.json").exists()
    if number == signal.SIGTERM:
        steps = len([r for r in read_metrics(folder / "metrics.jsonl") if "loss" in r])
        assert f"the network (stopped at step {steps:,} of 1,000,000)" in text

    (folder / "report.html").unlink()
    again = forked.start([*words, "run.resume=auto"], tmp_path, slow, environment)
    until(folder / "report.html", again, "boosting 0.")
    again.send_signal(signal.SIGTERM)
    said, _ = again.communicate(timeout=60)
    assert again.returncode == 75 and said.count("to beat: ") == 3 and "fitting" not in said
    assert (folder / FILE).read_bytes() == written


def test_the_process_that_fits_ends_with_the_run_that_is_killed(tmp_path: Path) -> None:
    environment = os.environ | {"HERON_TEST_RUN": str(tmp_path)}
    run = forked.start(long_run(tmp_path), tmp_path, slow, environment)
    while not living(str(tmp_path)):
        assert run.poll() is None, run.communicate()[0][-2000:]
        time.sleep(0.02)
    run.kill()
    deadline = time.monotonic() + 60
    while living(str(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_network_has_the_bits_that_it_has_without_them(tmp_path: Path) -> None:
    on = frames(tmp_path, "on", evaluate={**ON["evaluate"], "map": "never"})
    off = frames(tmp_path, "off", evaluate={"baselines": False, "batch": 32, "map": "never"})
    results = [pretrain(made) for made in (on, off)]
    losses = []
    for made in (on, off):
        rows = read_metrics(Path(made.run.dir) / "metrics.jsonl")
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert losses[0] == losses[1] and results[0]["auc_macro"] == results[1]["auc_macro"]
    weights = [next(Path(m.run.dir).rglob("model.safetensors")).read_bytes() for m in (on, off)]
    assert weights[0] == weights[1]
    report = (Path(on.run.dir) / "report.html").read_text()
    assert "Still to come" not in report and "boosting 0." in report


def test_a_report_that_cannot_be_written_ends_no_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The other processes would wait for the one that writes it."""

    class Told(BackgroundBaselines):
        scores = {"logistic_auc_macro": 0.8}
        to_come: list[str] = []

    def full(to_come: list[str], step: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "report.html")

    beside = Told.__new__(Told)
    beside._write_report = full
    beside.report("at step 3 of 9", 3)
    assert "the report cannot be written yet: [Errno 28] No space" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", [False, True])
def test_where_the_cores_train_it_has_its_share_of_them(tmp_path: Path, gpu: bool) -> None:
    """On idle cores alone it had fitted nothing when a run of five minutes was stopped."""
    write(tmp_path, "multi_class", whole=True)
    (tmp_path / "run").mkdir()
    made, _ = beside(tmp_path, "multi_class", **ON)
    assert not made._beside_gpu  # of these tests
    made._beside_gpu = gpu
    made.start()
    assert made._process
    policies = set[int]()
    while made._process.poll() is None and policies != {os.SCHED_OTHER, os.SCHED_IDLE}:
        with suppress(ProcessLookupError):
            policies.add(os.sched_getscheduler(made._process.pid))
        time.sleep(0.02)
    assert (os.SCHED_IDLE in policies) == gpu and (gpu or not made.to_come)
    made.close()
