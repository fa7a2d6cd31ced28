"""What stops a run: each message names the thing, what was found, what was expected, the remedy."""

from heron.shards.errors import HeronError

STOPPED = 75  # exit status: a signal came, the state is saved; run again to go on (EX_TEMPFAIL)
INTERRUPTED = 130  # exit status: Ctrl-C ended it at once, as a shell says
LOST = 76  # exit status: a process is dead, hangs, or cannot be reached


class ConfigError(HeronError):
    """A configuration that cannot be run, or does not fit the data."""


class CheckpointError(HeronError):
    """A checkpoint that cannot be loaded."""


class TrainingError(HeronError):
    """A run that cannot start or cannot go on."""


class Held(TrainingError):
    """A run whose folder another run has."""


class InputError(HeronError):
    """Rows that are given to a model are not what it takes."""


class RetrievalError(HeronError):
    """Embeddings, an index or a query that is not what it should be."""


class StudyError(HeronError):
    """A study that cannot be run or read."""


class Stopped(Exception):
    """A signal asked the run to stop, and a checkpoint holds its state."""


class Lost(Exception):
    """Another process cannot be reached any more."""
