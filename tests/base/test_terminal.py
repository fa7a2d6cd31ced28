"""What a terminal shows, and a pipe: real ones, with a process at their other end."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from heron.base import terminal

ROOT = Path(__file__).parent.parent.parent
FAULT = "data/faces has another build: its train is 300, this one's 400; expected the same"
ALL = f"""
from heron.base.terminal import Bar, print_error, print_lines, print_markdown, print_table
print_lines("next: heron report studies/a")
print_error("error", {FAULT!r})
print_markdown("Of two:\\n\\n| method | F1 |\\n|---|---|\\n| a [b] | 0.5 |\\n")
print_table(["run", "F1"], [["a\\x1b[2J", "0.5"], ["[red]b", "0.25"]])
with Bar(4, "step", name="faces") as bar:
    for step in range(3):
        bar.update(shown=f"loss {{step}}.5, 300 samples/s")
        print("a line beside the bar", step)
"""
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")  # any code that sets one of eight
CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(code: str, **more: str) -> str:
    """What a process writes on a terminal of 44 columns."""
    main, other = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"COLUMNS": "44", "TERM": "xterm-256color"} | more
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=other, stderr=other
    )
    os.close(other)
    written = b""
    try:
        while part := os.read(main, 65_536):
            written += part
    except OSError:  # the other end has closed
        pass
    assert process.wait() == 0, written.decode()
    return written.decode()


def test_a_terminal_has_colour_whole_words_and_ruled_tables() -> None:
    shown = on_a_terminal(ALL)
    assert COLOUR.search(shown) and "\x1b[1;31merror:" in shown
    bare = CODE.sub("", shown)
    lines = [line.rstrip() for line in bare.replace("\r", "\n").splitlines()]
    assert max(map(len, lines)) <= 44
    assert " ".join(" ".join(lines).split()).count(FAULT) == 1
    words = {word for line in lines for word in line.split()}
    assert {*FAULT.split()} <= words, "a word was cut in two"
    assert "━━" in bare and "a [b]" in bare and "[red]b" in bare
    assert "'a\\x1b[2J'" in bare and "\x1b[2J" not in shown
    assert "faces: step 3 of 4 ━" in bare and "loss 2.5, 300 samples/s" in " ".join(bare.split())
    assert bare.count("a line beside the bar 2") == 1
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is hidden"


def test_what_has_no_room_is_named() -> None:
    code = "from heron.base.terminal import print_table\n"
    code += "print_table(['name', 'value', 'much', 'host'], [['a' * 20, '1.5', 'b' * 30, 'c']])"
    shown = CODE.sub("", on_a_terminal(code))
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    assert lines[0].split() == ["name", "value"] and lines[2].split() == ["a" * 20, "1.5"]
    assert " ".join(lines[3:]) == "too wide for this terminal, and left out: much, host"


def test_no_color_is_heeded() -> None:
    assert not COLOUR.search(on_a_terminal(ALL, NO_COLOR="1"))


def test_a_pipe_gets_plain_lines(capfd: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALL], cwd=ROOT, capture_output=True, text=True, check=True,
        env=os.environ | {"FORCE_COLOR": "1", "COLUMNS": "20"},
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "next: heron report studies/a",
        *("Of two:", "", "| method | F1 |", "|---|---|", "| a [b] | 0.5 |"),
        *("run         F1", "'a\\x1b[2J'  0.5", "[red]b      0.25"),
        *(f"a line beside the bar {step}" for step in range(3)),
    ]
    first, last = done.stderr.splitlines()
    assert first == f"error: {FAULT}"
    assert re.fullmatch(r"faces: step 3 of 4, loss 2\.5, 300 samples/s, in 0:00:\d\d", last)


def test_a_log_has_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with terminal.Bar(200, "step", start=100) as bar:
        for _ in range(50):
            now += 1.0
            bar.update(shown="loss 1.0000")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "step 110 of 200, loss 1.0000, 0:01:30 left"
    assert len(said) == 5 and said[-1] == "step 150 of 200, loss 1.0000, 0:00:50 left"
    with terminal.Bar(5, "row", hidden=True) as bar:
        now += 60
        bar.update(5)
    assert capsys.readouterr().err == ""


def test_lines_that_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_table(
        ["", "F1", "AUC"], [["a", "0.5", ""], ["plain", "0.25", "1"]], headed=False
    )
    assert capsys.readouterr().out.splitlines() == ["a      F1 0.5", "plain  F1 0.25  AUC 1"]
