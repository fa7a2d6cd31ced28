"""Trackers beside metrics.jsonl: real ones offline, one's own, resumed, failing and refused."""

import importlib
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from heron.api.job import main, pretrain
from heron.base.errors import ConfigError, TrainingError
from heron.distributed.watchdog import Watchdog
from heron.experiment.config import dump_config, load_config, parse_config, run_fingerprint
from heron.training.trackers import TRACKING_FILE, Trackers
from heron.training.tracking import read_metrics
from tests import forked
from tests.experiments import frames
from tests.launch import runs

OWN = '''
import json, os, signal, time
from accelerate.tracking import GeneralTracker

class Mine(GeneralTracker):
    """Appends to a file; KILL_AT and FAIL_AT are steps at which it kills the process or fails."""

    name, requires_logging_directory, tracker = "mine", True, None

    def __init__(self, project, folder, **options):
        super().__init__()
        self.path = folder + "/mine.jsonl"

    def start(self):
        if "FAIL_START" in os.environ:
            raise ConnectionError("no way\\nthere")
        self.write(["start", os.getpid()])

    def store_init_configuration(self, values):
        self.write(["config", values])

    def log(self, values, step=None, **options):
        if str(step) == os.environ.get("FAIL_AT"):
            raise ConnectionError("the network is gone")
        self.write(["log", step, values])
        if str(step) == os.environ.get("KILL_AT"):
            while not os.path.exists(os.environ.get("SAVED", "/")):
                time.sleep(0.05)  # a thread writes the checkpoint, while steps go on
            os.kill(os.getpid(), signal.SIGKILL)

    def finish(self):
        self.write(["finish"])

    def write(self, line):
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\\n")

class Bare(GeneralTracker):
    name = "bare"
'''


@pytest.fixture
def own(my_lab: Path) -> Path:
    """The package's folder, in which trackers of one's own lie."""
    (my_lab / "trackers.py").write_text(OWN)
    return my_lab


def lines(run: Path) -> list[Any]:
    return [json.loads(line) for line in (run / "mine.jsonl").read_text().splitlines()]


def start(config: Path, own: Path, **environment: str) -> tuple[int, str]:
    """Runs an experiment to its end, in a process of its own; its status and what it said."""
    words, variables = ["--config", str(config), "run.resume=auto"], runs.environment(**environment)
    assert str(own.parent) in sys.path  # which a forked process has too
    return runs.finish(forked.start(words, runs.ROOT, main, variables), 120)


def test_ones_own_is_told_of_every_step_after_a_kill(tmp_path: Path, own: Path) -> None:
    changes: dict[str, Any] = {"tracking": ["my_lab.trackers.Mine"]}
    changes["train"] = {"steps": 9, "save_every_steps": 4}
    config, run = runs.experiment(tmp_path, "run", **changes), tmp_path / "run"
    start(config, own, KILL_AT="2")  # before a checkpoint; then steps from 4 on come again, twice
    for at in ("6", "7"):
        start(config, own, KILL_AT=at, SAVED=str(run / "checkpoints" / "latest"))
    status, last = start(config, own)
    assert status == 0, last
    begun = [n for n, line in enumerate(lines(run)) if line[0] == "config"]
    assert len(begun) == 2  # nothing was saved before the first kill: the second run is another
    told = lines(run)[begun[1] :]
    steps = Counter(line[1] for line in told if line[0] == "log" and "loss" in line[2])
    assert set(steps) == set(range(9))
    scores = [line for line in told if line[0] == "log" and "loss" not in line[2]]
    assert [line[1] for line in scores] == [8] and "test/f1_weighted" in scores[0][2]
    assert told[0][1]["optim.lr"] == 0.05 and told[-1] == ["finish"]
    rows = {row["step"]: row["loss"] for row in read_metrics(run / "metrics.jsonl") if "lr" in row}
    logged = [line for line in told if line[0] == "log" and "lr" in line[2]]
    assert {line[1]: line[2]["loss"] for line in logged} == rows


