"""The table of a study that runs: what is in it, and where it is shown."""

import json
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from heron.studies.ledger import Ledger, write_rows
from heron.studies.live import live, print_line, status
from heron.studies.study import Study, dump_study, load_study
from heron.studies.trials import LINEAGE, plan
from heron.training.run_lock import RunLock
from tests.studies import made


def begun(folder: Path) -> tuple[Study, Ledger]:
    """A study of four: one is done, one failed, one is under way, one waits."""
    lines = [
        made.trial("000", {"optim.lr": 0.1}),
        made.trial("001", {"optim.lr": 0.2}, status="failed", result=None, measured=None),
    ]
    rates = [0.1, 0.2, 0.3, 0.4]
    study = load_study(made.study(folder, lines, vary={"optim.lr": rates}) / "study.yaml")
    (folder / "study.yaml").write_text(dump_study(study))
    return study, Ledger(study, folder)


def test_what_the_table_says(tmp_path: Path) -> None:
    study, ledger = begun(tmp_path / "study")
    trials = plan(study, ledger.out)
    run = trials[2].run
    run.mkdir()
    (run / "config.yaml").touch()
    start = {"steps": 40, "started": None, "host": None, "version": None, "fingerprint": None}
    (run / "run.json").write_text(json.dumps(start))
    rows = [{"step": 6, "loss": 1.25}, {"step": 6, "test/f1_weighted": 0.75}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with RunLock(run) as lock:
        lock._lock(lambda: False)
        console = Console(width=120, record=True, file=StringIO())
        console.print(status(trials, ledger, time.monotonic() - 60, before=1))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert lines[0] == "2 of 4 trials have ended, 1 failed; 0:01:33 left"  # 1 and 7 / 40 in 60 s
    assert "000 done 9 0.5 – 500 MB optim.lr=0.1" in lines
    assert "001 failed – – – – optim.lr=0.2" in lines
    assert "002 runs 7 of 40 0.75 1.25 – optim.lr=0.3" in lines
    assert not [line for line in lines if line.startswith("003")]


def test_a_trial_that_was_started_and_ended_ones_losses_are_shown(tmp_path: Path) -> None:
    study, ledger = begun(tmp_path / "study")
    trials = plan(study, ledger.out)
    trials[3].run.mkdir()
    ledger.started = {"003"}
    rows = [{"step": 8, "loss": 0.125}, {"step": 8, "test/f1_weighted": 0.5}]
    metrics = "".join(json.dumps(row) + "\n" for row in rows)
    (trials[0].run / "metrics.jsonl").write_text(metrics)
    console = Console(width=120, record=True, file=StringIO())
    console.print(status(trials, ledger, time.monotonic() - 60, before=2))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert lines[0] == "2 of 4 trials have ended, 1 failed"  # nothing tells what is left
    assert "000 done 9 0.5 0.125 500 MB optim.lr=0.1" in lines
    assert "003 starts 0 – – – optim.lr=0.4" in lines


def test_a_population_s_steps_are_to_its_end_and_its_values_those_taken_over(
    tmp_path: Path,
) -> None:
    search = {"sampler": "random", "scheduler": "pbt", "trials": 2, "steps": 80, "every_steps": 40}
    vary = {"optim.lr": {"low": 0.1, "high": 0.2}}
    measure = {"x": "optim.lr", "y": ["f1_weighted"], "score": "f1_weighted"}
    folder = made.study(tmp_path / "study", [], vary=vary, search=search, measure=measure)
    study = load_study(folder / "study.yaml")
    (folder / "study.yaml").write_text(dump_study(study))
    ledger = Ledger(study, folder)
    run = plan(study, folder)[0].run
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    (run / "run.json").write_text('{"steps": 40}')
    (run / "metrics.jsonl").write_text('{"step": 39, "loss": 1.5}\n')
    write_rows(run / LINEAGE, [{"step": 40, "from": "001", "values": {"optim.lr": 0.125}}])
    ledger.started = {"000"}
    console = Console(width=120, record=True, file=StringIO())
    console.print(status(plan(study, folder), ledger, time.monotonic() - 60, before=0))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert lines[0] == "0 of 2 trials have ended; 0:03:00 left"
    assert "000 waits 40 of 80 – 1.5 – optim.lr=0.125" in lines


def test_a_pipe_gets_lines_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, ledger = begun(tmp_path / "study")
    with live(plan(study, ledger.out), ledger):
        print_line("000 runs: optim.lr=0.1")
    assert capsys.readouterr().out == "000 runs: optim.lr=0.1\n"


def test_a_terminal_has_the_table_below_the_lines(tmp_path: Path) -> None:
    from tests.base.test_terminal import on_a_terminal

    begun(tmp_path / "study")
    code = f"""
import time
from io import StringIO
from pathlib import Path
from heron.studies.ledger import Ledger, write_rows
from heron.studies.live import live, print_line
from heron.studies.study import load_study
from heron.studies.trials import plan
out = Path({str(tmp_path / "study")!r})
study = load_study(out / "study.yaml")
with live(plan(study, out), Ledger(study, out)):
    print_line("000 runs: optim.lr=0.1")
"""
    shown = on_a_terminal(code, COLUMNS="100")
    assert "000 runs: optim.lr=0.1" in shown
    assert shown.index("000 runs") < shown.rindex("2 of 4 trials have ended, 1 failed")
