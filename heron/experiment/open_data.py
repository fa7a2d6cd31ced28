"""Opens the data of an experiment, and refuses what its sections ask of it together."""

from pathlib import Path

from heron.base.errors import ConfigError
from heron.data.batches import BatchSource
from heron.data.endless import EndlessBatches, EndlessStreams
from heron.data.run_data import open_endless, open_streams, refuse_without_index
from heron.data.streams import ShardBatches, Streams
from heron.experiment.config import Config


def open_data(config: Config) -> Streams:
    """Opens the data of a run: indexed shards, or tars without an index.

    Raises ConfigError if an option does not fit the data or another option, ShardError if the data
    set is missing or damaged.
    """
    if config.data.webdataset is None:
        _refuse_repeated_rows(config)
        folder = Path(config.run.dir)
        return open_streams(config.data, config.seed, config.negatives, folder)
    _refuse_without_index(config)
    return open_endless(config.data)


def open_process_batches(
    streams: Streams, config: Config, rank: int, world: int, start: int
) -> BatchSource:
    """Returns the batches of a process; `start` is the step from which the run continues."""
    if isinstance(streams, EndlessStreams):
        return EndlessBatches(streams, config.data, config.seed, rank, world, start)
    return ShardBatches(streams, config.seed, rank, world)


def _refuse_repeated_rows(config: Config) -> None:
    """Refuses `data.balance` together with options that need each row once per batch."""
    unsupported = [f"objective.{name}" for name in _terms_that_remember(config)]
    unsupported += ["negatives.mine"] if config.negatives.mine else []
    unsupported += ["data.batch.labelled = 0"] if config.data.batch.labelled == 0 else []
    if config.data.balance is not None and unsupported:
        raise ConfigError(
            f"data.balance is {config.data.balance}, which may repeat a labelled row in a batch, "
            f"so it does not work with {unsupported[0]}; remove one of them"
        )


def _refuse_without_index(config: Config) -> None:
    """Refuses options beside the data's own that need an index, where tars have none."""
    for name in _terms_that_remember(config):
        reason = "no row comes back under the same number"
        refuse_without_index(f"objective.{name} remembers rows", reason)
    mined, frozen = config.negatives.mine, config.train.frozen_views
    if mined:
        refuse_without_index(f"negatives.mine is {mined}", "there are no rows to embed and mine")
    if frozen:
        refuse_without_index(f"train.frozen_views is {frozen}", "features are kept by row number")
    if config.evaluate.baselines:
        reason = "they would train on different rows than the run"
        refuse_without_index(
            f"evaluate.baselines is {str(config.evaluate.baselines).lower()}", reason
        )


def _terms_that_remember(config: Config) -> list[str]:
    """Returns the names of the terms that keep something for each row of the data set."""
    return [name for name, term in config.objective.terms().items() if term.loss.remembers_rows]
