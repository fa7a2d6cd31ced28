"""The scaling model: arithmetic by hand, constants that are found again, words where none are."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from heron.cli.arguments import UsageError
from heron.cli.main import main
from heron.config.errors import StudyError
from heron.config.terms import Terms
from heron.distributed.traffic import Exchange
from heron.job import pretrain
from heron.models.heterogeneous import Heterogeneous
from heron.objectives.objective import Objective
from heron.studies.contrast import time_pair
from heron.studies.forecast import Assumptions, Forecast, section
from heron.studies.results import read_results
from heron.studies.step_model import (
    MeasuredStep,
    Setting,
    StepModel,
    Workload,
    cost,
    fit,
    measured_points,
)
from heron.studies.text import number
from tests.experiments import frames
from tests.sealed import seal_files
from tests.studies import made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("runs")
    pretrain(frames(folder, train={"steps": 2}))
    return folder / "run"


@pytest.fixture(scope="module")
def workload(run: Path) -> Workload:
    return Workload.of_run(run)


GATHER = Exchange("gathered", "labels", 10, 25, calls=3)  # 1,000 bytes of each
SUM = Exchange("gradients", "gradients", 1, 300, calls=2)  # 1,200 bytes


def test_messages_and_bytes_by_hand() -> None:
    """Of 8 processes: 7 messages round a ring and 3 deep in a tree; a sum goes twice."""
    eight = Setting(8, 80, 0)
    assert cost([GATHER], eight, ring=True) == (3 * 7, 7 * 1000)
    assert cost([GATHER], eight, ring=False) == (3 * 3, 7 * 1000)
    assert cost([SUM], eight, ring=True) == (2 * 2 * 7, 2 * 7 / 8 * 1200)
    assert cost([SUM], eight, ring=False) == (2 * 2 * 3, 2 * 7 / 8 * 1200)
    third = Setting(8, 80, 0, stage=3)  # gathers the weights twice and scatters the gradients
    assert cost([SUM], third, ring=True) == (2 * 3 * 7, 3 * 7 / 8 * 1200)
    assert cost([SUM], Setting(8, 80, 0, stage=2), ring=True)[1] == 2 * 7 / 8 * 1200


def test_a_step_is_the_sum_of_its_parts(workload: Workload) -> None:
    """The workload: 31 rows, two views of 16 and 12 wide layers, projections of 8."""
    model = StepModel(workload, fixed=0.01, row=1e-3, pair=1e-6)
    linked = Assumptions(link_gbps=1, latency_us=50).with_link(model)
    setting = Setting(4, 40, 84)
    alone = model.step(Setting(1, 10, 21))
    assert alone.total == pytest.approx(0.01 + 31e-3 + 31 * 31e-6)
    step = linked.step(setting, ring=True)
    assert step.compute == pytest.approx(0.01 + 31e-3)
    assert step.contrast == pytest.approx(1e-6 * 31 * 124)
    messages, sent = cost(workload.exchanges(setting), setting, ring=True)
    exchange = step.total - step.compute - step.contrast
    assert exchange == pytest.approx(50e-6 * messages + 8e-9 * sent)
    # batch norm: 3 layers, of both views and streams at once, a gather forward, a sum backward
    assert step.norm > 50e-6 * (3 * 3 + 3 * 2 * 3)
    hidden = linked.step(setting, ring=True, overlap=0.5)
    assert hidden.gradients == pytest.approx(step.gradients / 2)
    slow = Assumptions(link_gbps=1e-4, latency_us=0).with_link(model)
    bare, covered = slow.step(setting), slow.step(setting, overlap=1.0)
    assert bare.gradients - covered.gradients == pytest.approx(2 / 3 * step.compute)


def test_memory_by_stage_by_hand(workload: Workload) -> None:
    """LARS keeps one number a parameter; ZeRO 1, 2, 3 share out state, gradients, weights."""
    every = 4 * sum(parameter.numel() for parameter in workload.model.parameters())
    for stage, parts in enumerate(
        ((1, 1, 1), (1.25, 1, 0.25), (1.25, 0.25, 0.25), (0.5,) + (0.25,) * 2)
    ):
        counted = [*workload.counted_bytes(Setting(4, 40, 84, stage)).values()]
        assert counted[:3] == pytest.approx([every * part for part in parts], abs=3)
    # 2 views of z and H(z), 8 wide, of 124 rows, S, 24 wide, and 4 labels of 40; and what anchors
    # tell: a sum of L_u a view, and two of L_s a view and label.
    expected = 4 * (124 * 4 * 8 + 40 * 24 + 40 * 4 + 124 * 2 + 40 * 2 * 4)
    assert workload.counted_bytes(Setting(4, 40, 84))["gathered"] == expected


def test_vectors_of_bfloat16_travel_in_half_the_bytes(workload: Workload) -> None:
    """Labels and what anchors tell go in float32, in which the model's numbers stay too."""
    setting = Setting(4, 40, 84)
    train = workload.config.train.model_copy(update={"precision": "bf16"})
    half = replace(workload, config=workload.config.model_copy(update={"train": train}))
    numbers = 124 * 2 + 40 * 2 * 4
    expected = 2 * (124 * 4 * 8 + 40 * 24) + 4 * (40 * 4 + numbers)
    assert half.counted_bytes(setting)["gathered"] == expected
    assert half.counted_bytes(setting)["gradients"] == workload.counted_bytes(setting)["gradients"]


