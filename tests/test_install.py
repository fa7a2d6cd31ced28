"""Heron where it was never installed."""

import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "heron"


def test_a_checkout_that_was_never_installed_has_a_version(tmp_path: Path) -> None:
    """`-S` hides site-packages; in another folder no metadata of a build is found either."""
    (tmp_path / "heron").symlink_to(PACKAGE)
    command = [sys.executable, "-S", "-c", "import heron; print(heron.__version__)"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "not installed"
