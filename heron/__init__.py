"""Heron: distributed contrastive pretraining for multi-view, multi-label data.

    import heron

    config = heron.load_config("scene", "optim.lr=0.1", method="herocon-u")
    run = heron.pretrain(config)
    model = heron.from_pretrained("runs/scene")
    z = model.encode({"view1": x1, "view2": x2})
    index = heron.Index.build(z, labels=y)
    index.search(z[:5], k=10, where="Beach and not Urban")

Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from heron.base.shipped import __version__

if TYPE_CHECKING:
    from heron import losses, metrics
    from heron.api.model import Model, from_pretrained
    from heron.api.run import Run, load_config, pretrain
    from heron.base.errors import HeronError
    from heron.experiment.config import Config
    from heron.retrieval.index import Index

_MODULES = {"losses": "heron.losses", "metrics": "heron.metrics"}
_OBJECTS = {  # the module that defines each
    "Config": "heron.experiment.config",
    "HeronError": "heron.base.errors",
    "Index": "heron.retrieval.index",
    "Model": "heron.api.model",
    "Run": "heron.api.run",
    "from_pretrained": "heron.api.model",
    "load_config": "heron.api.run",
    "pretrain": "heron.api.run",
}
__all__ = [
    "Config",
    "HeronError",
    "Index",
    "Model",
    "Run",
    "__version__",
    "from_pretrained",
    "load_config",
    "losses",
    "metrics",
    "pretrain",
]


if not TYPE_CHECKING:  # else type checkers would accept every name

    def __getattr__(name: str) -> Any:
        """Imports a public name when it is first used (PEP 562)."""
        if name in _MODULES:
            return import_module(_MODULES[name])
        if name not in _OBJECTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_OBJECTS[name]), name)
        return value


def __dir__() -> list[str]:
    """Returns the public names, imported or not."""
    return sorted({*globals(), *__all__})
