"""Lines of JSON that a run has written: what is read, what a crash may leave, what is refused."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from heron.base.errors import CheckpointError, ShardError, TrainingError
from heron.training import tracking
from heron.training.run_log import RunLog
from heron.training.signature import Signature
from heron.training.tracking import (
    read_lines,
    read_metrics,
    read_result,
    write_start,
)

REMEDY = "restore it, or pass another checkpoint"
GOOD = b'{"step": 0, "epoch": 0, "loss": 1.5, "samples_per_s": null}\n'
DAMAGED = [
    (b'{"step": 1, "los\n', "not JSON (line 1: Unterminated string starting at)"),
    (b"\xff\xfe\n", "not JSON (not UTF-8 at byte 0)"),
    (b"\0\0\0\n", "not JSON (line 1: Expecting value)"),
    (b"[1]\n", "it must be"),
    (b"3\n", "it must be"),
    (b'{"loss": 1}\n', "step is missing"),
    (b'{"step": "1", "loss": 1}\n', "step must be a valid integer, got '1'"),
    (b'{"step": -1}\n', "step must be greater than or equal to 0, got -1"),
    (b'{"step": 9223372036854775808}\n', "step must be less than or equal to 92233720"),
    (b'{"step": 1, "loss": "low"}\n', "loss must be a valid number, got 'low'"),
    (b'{"step": 1, "loss": 1e400}\n', "1e400 is not a finite number"),
    (b'{"step": 1, "loss": NaN}\n', "NaN is not a finite number"),
    (b'{"step": ' + b"1" * 5000 + b"}\n", "Exceeds the limit (4300 digits)"),
    (b'{"step": 1, "loss": {"a": 1}}\n', "loss must be a valid number"),
    (b'{"step": 1, "step": 2}\n', "key 'step' occurs twice"),
    (b"[" * 10**5 + b"\n", "nested too deep"),
]


@pytest.mark.parametrize(("line", "message"), DAMAGED, ids=[str(line[:16]) for line, _ in DAMAGED])
@pytest.mark.parametrize("after", [b"", GOOD], ids=["last", "in the middle"])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes, message: str, after: bytes) -> None:
    """The last line too, where it is whole: a crash cuts lines short, and changes none."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + line + after)
    with pytest.raises(TrainingError) as fault:
        read_metrics(path)
    said = str(fault.value)
    assert said.startswith(f"{path}, line 2 is damaged: ") and message in said
    assert said.endswith("restore the file, or remove the line")
    assert len(said.splitlines()) == 1 and len(said) < 500
    with pytest.raises(TrainingError):
        RunLog(tmp_path, 1, 2, main=True)
    assert path.read_bytes() == GOOD + line + after


def test_the_bar_has_loss_score_and_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLog(tmp_path / "mine", 0, 2, main=True) as log:
        log.step({"step": 0, "loss": 1.5, "samples_per_s": 1234.0})
        log.scores(0, 1.0, {"f1_weighted": 0.25, "auc_macro": 0.5})
    told = capsys.readouterr()
    assert told.out == "epoch 1: f1_weighted 0.2500, auc_macro 0.5000\n"
    begins = "mine: step 1 of 2, loss 1.5000, f1_weighted 0.2500, 1,234 samples/s, in 0:00:"
    assert told.err.startswith(begins)
    with RunLog(tmp_path / "other", 0, 2, main=False) as log:
        log.step({"step": 0, "loss": 1.5})
        log.say("nothing, on another process than the first")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("last", [b"", b'{"step": 1, "lo', b'{"step": 1, "a": "\xc3', b"\0\0"])
def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path, last: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD + last)
    assert [row["loss"] for row in read_metrics(path)] == [1.5, 1.5]
    path.write_bytes(last)
    assert read_metrics(path) == [] == read_metrics(tmp_path / "none.jsonl")
    path.write_bytes(GOOD.rstrip())  # all of a line but its end
    assert len(read_metrics(path)) == 1


def test_lines_of_any_kind_have_bounds(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(b'{"a": {"b": 9223372036854775808}}\n')
    with pytest.raises(
        TrainingError, match="line 1 is damaged: a.b must be .*, got a number of 64 bits"
    ):
        read_lines(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "not JSON (line 1: Expecting value)"),
        (b'{"steps": 3', "not JSON (line 1: "),
        (b"\xff", "not JSON (not UTF-8 at byte 0)"),
        (b"[]", "it must be a valid dictionary, got []"),
        (b"{}", "steps must be a valid number, got 'nothing'"),
        (b'{"steps": "3"}', "steps must be a valid number, got '3'"),
        (b'{"steps": 3, "f1": 1e999}', "1e999 is not a finite number"),
        (
            b'{"steps": 3, "f1": ' + b"9" * 30 + b"}",
            "f1 must be 9223372036854775807 at most, got a number of 100 bits",
        ),
    ],
)
def test_a_result_that_cannot_be_read(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "result.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TrainingError) as fault:
        read_result(path, ["steps"])
    assert str(fault.value).startswith(f"cannot read {path}: ")
    assert message in str(fault.value) and len(str(fault.value).splitlines()) == 1


def test_a_score_that_is_null_is_a_result(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"steps": 3, "f1": null, "strategy": "ddp"}')
    assert read_result(tmp_path / "result.json", ["steps", "f1"])["f1"] is None


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Bounds the bytes of a file that is written, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_at_a_restart_costs_no_line(tmp_path: Path) -> None:
    """The lines that stay are written anew at each start, and are the only record of the run."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before := b"".join(GOOD.replace(b"0", b"%d" % i, 1) for i in range(200)))
    with files_of_at_most(4096), pytest.raises((OSError, ShardError)):
        RunLog(tmp_path, 199, 200, main=True)
    assert path.read_bytes() == before


def test_a_full_disk_at_a_restart_keeps_the_configuration(tmp_path: Path) -> None:
    """A start writes config.yaml anew, which all that reads the run needs."""
    path = tmp_path / "config.yaml"
    path.write_text("before: 1\n")
    with files_of_at_most(64), pytest.raises((OSError, ShardError)):
        write_start(tmp_path, "key: 1\n" * 100, 1, "")
    assert path.read_text() == "before: 1\n"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file or directory"),
        (b"{", "not JSON (line 1: Expecting property name enclosed in double quotes)"),
        (b"{}", "shapes is missing; labels is missing"),
    ],
)
def test_a_signature_that_cannot_be_read(tmp_path: Path, content: bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / "model.json").write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        Signature.read(tmp_path)
    assert str(error.value).startswith(f"cannot read {tmp_path / 'model.json'}: ")
    assert told in str(error.value) and str(error.value).endswith(REMEDY)
    assert "pydantic" not in str(error.value)


def test_the_commit_is_of_a_checkout_that_has_this_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy in an environment inside another project's checkout has none."""
    copy = tmp_path / "site-packages/tracking.py"
    copy.parent.mkdir()
    copy.write_text("")

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "other")
    monkeypatch.setattr(tracking, "__file__", str(copy))
    assert tracking._commit() is None
    git("add", ".")
    git("commit", "--quiet", "--message", "its own")
    assert tracking._commit() == git("rev-parse", "--short=12", "HEAD")
