"""The command line, as `heron VERB` and as `python -m heron VERB`."""

import sys
from collections.abc import Sequence

from heron.base.cores import share_cores


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; where only the losses are installed, says what it needs beside them."""
    share_cores()  # before the verbs import torch
    try:
        from heron.cli.main import main as run
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package in ("", "heron"):
            raise
        text = (
            f"error: the command needs {package}, which is not installed with the losses alone: "
            "pip install 'heron-pretrain[cpu]', or 'heron-pretrain[train]' without search"
        )
        print(text, file=sys.stderr)
        return 1
    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
