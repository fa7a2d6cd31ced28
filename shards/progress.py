"""A progress bar that a log can hold as well as a terminal."""

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(**settings: Any) -> "tqdm[Any]":
    """Returns a tqdm bar with `settings`; in a log, plain ASCII that is written every ten seconds.

    Schedulers cut what the processes of a job print into pieces and interleave them, which breaks
    characters of several bytes; and ten lines a second fill a log that nobody watches.
    """
    if sys.stderr.isatty():
        return tqdm(dynamic_ncols=True, **settings)
    return tqdm(ascii=True, mininterval=10, ncols=100, **settings)
