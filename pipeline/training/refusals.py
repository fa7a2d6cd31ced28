"""Experiments whose parts do not fit each other."""

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.experiment import Config
from heron.pipeline.data.streams import Streams
from heron.pipeline.data.views import Views
from heron.pipeline.objectives.objective import Objective


def refuse_unfit(config: Config, objective: Objective, views: Views, streams: Streams) -> None:
    """Raises ConfigError where data, terms or the model rule out what the experiment asks."""
    if streams.missing and config.model.classify_on == "first_view":
        raise ConfigError(
            "model.classify_on is 'first_view', and rows lack views; expected 'all_views', "
            "of which a row is classified by those that it has"
        )
    if config.evaluate.cross_view and "projections" not in objective.needs.features:
        raise ConfigError(
            "evaluate.cross_view is true, and no term makes projections; expected one that "
            "does, such as cmc, or false"
        )
    graphs = any(len(shape) == 4 for shape in views.shapes)
    if config.train.compile and (graphs or streams.missing):
        what = "a view holds graphs" if graphs else "rows lack views"
        raise ConfigError(
            f"train.compile is true, and {what}, so that every step would be compiled anew; "
            "expected false"
        )