ONES = [Setting(1, n, 3 * n) for n in (16, 32, 64, 128, 256)]
MORE = [Setting(w, n * w, 3 * n * w) for w in (2, 4) for n in (8, 32, 128)]


KNOWN = {"fixed": 5e-3, "row": 2e-4, "pair": 3e-7, "latency": 2e-5, "per_byte": 3e-9}


def truth(workload: Workload, settings: Sequence[Setting]) -> list[MeasuredStep]:
    model = StepModel(workload, **KNOWN)
    return [MeasuredStep(s, model.step(s, ring=True).total, math.nan) for s in settings]


def test_the_constants_are_found_again(workload: Workload) -> None:
    points = truth(workload, [*ONES, *MORE])
    model = fit(workload, points)
    assert {name: getattr(model, name) for name in KNOWN} == pytest.approx(KNOWN, rel=1e-6)
    judged = Forecast(workload, points, Assumptions()).predictions
    assert list(judged["measured"]) == [p.seconds for p in points]
    assert list(judged["fitted"]) == pytest.approx([p.seconds for p in points])
    assert list(judged["left_out"]) == pytest.approx([p.seconds for p in points])


def test_an_error_of_a_point_shows_where_it_is_left_out(workload: Workload) -> None:
    points = truth(workload, [*ONES, *MORE])
    odd = points[-1]
    points[-1] = MeasuredStep(odd.setting, 1.5 * odd.seconds, math.nan)
    last = Forecast(workload, points, Assumptions()).predictions.iloc[-1]
    assert last["left_out"] == pytest.approx(odd.seconds, rel=1e-6)
    assert abs(last["fitted"] / last["measured"] - 1) < abs(odd.seconds / last["measured"] - 1)


def test_what_cannot_be_told_apart_is_left_at_0(workload: Workload) -> None:
    """Three batches tell two constants; one setting of several processes tells one."""
    points = truth(workload, [*ONES[:3], MORE[0]])
    model = fit(workload, points)
    assert model.fixed == 0 and model.row > 0
    assert model.per_byte == 0 and model.latency > 0


def test_too_few_batches_are_refused_in_words(workload: Workload) -> None:
    with pytest.raises(StudyError) as error:
        fit(workload, truth(workload, [*ONES[:2], *MORE]))
    assert str(error.value) == (
        "The scaling model takes what a row and what a pair of rows cost from one process at 3 "
        "batches or more; found 64, 128. configs/studies/one-worker.yaml measures them; --points "
        "adds its folder"
    )


