"""What a verb of the command line is."""

import argparse
from collections.abc import Callable
from typing import NamedTuple


class Verb(NamedTuple):
    """A verb of the command line: what it says of itself, its arguments, and what it does."""

    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