def test_the_guides_tracker(tmp_path: Path, my_lab: Path) -> None:
    guide = (runs.ROOT / "docs" / "training.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (code,) = [block for block in blocks if "(GeneralTracker)" in block]
    (my_lab / "trackers.py").write_text(code)
    pretrain(frames(tmp_path, tracking=["my_lab.trackers.Lines"], train={"steps": 2}))
    lines = (tmp_path / "run" / "lines.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    assert [step for step, _ in told] == [None, 0, 1, 1]


def test_a_tracker_that_fails_is_told_of_once(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAIL_AT", "2")
    config = frames(tmp_path, tracking=["my_lab.trackers.Mine", "tensorboard"])
    assert pretrain(config)["steps"] == 5
    said = capsys.readouterr().out
    assert said.count("my_lab.trackers.Mine") == 1
    assert (
        "tracker my_lab.trackers.Mine failed at step 2 (ConnectionError: the network is gone); the "
        "run continues without it, and metrics.jsonl has every step" in said
    )
    assert [line[1] for line in lines(tmp_path / "run") if line[0] == "log"] == [0, 1]
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 6
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_a_tracker_that_cannot_start_is_told_of_once(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAIL_START", "1")
    pretrain(frames(tmp_path, tracking=["my_lab.trackers.Mine"], train={"steps": 2}))
    said = capsys.readouterr().out
    assert (
        said.count("Mine failed at step 0 (ConnectionError: no way there); the run continues") == 1
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandd", r"tracking: unknown tracker 'wandd'; did you mean 'wandb'\? or use the dotted p"),
        ("my_lab.trackers.Yours", "my_lab.trackers.Yours: module 'my_lab.trackers' has no 'Yours'"),
        ("nowhere.Mine", "nowhere.Mine: cannot import module 'nowhere'"),
        (
            "my_lab.trackers.Bare",
            "Bare has no requires_logging_directory, tracker; Accelerate's GeneralTracker",
        ),
    ],
)
def test_refused_before_training(tmp_path: Path, own: Path, name: str, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        pretrain(frames(tmp_path, tracking=[name]))
    assert not (tmp_path / "run").exists() and not (tmp_path / "frames").exists()


def test_refused_where_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heron.training.trackers.get_available_trackers", lambda: [])
    with pytest.raises(TrainingError) as fault:
        Trackers(frames(tmp_path, tracking=["wandb"]), Watchdog(60))
    assert str(fault.value) == (
        "tracking: wandb is not installed (No module named 'wandb'); "
        "pip install 'heron-pretrain[track]', or remove it"
    )


def test_refused_without_the_key_of_an_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heron.training.trackers.get_available_trackers", lambda: ["comet_ml"])
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    with pytest.raises(TrainingError, match="comet_ml needs an account, but COMET_API_KEY"):
        Trackers(frames(tmp_path, tracking=["comet_ml"]), Watchdog(60))


@pytest.mark.parametrize(
    ("names", "message"),
    [(["a b"], "tracking.0.*got 'a b'"), (["wandb", "wandb"], "a tracker is listed twice")],
)
def test_refused_in_the_configuration(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        frames(tmp_path, tracking=names)


def test_trackers_decide_no_number(tmp_path: Path, own: Path) -> None:
    """Two runs that differ in them have one fingerprint; a run's folder is read without them."""
    plain, tracked = frames(tmp_path), frames(tmp_path, tracking=["my_lab.trackers.Mine"])
    before = run_fingerprint(plain, "")
    Trackers(tracked, Watchdog(60))
    assert run_fingerprint(tracked, "") == before == run_fingerprint(plain, "")
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(parse_config({**plain.model_dump(), "tracking": ["gone.Now"]})))
    assert load_config(path).tracking == ["gone.Now"]


@pytest.mark.parametrize("content", ["{", '{"ids": 3}'])
def test_a_damaged_memory_of_trackers(tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / TRACKING_FILE).write_text(content)
    with pytest.raises(
        TrainingError, match=f"cannot read .*{TRACKING_FILE}: .*restore it, or remove it"
    ):
        Trackers(frames(tmp_path), Watchdog(60)).start(3)


def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    """The folder of a run that one tracker follows, of 3 steps and then resumed, to 5."""
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    before = dict(os.environ)
    for steps in (3, 5):
        changes: dict[str, Any] = {"tracking": [name], "train": {"steps": steps}}
        pretrain(frames(tmp_path, run={"resume": "auto"}, **changes))
    new = {key for key in os.environ if key not in before}
    assert {key for key in new if key.startswith(("WANDB", "MLFLOW"))} <= {"WANDB_SERVICE"}
    return tmp_path / "run"


@pytest.mark.filterwarnings("default")  # MLflow's own tables use what SQLAlchemy deprecates
def test_mlflow_in_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Really: mlflow-skinny 3.17.2 with SQLAlchemy 2.1.9."""
    for module in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(module, reason="pip install 'heron-pretrain[track]'")
    run = twice(tmp_path, monkeypatch, "mlflow")
    client = pytest.importorskip("mlflow").MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'heron'")
    (only,) = client.search_runs([experiment.experiment_id])
    assert only.info.status == "FINISHED" and only.data.params["optim.lr"] == "0.05"
    losses = [(m.step, m.value) for m in client.get_metric_history(only.info.run_id, "loss")]
    rows = read_metrics(run / "metrics.jsonl")
    assert losses == [(row["step"], row["loss"]) for row in rows if "loss" in row]
    scores = client.get_metric_history(only.info.run_id, "test/f1_weighted")
    assert [m.step for m in scores] == [2, 4]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Really: wandb 0.31.0; a file for each start, both of one run, as `wandb sync` takes them."""
    pytest.importorskip("wandb", reason="pip install 'heron-pretrain[track]'")
    run = twice(tmp_path, monkeypatch, "wandb")
    identity = json.loads((run / TRACKING_FILE).read_text())["ids"]["wandb"]
    files = sorted(run.glob(f"wandb/offline-run-*-{identity}/run-{identity}.wandb"))
    rows = [row for file in files for row in history(file)]
    told = read_metrics(run / "metrics.jsonl")
    assert len(files) == 2
    assert [row["loss"] for row in rows] == [row["loss"] for row in told if "loss" in row]
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["_step"] for row in rows if "test/f1_weighted" in row] == [2, 4]


TRACKIO = """
import json, os

def write(**line):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(line) + "\\n")

class Run:
    log = staticmethod(lambda values, step=None: write(step=step, values=values))
    finish = staticmethod(lambda: write(finish=True))

class config:
    update = staticmethod(lambda values, allow_val_change=None: write(config=values))

def init(project, name, resume, embed):
    write(project=project, name=name, resume=resume, embed=embed)
    return Run()
"""


def test_trackio_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with trackio 0.43.0's names; itself it cannot be beside pillow 13."""
    place = tmp_path / "site"
    place.mkdir()
    (place / "trackio.py").write_text(TRACKIO)
    monkeypatch.setattr("heron.training.trackers.get_available_trackers", lambda: ["trackio"])
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    sys.modules.pop("trackio", None)
    try:
        run = twice(tmp_path, monkeypatch, "trackio")
    finally:
        sys.modules.pop("trackio", None)
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    first, again = (line for line in told if "project" in line)
    assert first == again
    assert first["name"].startswith("run-") and first["resume"] == "allow"
    assert [line["config"]["train.steps"] for line in told if "config" in line] == [3, 5]
    losses = [(x["step"], x["values"]["loss"]) for x in told if "loss" in x.get("values", {})]
    rows = read_metrics(run / "metrics.jsonl")
    assert losses == [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert sum("finish" in line for line in told) == 2


@pytest.mark.filterwarnings("default")
def test_trackio_really(tmp_path: Path) -> None:
    """Really, where it is: trackio 0.43.0 beside pillow 12.3.0; its folder is found as it loads."""
    pytest.importorskip("trackio", reason="pip install 'heron-pretrain[trackio]', pillow below 13")
    frames(tmp_path)
    code = (
        "import sys; from pathlib import Path; from tests.experiments import frames\n"
        "from heron.api.job import pretrain\n"
        "pretrain(frames(Path(sys.argv[1]), run={'resume': 'auto'}, tracking=['trackio'],"
        " train={'steps': int(sys.argv[2])}))"
    )
    for steps in ("3", "5"):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), steps],
            env=runs.environment(TRACKIO_DIR=str(tmp_path / "told"), PYTHONPATH=str(runs.ROOT)),
            check=True,
        )
    with sqlite3.connect(tmp_path / "told" / "heron.db") as told:
        values = told.execute("select step, metrics from metrics order by id").fetchall()
        ((config,),) = told.execute("select config from configs").fetchall()
    found = [(step, json.loads(text)) for step, text in values]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(step, row["loss"]) for step, row in found if "loss" in row] == [
        (row["step"], row["loss"]) for row in rows if "loss" in row
    ]
    assert json.loads(config)["train.steps"] == 5


def history(file: Path) -> list[dict[str, Any]]:
    """The rows that an offline file of wandb holds: LevelDB's log after a header of 7 bytes."""
    written = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, whole, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header fits into the rest of the block
            at += 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # neither all of a record nor its last part
            continue
        record = written.Record()
        record.ParseFromString(whole)
        whole = b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            names = [item.key or "/".join(item.nested_key) for item in items]
            values = [json.loads(item.value_json) for item in items]
            rows.append(dict(zip(names, values, strict=True)))
    return rows