def test_the_points_of_another_study_make_up_for_too_few(
    tmp_path: Path, run: Path, workload: Workload, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = studies(tmp_path / "study", run, workload, [*ONES[:2], *MORE])
    assert main(["report", str(folder)]) == 0
    assert "at 3 batches or more; found 64, 128. " in capsys.readouterr().out
    more = studies(tmp_path / "one worker", run, workload, ONES)
    assert main(["report", str(folder), "--points", str(more)]) == 0
    assert "batches or more; found" not in capsys.readouterr().out


def studies(
    folder: Path, run: Path, workload: Workload, settings: Sequence[Setting] = (*ONES, *MORE)
) -> Path:
    """A study of workers whose steps are those of a model, each with a checkpoint of a run."""
    lines: list[dict[str, Any]] = []
    batches = {}
    for point in truth(workload, settings):
        setting, name = point.setting, f"{len(lines):03}"
        values = {"workers": setting.world, "data.batch.labelled": setting.labelled}
        values |= {"data.batch.unlabelled": setting.unlabelled}
        memory = 1e8 + sum(workload.counted_bytes(setting).values())
        measured = {"step_s": point.seconds, "samples_per_s": setting.rows / point.seconds}
        measured["peak_memory_bytes"] = memory + 5e4 * setting.local_rows
        lines.append(made.trial(name, values, measured=measured))
        batches[name] = setting.rows
    measure = {"x": "workers", "y": ["samples_per_s", "step_s"]}
    made.study(folder, lines, batches, measure=measure)
    for line in lines:
        place = folder / line["run"] / "checkpoints"
        shutil.copytree(run / "checkpoints", place, symlinks=True)
        for path in place.glob("step-*/config.yaml"):
            tree: dict[str, Any] = yaml.safe_load(path.read_text())
            tree["data"]["batch"] = {
                "labelled": line["values"]["data.batch.labelled"],
                "unlabelled": line["values"]["data.batch.unlabelled"],
            }
            path.write_text(yaml.safe_dump(tree))
            seal_files(path.parent)
    return folder


def test_the_report_extrapolates(
    tmp_path: Path, run: Path, workload: Workload, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = studies(tmp_path / "study", run, workload)
    words = ["report", str(folder), "--link-gbps", "100", "--latency-us", "10"]
    assert main(words) == 0
    page = (folder / "report" / "report.html").read_text()
    for text in (
        "More processes than were measured",
        "model errs by 0.0% (median) and 0.0% (most); each left out of the fit in turn",
        "Extrapolation, 512 rows a process: compute and contrast as measured here; assumed 100 "
        "Gbit/s and 10 µs a message for each process, 0% of the gradients&#x27; exchange hidden",
        "Every line is an extrapolation.",
        "<td>200</td>",  # µs a row
    ):
        assert text in page, text
    table = (folder / "report" / "scaling.md").read_text()
    assert table in capsys.readouterr().out
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:2] == "| "]
    assert [line[0] for line in lines[2:]] == [f"{2**n:,}" for n in range(3, 13)]
    model = Assumptions(link_gbps=100, latency_us=10).with_link(StepModel(workload, **KNOWN))
    last = Setting(4096, 128 * 4096, 384 * 4096)
    step, one = model.step(last), model.step(Setting(1, 128, 384))
    shown = dict(zip(lines[0], lines[-1], strict=True))
    assert shown["rows"] == f"{512 * 4096:,}"
    assert shown["step s"] == shown["least s"] == shown["most s"] == number(step.total, 3)
    assert shown["in rings s"] == number(model.step(last, ring=True).total, 3)
    efficiency = last.rows / step.total / 4096 / (512 / one.total)
    assert shown["efficiency"] == number(efficiency, 3)
    memory = 1e8 + sum(workload.counted_bytes(last).values()) + 5e4 * 512
    assert shown["memory GB"] == number(memory / 1e9, 3)


def test_a_fixed_batch_ends_where_its_rows_do(
    tmp_path: Path, run: Path, workload: Workload
) -> None:
    results = read_results(studies(tmp_path / "study", run, workload))
    found = Forecast(*measured_points([results])[:2], Assumptions(global_batch=256))
    assert list(found.table["processes"]) == [8, 16, 32, 64]
    assert set(found.table["rows"]) == {256}
    assert "256 rows in all" in found.markdown()


