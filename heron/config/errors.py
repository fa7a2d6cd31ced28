"""Errors that stop a run: each names the thing, what was found and expected, and the remedy."""

from heron.shards.errors import HeronError as HeronError
from heron.shards.errors import csv_line as csv_line

STOPPED = 75  # exit status: stopped by a signal, state saved; run again to continue (EX_TEMPFAIL)
INTERRUPTED = 130  # exit status: ended at once by Ctrl-C, as shells report it
LOST = 76  # exit status: a process is dead, hangs, or cannot be reached


class ConfigError(HeronError):
    """A configuration is invalid or does not fit the data."""


class CheckpointError(HeronError):
    """A checkpoint cannot be loaded."""


class TrainingError(HeronError):
    """A run cannot start or continue."""


class Held(TrainingError):
    """Another run is using the folder of this run."""


class InputError(HeronError):
    """Rows passed to a model do not fit its inputs."""


class RetrievalError(HeronError):
    """Embeddings, an index or a query are invalid."""


class StudyError(HeronError):
    """A study cannot be run or read."""


class Stopped(Exception):
    """A signal asked the run to stop, and a checkpoint holds its state."""


class Lost(Exception):
    """Another process can no longer be reached."""
