"""`heron reproduce`: what is refused before anything runs, what goes on, what is in the table."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from heron.base.artefact import MANIFEST
from heron.base.errors import STOPPED, ConfigError, Stopped
from heron.cli.main import main
from heron.experiment.config import Config, dump_config
from heron.losses.comco import Comco
from heron.losses.objective import build_losses
from heron.losses.pico import Pico
from heron.losses.plnl import Plnl
from heron.studies.published import GROUPS, TABLES
from heron.studies.repeats import mean_std_count, paired_test
from heron.studies.reproduction import compare, reproduce
from heron.training.earlier_run import begin_anew

SCENE = replace(TABLES["scene"], runs=1)


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Shards, as far as `heron reproduce` looks at them."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / MANIFEST).write_text("")
    return f"data.path={tmp_path}/data"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """What has run, each in no time."""
    configs: list[Config] = []

    def run(config: Config) -> None:
        begin(config)
        scores = '{"f1_weighted": 0.5, "auc_macro": 0.75, "accuracy": 0.25}'
        (Path(config.run.dir) / "result.json").write_text(scores)
        configs.append(config)

    monkeypatch.setattr("heron.api.job.pretrain", run)
    return configs


def begin(config: Config) -> None:
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config))


def test_a_row_that_a_table_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no method 'HeroCom'; choose one of DNN"):
        reproduce(SCENE, tmp_path, [], ["DNN", "HeroCom"])
    assert not list(tmp_path.iterdir())


def test_a_row_that_is_asked_for_twice_runs_once(
    tmp_path: Path, data: str, ran: list[Config]
) -> None:
    reproduce(SCENE, tmp_path / "out", [data], ["DNN", "DNN"])
    assert [config.run.dir for config in ran] == [f"{tmp_path}/out/DNN-0"]


def test_a_folder_whose_name_yaml_reads_otherwise(
    tmp_path: Path, data: str, ran: list[Config]
) -> None:
    """What follows ` #` would be a comment, and all runs would be in one folder."""
    out = tmp_path / "try #2"
    reproduce(replace(SCENE, runs=2), out, [data], ["DNN"])
    assert [config.run.dir for config in ran] == [f"{out}/DNN-0", f"{out}/DNN-1"]


@pytest.mark.parametrize(
    "override", ["model.encoder.dropout=0.7", "optim.lr=0.5", "optim.kind=sgd"]
)
def test_an_override_of_what_one_method_sets_itself(
    tmp_path: Path, data: str, ran: list[Config], override: str
) -> None:
    """Or of a part of it. The others run with it; with that method nothing runs at all."""
    text = reproduce(SCENE, tmp_path / "dnn", [data, override], ["DNN"])
    assert "| DNN | 0.5902 ± 0.0122 | 0.5000 |" in text and "C2AE" not in text
    with pytest.raises(ConfigError, match=f"{override}: this is set for each run"):
        reproduce(SCENE, tmp_path / "all", [data, override], [])
    assert not (tmp_path / "all").exists()
    assert "C2AE" in reproduce(SCENE, tmp_path / "all", [data], ["C2AE", "DNN"])


def test_an_override_that_one_method_cannot_have(
    tmp_path: Path, data: str, ran: list[Config]
) -> None:
    """A linear encoder has no dropout, which C2AE sets; the others' table needs not know."""
    linear = "model.encoder={kind: linear, width: 128}"
    text = reproduce(SCENE, tmp_path, [data, linear], ["DNN", "HeroCon"])
    assert "| DNN |" in text and "| HeroCon |" in text and "C2AE" not in text


def test_schedules_are_as_long_as_the_run(tmp_path: Path, data: str, ran: list[Config]) -> None:
    table = replace(TABLES["yeast"], runs=1)
    methods = ["PiCO", "ComCo", "PLNL"]
    reproduce(table, tmp_path / "short", [data, "train.epochs=20"], methods)
    pico, comco, plnl = (next(iter(build_losses(config.objective).values())) for config in ran)
    assert isinstance(pico, Pico) and pico.phi_epochs == 20
    assert isinstance(comco, Comco) and comco.neighbour_epochs == 10
    assert isinstance(plnl, Plnl)
    lengths = plnl.pretrain_epochs, plnl.warmup_epochs, plnl.consistency_epochs
    assert lengths == (10, 3, 5)
    with pytest.raises(ConfigError, match=r"phi_epochs=9: this is set for each run"):
        reproduce(table, tmp_path / "nine", [data, "objective.pico.phi_epochs=9"], methods)


