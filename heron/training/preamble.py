"""Checks a run before its first step, and describes it."""

from heron.base.errors import ConfigError
from heron.base.terminal import counted
from heron.data.batches import worker_count
from heron.data.streams import Streams
from heron.data.views import Views
from heron.experiment.config import Config
from heron.losses.exchange import ShardSizes
from heron.losses.objective import Objective
from heron.training.strategy import Strategy


def refuse_unfit(config: Config, objective: Objective, views: Views, streams: Streams) -> None:
    """Raises ConfigError where data, terms or the model do not fit the experiment's options."""
    if streams.lacks_views and config.model.classify_on == "first_view":
        raise ConfigError(
            "model.classify_on is 'first_view', but some rows lack views; use 'all_views', which "
            "classifies a row by the views that it has"
        )
    if config.evaluate.cross_view and "projections" not in objective.needs.features:
        raise ConfigError(
            "evaluate.cross_view is true, but no term makes projections; add one that does, such "
            "as cmc, or set it to false"
        )
    raw = {"inputs", "input_projections", "networks"}  # features that are made of the inputs
    for name, term in objective.terms.items():
        if config.frozen_views and raw & term.needs.features:
            raise ConfigError(
                f"train.frozen_views is {config.train.frozen_views}, but objective.{name} reads "
                "the inputs themselves, not features that were embedded once; set it to 0"
            )
    graphs = any(len(shape) == 4 for shape in views.shapes)
    if config.train.compile and (graphs or streams.lacks_views):
        reason = "a view has graphs" if graphs else "some rows lack views"
        raise ConfigError(
            f"train.compile is true, but {reason}, so every step would be compiled again; set it "
            "to false"
        )


def preamble(
    config: Config,
    streams: Streams,
    objective: Objective,
    sizes: ShardSizes,
    strategy: Strategy,
    micro_batches: int,
) -> str:
    """Returns a description of the run in a few lines, with the sizes of its batch."""
    world, train, workers = len(sizes.rows), config.train, worker_count(config.data)
    options = {  # named where they are on
        "compiled": train.compile,
        f"EMA of {train.ema}": train.ema is not None,
        "activation checkpointing": train.activation_checkpointing,
        "deterministic kernels": train.deterministic,
        f"{counted(workers, 'data worker')} each": workers,
    }
    steps, epochs = train.length(per_epoch := streams.epoch_stream.steps_per_epoch)
    lines = [
        f"{config.run.dir}: {strategy.parameters:,} parameters; objective "
        + " + ".join(f"{term.weight:g} {name}" for name, term in objective.sections.items()),
        *streams.describe(),
        f"global batch {sum(sizes.rows):,} = {' + '.join(f'{n:,}' for n in sizes.rows)} over "
        f"{world} process{'es' if world > 1 else ''} ({sum(sizes.labelled):,} labelled)"
        + (f", each in {micro_batches} micro-batches" if micro_batches > 1 else ""),
        f"{steps:,} steps = {steps / per_epoch:g} epochs x {per_epoch:,}"
        + ("" if steps == epochs * per_epoch else f", of a schedule of {epochs:g} epochs"),
        ", ".join([strategy.describe(), train.precision, *(k for k, v in options.items() if v)]),
    ]
    if objective.supervised and streams.unlabelled:
        hint = (
            "no term uses unlabelled rows; data.batch.unlabelled=0 makes steps faster, and keeps "
            "these rows out of batch norm"
        )
        if streams.epoch_stream is streams.unlabelled:
            hint += "; an epoch is then one of labelled rows"
        lines.append(hint)
    return "\n".join(lines)
