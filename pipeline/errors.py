"""What stops a run: each message names the thing, what was found, what was expected, the remedy."""


class ConfigError(Exception):
    """A configuration that cannot be run, or does not fit the data."""


class CheckpointError(Exception):
    """A checkpoint that cannot be loaded."""


class TrainingError(Exception):
    """A run that cannot start or cannot go on."""