def test_a_run_of_another_configuration_is_told_of_before_any_runs(
    tmp_path: Path, data: str, ran: list[Config]
) -> None:
    """Finished or not, and wherever its folder was when it was made."""
    reproduce(SCENE, tmp_path / "out", [data], ["HeroCon"])
    begin(ran.pop().model_copy(update={"seed": 1}))
    for out in (tmp_path / "out", tmp_path / "moved"):
        with pytest.raises(ConfigError, match="HeroCon-0 has a run of another configuration"):
            reproduce(SCENE, out, [data], ["DNN", "HeroCon"])
        if out.name == "out":
            (out / "HeroCon-0" / "result.json").unlink()
            out.rename(tmp_path / "moved")
    assert not ran
    reproduce(SCENE, tmp_path / "another", [data], ["HeroCon"])
    begin_anew(tmp_path / "moved")  # as --overwrite does
    reproduce(SCENE, tmp_path / "moved", [data], ["HeroCon"])
    assert len(ran) == 2


def test_a_dry_run_names_what_is_left(
    tmp_path: Path, data: str, ran: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    reproduce(SCENE, tmp_path / "out", [data], ["DNN"])
    words = ["--runs", "2", "--only", "DNN", "--out", str(tmp_path / "out"), "--dry-run"]
    assert main(["reproduce", "scene", data, *words]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/out/DNN-1\nmissing runs: 1\n"
    assert len(ran) == 1 and not (tmp_path / "out" / "DNN-1").exists()


def test_names_without_case_and_an_override_behind_them(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--only` took the override behind it for a method, and knew no `herocon`."""
    words = ["--runs", "1", "--out", str(tmp_path), "--dry-run", "--only", "dnn", "herocon", data]
    assert main(["reproduce", "scene", *words]) == 0
    told = capsys.readouterr().out
    assert told == f"{tmp_path}/DNN-0\n{tmp_path}/HeroCon-0\nmissing runs: 2\n"


def test_a_folder_that_was_moved_is_done(tmp_path: Path, data: str, ran: list[Config]) -> None:
    reproduce(SCENE, tmp_path / "out", [data], ["DNN"])
    (tmp_path / "out").rename(tmp_path / "moved")
    assert "| DNN |" in reproduce(SCENE, tmp_path / "moved", [data], ["DNN"])
    assert len(ran) == 1


def test_remote_shards_are_not_looked_for_here(tmp_path: Path, ran: list[Config]) -> None:
    reproduce(SCENE, tmp_path, ["data.path=s3://bucket/scene"], ["DNN"])
    assert [config.data.path for config in ran] == ["s3://bucket/scene"]
    with pytest.raises(ConfigError, match=r"nothing has no shards; download scene"):
        reproduce(SCENE, tmp_path / "none", [f"data.path={tmp_path}/nothing"], ["DNN"])


def test_a_signal_is_a_status_and_the_run_goes_on(
    tmp_path: Path,
    data: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(config: Config) -> None:
        assert config.run.resume == "auto"
        raise Stopped("a signal came; step 3 of 9 is saved")

    monkeypatch.setattr("heron.api.job.pretrain", stop)
    words = ["reproduce", "scene", data, "--only", "DNN", "--out", str(tmp_path / "out")]
    assert main(words) == STOPPED
    assert capsys.readouterr().err == (
        "stopped: a signal came; step 3 of 9 is saved; run the same command again to continue\n"
    )


def test_a_paired_test_by_hand() -> None:
    """Differences .01, .02, .03: t = .02 / (.01 / sqrt 3); of two degrees p = 1 - t / sqrt(2 + t²).

    A fold that one of them lacks, or has no number of, is left out.
    """
    ours = pd.Series({10: 0.51, 11: 0.62, 12: 0.73, 13: 0.9, 14: np.nan})
    theirs = pd.Series({9: 0.1, 12: 0.70, 11: 0.60, 10: 0.50, 14: 0.5})
    found = paired_test(ours, theirs)
    assert found is not None and found.n == 3
    t = 0.02 / (0.01 / 3**0.5)
    assert (found.difference, found.std) == pytest.approx((0.02, 0.01))
    assert (found.t, found.p) == pytest.approx((t, 1 - t / (2 + t**2) ** 0.5))
    assert found.cells() == ["+0.0200", "3.46", "0.074"]
    reverse = paired_test(theirs, ours)
    assert reverse is not None and (reverse.t, reverse.p) == pytest.approx((-t, found.p))


def welch(mean: float, std: float, n: int, other: tuple[float, float, int]) -> float:
    """Two-sided p of Welch's test by his formula (1947, equation 28), with n - 1 below each."""
    mu, sigma, m = other
    a, b = std**2 / n, sigma**2 / m
    freedom = (a + b) ** 2 / (a**2 / (n - 1) + b**2 / (m - 1))
    return float(2 * stats.t.sf(abs(mean - mu) / (a + b) ** 0.5, freedom))


@pytest.mark.parametrize("published_runs", [2, 5, 30])
def test_p_against_the_published_by_hand(published_runs: int) -> None:
    """Of unequal variances and of as many runs as were published, the standard deviation of n - 1.

    Pooled variances, another number of published runs and a deviation of n give other p.
    """
    table = replace(TABLES["scene"], runs=3, published_runs=published_runs)
    figure = table.methods["DNN"].published[0]
    assert figure is not None and figure == (0.5902, 0.0122)
    runs = np.array([0.597, 0.605, 0.622])
    scores = pd.DataFrame({name: runs for name in table.scores}, table.folds)
    found = compare(table, {"DNN": scores})["DNN"]["F1"]
    std = (((runs - runs.mean()) ** 2).sum() / 2) ** 0.5
    assert (found.mean, found.std) == pytest.approx((0.608, std))
    other = (0.5902, 0.0122, published_runs)
    assert found.p == pytest.approx(welch(0.608, std, 3, other), rel=1e-9)
    pooled = stats.ttest_ind_from_stats(0.608, std, 3, *other, equal_var=True).pvalue
    wrong = [pooled, welch(0.608, std, 3, (*other[:2], published_runs + 1))]
    wrong += [welch(0.608, std, 3, (*other[:2], 3)), welch(0.608, std * (2 / 3) ** 0.5, 3, other)]
    assert all(abs(p / found.p - 1) > 1e-3 for p in wrong)


def test_how_many_runs_were_published() -> None:
    """As the papers say; five where they do not say otherwise."""
    several = {name: table.published_runs for name, table in TABLES.items()}
    others = {"yeast": 3, "texture": 3, "dermatology": 3, "cifar10": 1}
    others |= dict.fromkeys(GROUPS["graphs"], 10)
    assert several == dict.fromkeys(TABLES, 5) | others


def test_a_paired_deviation_has_one_less_than_its_folds() -> None:
    """Differences 1 and 3: of n - 1 the square root of 2, of n it would be 1."""
    found = paired_test(pd.Series({0: 2.0, 1: 5.0}), pd.Series({0: 1.0, 1: 2.0}))
    assert found is not None and found.std == pytest.approx(2**0.5)
    (mean, std, count) = mean_std_count(pd.Series([1.0, 3.0, np.nan]))
    assert (mean, count) == (2.0, 2) and std == pytest.approx(2**0.5)


def test_what_no_paired_test_can_be_made_of() -> None:
    """One fold in common has no spread; differences that are all the same have no t."""
    ours = pd.Series({0: 0.5, 1: 0.6, 2: 0.7})
    assert paired_test(ours, pd.Series({2: 0.1, 3: 0.2})) is None
    same = paired_test(ours, ours - 0.1)
    assert same is not None and same.cells() == ["+0.1000", "–", "–"]


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in no time, with F1 and AUC of HeroCon above the others', by an amount of each fold."""

    def run(config: Config) -> None:
        begin(config)
        fold, best = config.data.protocol.fold, "HeroCon-1" in Path(config.run.dir).name
        scores = {"f1_weighted": 0.5 + 0.01 * fold + (0.01 * (fold - 9) if best else 0)}
        scores["auc_macro"] = 0.75 + (0.02 if best else 0)
        (Path(config.run.dir) / "result.json").write_text(json.dumps(scores))

    monkeypatch.setattr("heron.api.job.pretrain", run)


def test_methods_are_compared_over_the_same_folds(
    tmp_path: Path, data: str, scored: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """HeroCon less the others, over folds 10 to 12, printed and saved."""
    out = str(tmp_path / "out")
    words = ["reproduce", "scene", data, "--runs", "3", "--first", "10", "--out", out]
    assert main([*words, "--only", "DNN", "MIB"]) == 0
    assert "less each other method" not in capsys.readouterr().out  # HeroCon is not there
    assert main([*words, "--only", "HeroCon"]) == 0
    text = (tmp_path / "out" / "table.md").read_text()
    told = capsys.readouterr().out
    assert told.startswith("the other 2 runs take about 0 minutes\n")
    assert told.removesuffix("\n").endswith(text)
    assert (
        "HeroCon less each other method over the same folds 10 to 12: mean difference; t and p of "
        "Student's paired test, two-sided.\n"
    ) in text
    assert "| DNN | +0.0200 | 3.46 | 0.074 | +0.0200 | – | – |\n" in text
    assert "| MIB | +0.0200 | 3.46 | 0.074 | +0.0200 | – | – |\n" in text
    saved = json.loads((tmp_path / "out" / "table.json").read_text())
    assert saved["headline"] == "HeroCon"
    found = saved["methods"]["DNN"]
    assert found["F1"]["runs"] == pytest.approx({"10": 0.6, "11": 0.61, "12": 0.62})
    assert (found["F1"]["mean"], found["F1"]["std"]) == pytest.approx((0.61, 0.01))
    assert found["F1"]["published"] == [0.5902, 0.0122] and 0 < found["F1"]["p"] < 1
    pair = found["F1"]["headline_less_this"]
    assert pair["n"] == 3 and pair["t"] == pytest.approx(12**0.5)
    assert found["AUC"]["headline_less_this"]["t"] is None
    assert saved["methods"]["HeroCon"]["F1"]["headline_less_this"] is None


def test_a_lone_fold_has_no_paired_test(tmp_path: Path, data: str, ran: list[Config]) -> None:
    text = reproduce(SCENE, tmp_path, [data], ["DNN", "HeroCon"])
    assert "| HeroCon |" in text and "less each other method" not in text


def test_a_group_says_what_to_download(
    tmp_path: Path,
    ran: list[Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "graphs", "--runs", "1", "--out", "out"]
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "data/mutag has no shards; download" in told and "ENZYMES.zip" in told
    for name in ("mutag", "imdb-b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / MANIFEST).write_text("")
    assert main([*words, "--only", "UCL"]) == 0
    text = capsys.readouterr().out
    assert [config.data.path for config in ran] == ["data/mutag", "data/imdb-b"]
    assert "| UCL | 0.8680 | 0.2500 |" in text and "| UCL | 0.7220 | 0.2500 |" in text
    for name in ("PTC_MR", "ENZYMES", "IMDB-MULTI"):
        assert f"graphkerneldatasets/{name}.zip), unpack it" in text.replace("\n", " ")


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_table_has_its_headline_method(name: str) -> None:
    assert TABLES[name].headline in TABLES[name].methods


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ("0", "greater than or equal to 1"),
        ("-1", "greater than or equal to 1"),
        ("two", "a valid integer"),
    ],
)
def test_a_number_of_runs(runs: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce", "scene", f"--runs={runs}"])
    assert f"argument --runs: must be {expected}" in capsys.readouterr().err
