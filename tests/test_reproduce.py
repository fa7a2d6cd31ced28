"""`heron reproduce`: what is refused before anything runs, what goes on, what is in the table."""

from dataclasses import replace
from pathlib import Path

import pytest

from launch.cli import main
from launch.reproduce import reproduce
from launch.tables import TABLES
from pipeline.config import Config, dump_config
from pipeline.errors import STOPPED, ConfigError, Stopped
from shards.manifest import MANIFEST

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

    monkeypatch.setattr("pipeline.pretrain.pretrain", run)
    return configs


def begin(config: Config) -> None:
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config))


def test_a_row_that_a_table_lacks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no method 'train.steps=1'; .*; put key=value before"):
        reproduce(SCENE, tmp_path, [], ["DNN", "train.steps=1"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "override", ["model.encoder.dropout=0.7", "optim.lr=0.5", "optim.kind=sgd"]
)
def test_an_override_of_what_one_method_sets_itself(
    tmp_path: Path, data: str, ran: list[Config], override: str
) -> None:
    """Or of a part of it. The others run with it; with that method nothing runs at all."""
    text = reproduce(SCENE, tmp_path / "dnn", [data, override], ["DNN"])
    assert "| DNN | 0.5902 ± 0.0122 | 0.5000 |" in text and "C2AE" not in text
    with pytest.raises(ConfigError, match=f"{override}: the table sets this itself"):
        reproduce(SCENE, tmp_path / "all", [data, override], [])
    assert not (tmp_path / "all").exists()


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
    pico, comco, plnl = (config.objective for config in ran)
    assert pico.pico is not None and pico.pico.phi_epochs == 20
    assert comco.comco is not None and comco.comco.neighbour_epochs == 10
    assert plnl.plnl is not None
    lengths = plnl.plnl.pretrain_epochs, plnl.plnl.warmup_epochs, plnl.plnl.consistency_epochs
    assert lengths == (10, 3, 5)
    with pytest.raises(ConfigError, match=r"phi_epochs=9: the table sets this itself"):
        reproduce(table, tmp_path / "nine", [data, "objective.pico.phi_epochs=9"], methods)


def test_a_run_of_another_configuration_is_told_of_before_any_runs(
    tmp_path: Path, data: str, ran: list[Config]
) -> None:
    """Finished or not, and wherever its folder was when it was made."""
    reproduce(SCENE, tmp_path / "out", [data], ["HeroCon"])
    begin(ran.pop().model_copy(update={"seed": 1}))
    for out in (tmp_path / "out", tmp_path / "moved"):
        with pytest.raises(ConfigError, match="HeroCon-0 holds a run of another configuration"):
            reproduce(SCENE, out, [data], ["DNN", "HeroCon"])
        if out.name == "out":
            (out / "HeroCon-0" / "result.json").unlink()
            out.rename(tmp_path / "moved")
    assert not ran


def test_a_folder_that_was_moved_is_done(tmp_path: Path, data: str, ran: list[Config]) -> None:
    reproduce(SCENE, tmp_path / "out", [data], ["DNN"])
    (tmp_path / "out").rename(tmp_path / "moved")
    assert "| DNN |" in reproduce(SCENE, tmp_path / "moved", [data], ["DNN"])
    assert len(ran) == 1


def test_remote_shards_are_not_looked_for_here(tmp_path: Path, ran: list[Config]) -> None:
    reproduce(SCENE, tmp_path, ["data.path=s3://bucket/scene"], ["DNN"])
    assert [config.data.path for config in ran] == ["s3://bucket/scene"]
    with pytest.raises(ConfigError, match=r"nothing holds no shards; download scene"):
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

    monkeypatch.setattr("pipeline.pretrain.pretrain", stop)
    words = ["reproduce", "scene", data, "--only", "DNN", "--out", str(tmp_path / "out")]
    assert main(words) == STOPPED
    assert capsys.readouterr().err == (
        "stopped: a signal came; step 3 of 9 is saved; run again to go on\n"
    )


@pytest.mark.parametrize("runs", ["0", "-1", "two"])
def test_a_number_of_runs(runs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce", "scene", f"--runs={runs}"])
    assert f"{runs!r}; expected a number from 1 on" in capsys.readouterr().err