def test_a_global_batch_without_rows_of_a_stream_is_refused(
    tmp_path: Path, run: Path, workload: Workload, capsys: pytest.CaptureFixture[str]
) -> None:
    """It rounded the labelled stream to nothing, and the table was of another experiment."""
    folder = studies(tmp_path / "study", run, workload)
    assert main(["report", str(folder), "--global-batch", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --global-batch 1 leaves no row of the labelled stream")
    assert error.count("\n") == 1 and not (folder / "report").exists()
    least = error.split("expected ")[1].split()[0]
    assert main(["report", str(folder), "--global-batch", least]) == 0
    base = Setting(4, 1, 99)
    with pytest.raises(UsageError, match="no row of the labelled stream.* expected 51 or more"):
        Assumptions(global_batch=50).setting(base, 8)
    with pytest.raises(UsageError, match="no row of the unlabelled stream.* expected 51 or more"):
        Assumptions(global_batch=49).setting(Setting(4, 99, 1), 8)
    assert Assumptions(global_batch=51).setting(base, 8) == Setting(8, 1, 50)
    assert Assumptions(global_batch=1).setting(Setting(4, 0, 100), 8) == Setting(8, 0, 1)


def test_other_experiments_are_left_out(tmp_path: Path, run: Path, workload: Workload) -> None:
    folder = studies(tmp_path / "study", run, workload)
    (path,) = folder.glob("trials/003/checkpoints/step-*/config.yaml")
    path.write_text(path.read_text().replace("projection_width: 8", "projection_width: 9"))
    seal_files(path.parent)
    shutil.rmtree(folder / "trials" / "004" / "checkpoints")
    _, points, left_out = measured_points([read_results(folder)])
    assert left_out == (
        "Left out of the scaling model: 2 of the trials; the first: trial 003 of study: other than "
        "the first in model"
    )
    assert len(points) == len(ONES) + len(MORE) - 2


@pytest.mark.parametrize("term", [{"deepmtmv": {"widths": [4]}}, {"pico": {"weight": 1.0}}])
def test_what_exchanges_more_is_not_modelled(
    tmp_path: Path, run: Path, term: dict[str, Any]
) -> None:
    copy = shutil.copytree(run, tmp_path / "run", symlinks=True)
    (path,) = copy.glob("checkpoints/step-*/config.yaml")
    tree = yaml.safe_load(path.read_text())
    tree["objective"] |= term
    path.write_text(yaml.safe_dump(tree))
    seal_files(path.parent)
    with pytest.raises(
        StudyError, match=f"does not know what the memory of {next(iter(term))} exch"
    ):
        Workload.of_run(copy)


def test_no_checkpoint_no_model(tmp_path: Path) -> None:
    lines = [made.trial(f"00{w}", {"workers": w}) for w in (1, 2)]
    results = read_results(made.study(tmp_path / "study", lines, {"001": 8}))
    page, table = section([results], Assumptions())
    assert "Left out of the scaling model: 2 of the trials; the first: trial 001 of study" in page
    assert "001: its step cannot be told" in table and "no complete checkpoint" in table


def test_a_signature_that_is_a_list_is_named(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run", symlinks=True)
    (path,) = copy.glob("checkpoints/step-*/model.json")
    path.write_text("[1]")
    seal_files(path.parent)
    with pytest.raises(StudyError, match=r"model.json cannot be read: .* found \[1\]; expected"):
        Workload.of_run(copy)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--link-gbps", "0"], "--link-gbps: found '0'; input should be greater than 0"),
        (["--latency-us", "-1"], "--latency-us: found '-1'; input should be greater than or equal"),
        (["--overlap", "2"], "--overlap: found '2'; input should be less than or equal to 1"),
        (["--global-batch", "0"], "--global-batch: found '0'; input should be greater than or eq"),
    ],
)
def test_no_link_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as status:
        main(["report", str(tmp_path), *words])
    assert status.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: argument {message}")


def test_a_setting_is_that_of_the_run(tmp_path: Path, run: Path) -> None:
    """Metrics give the rows, the configuration how many of them are labelled."""
    line = made.trial("000", {"workers": 3, "strategy": "zero2"})
    folder = made.study(tmp_path / "study", [line])
    shutil.copytree(run, folder / "trials" / "000", dirs_exist_ok=True)
    _, (point,), _ = measured_points([read_results(folder)])
    assert point.setting == Setting(3, 10, 21, stage=2)
    assert point.setting.local_rows == 11
    rows = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert round(rows["samples_per_s"] * rows["seconds"]) == 31


def test_a_pair_that_was_timed_is_not_fitted(workload: Workload) -> None:
    """Too noisy steps do not tell pairs from rows; the rest is fitted beside what was timed."""
    points = truth(workload, [*ONES, *MORE])
    model = fit(workload, points, pair=3e-7)
    assert model.pair == 3e-7
    assert (model.fixed, model.row) == pytest.approx((5e-3, 2e-4), rel=1e-6)
    shrunk = [
        MeasuredStep(p.setting, p.setting.local_rows**0.8, math.nan)
        for p in points
        if p.setting.world == 1
    ]
    assert fit(workload, shrunk).pair == 0
    found = Forecast(workload, shrunk, Assumptions())
    assert found.markdown().startswith("No table of more processes: the steps of one process do")
    assert "No table of more processes" in "".join(found.html())
    timed = Forecast(workload, shrunk, Assumptions(), pair=1e-6)
    assert len(timed.table) == 10 and "the objective alone, timed" in "".join(timed.html())


@pytest.mark.parametrize("term", ["weighted_unsupervised", "single_view_unsupervised"])
def test_a_pair_is_timed_on_the_objective_alone(
    workload: Workload, monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    """A clock that counts pairs: every call of the objective takes a second a pair of rows."""
    clock = {"now": 0.0}
    seen: list[tuple[int, int]] = []
    objective = Objective(Terms.model_validate({"cross_entropy": {}, term: {}}).terms())

    def counted(batch: Any) -> Any:
        share = batch.rows.stop - batch.rows.start
        known = batch.vectors or batch.gathered
        rows = len(known["projections"][0])
        assert len(batch.own_targets) == 6 and len(known["weights"]) == 2
        seen.append((share, rows))
        clock["now"] += 7.0 + share * rows
        return objective(batch)

    monkeypatch.setattr("heron.studies.contrast._clock", lambda device: clock["now"])
    monkeypatch.setattr("heron.studies.contrast.MIN_PAIRS", 0)
    model = Heterogeneous(workload.config.model, workload.shapes, workload.labels, objective.terms)
    monkeypatch.setattr(workload, "model", model)
    monkeypatch.setattr(workload, "objective", Counted(objective, counted))
    assert time_pair(workload, Setting(1, 6, 14)) == pytest.approx(1.0)
    assert sorted(set(seen)) == [(20, 80), (20, 320)]


def test_a_feature_of_one_number_is_timed_too(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the scale of CLIP's logits, beside vectors."""
    objective = Objective(Terms.model_validate({"clip": {}}).terms())
    model = Heterogeneous(workload.config.model, workload.shapes, workload.labels, objective.terms)
    monkeypatch.setattr("heron.studies.contrast.MIN_PAIRS", 0)
    monkeypatch.setattr(workload, "model", model)
    monkeypatch.setattr(workload, "objective", objective)
    assert time_pair(workload, Setting(1, 6, 14)) >= 0


class Counted:
    """An objective that something is called in place of."""

    def __init__(self, objective: Any, call: Any) -> None:
        self.objective, self.call = objective, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.objective, name)

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def test_the_fits_without_a_point_give_a_range(workload: Workload) -> None:
    points = truth(workload, [*ONES, *MORE])
    odd = MeasuredStep(points[4].setting, 1.2 * points[4].seconds, math.nan)
    bent = [*points[:4], odd, *points[5:]]
    exact, loose = (Forecast(workload, of, Assumptions()).table.iloc[-1] for of in (points, bent))
    assert exact["most s"] == pytest.approx(exact["least s"]) == pytest.approx(exact["step s"])
    assert loose["least s"] == pytest.approx(exact["step s"])  # without the odd one
    assert loose["most s"] > 1.1 * loose["least s"]
