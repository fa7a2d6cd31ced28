"""What `heron check` calls a loss with: drawn features and labels, in the usual forms."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, one_hot

from heron.base.errors import ConfigError
from heron.distributed import collectives
from heron.losses.families import InputLoss, LabelledLoss, LogitLoss, ProjectionLoss
from heron.losses.loss import Loss

DIM, CLASSES = 8, 3
Form = Literal["views", "pair", "clip", "siglip", "stacked", "rows", "labelled", "logits", "heron"]
FORMS: dict[str, str] = {
    "views": "loss([z1, z2])",
    "pair": "loss(z1, z2)",
    "clip": "loss(image, text, logit_scale)",
    "siglip": "loss(image, text, logit_scale, logit_bias)",
    "stacked": "loss(z[batch, 2, dim], classes)",
    "rows": "loss(z1 and z2 below each other, their classes)",
    "labelled": "loss(z, classes)",
    "logits": "loss(logits, classes)",
    "heron": "a loss of Heron, by its class",
}


@dataclass(frozen=True)
class LossSpec:
    """A loss to check.

    Attributes:
        path: dotted path of a class, of a loss function, or of a function that builds a loss.
        options: keyword arguments; `$RANK` and `$WORLD` stand for the process's.
        inputs: what it is called with, a key of `FORMS`.
    """

    path: str
    options: Mapping[str, Any]
    inputs: Form


@dataclass(frozen=True)
class Inputs:
    """Features and labels of some rows; `first` is the number of the first among all."""

    form: Form
    features: Sequence[Tensor]  # z1 and z2 [rows, DIM], and logits [rows, CLASSES]
    classes: Tensor
    first: int = 0

    @classmethod
    def draw(cls, form: Form, rows: int) -> "Inputs":
        """Draws rows, the same each time, of numbers that half precision holds exactly."""
        generator = torch.Generator().manual_seed(0)
        widths = (DIM, DIM, CLASSES)
        features = [torch.randn(rows, n, generator=generator).bfloat16().float() for n in widths]
        return cls(form, [x.clamp(-4, 4) for x in features], torch.arange(rows) % CLASSES)

    def with_features(self, features: Sequence[Tensor]) -> "Inputs":
        """Returns the same rows with other features."""
        return replace(self, features=list(features))

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Returns the rows in another type."""
        return self.with_features([x.to(dtype) for x in self.features])

    def double(self) -> "Inputs":
        """Returns the rows in float64."""
        return self.to(torch.float64)

    def rows(self, rows: slice) -> "Inputs":
        """Returns some of the rows."""
        some = self.with_features([x[rows] for x in self.features])
        return replace(some, classes=self.classes[rows], first=rows.start)


def find_loss(path: str) -> Callable[..., Any]:
    """Returns the class or function at a dotted path; ConfigError if it cannot be imported."""
    module_name, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except Exception as fault:  # a stranger's module may raise anything
        raise ConfigError(
            f"cannot import {path} ({type(fault).__name__}: {fault}); pass the dotted path of a "
            "class or a function, such as heron.losses.NtXent, with its folder on PYTHONPATH"
        ) from None
    if not callable(found):
        raise ConfigError(f"{path} must be a class or a function, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def guess_form(path: str) -> Form:
    """Returns what a loss is called with, by its class or its arguments' names, or ConfigError."""
    found = find_loss(path)
    if inspect.isclass(found) and issubclass(found, Loss):
        return "heron"
    forward: Any = (
        found.forward if inspect.isclass(found) and issubclass(found, nn.Module) else found
    )
    try:
        arguments = inspect.signature(forward).parameters.items()
    except ValueError:  # written in C
        arguments = {}.items()
    names = [n for n, p in arguments if n != "self" and p.default is p.empty]
    text = " ".join(names).lower()
    if "scale" in text:
        return "siglip" if "bias" in text else "clip"
    if "label" in text or "target" in text:
        return "logits" if "logit" in text else "rows" if "embedding" in text else "labelled"
    if len(names) == 2:
        return "pair"
    forms = "; ".join(f"{name}: {FORMS[name]}" for name in get_args(Form) if name != "heron")
    raise ConfigError(
        f"{path} takes {', '.join(names) or 'nothing'}; say how by --inputs ({forms})"
    )


def build(spec: LossSpec, dtype: torch.dtype) -> Callable[..., Any]:
    """Returns a new loss, the same each time, with parameters of the features' type."""
    torch.manual_seed(0)
    found: Any = find_loss(spec.path)
    loss: Any
    places = {"$RANK": collectives.rank(), "$WORLD": collectives.world_size()}
    options: dict[str, Any] = {
        name: places.get(value, value) if isinstance(value, str) else value
        for name, value in spec.options.items()
    }
    if inspect.isclass(found):
        loss = found(*_arguments(found), **options) if issubclass(found, Loss) else found(**options)
    elif all(p.default is not p.empty for p in inspect.signature(found).parameters.values()):
        loss = found(**options)  # a function that builds a loss
    else:
        loss = partial(found, **options)
    if isinstance(loss, nn.Module):
        half = dtype in (torch.float16, torch.bfloat16)
        loss.to(torch.float32 if half and isinstance(loss, Loss) else dtype)
    return loss  # type: ignore[no-any-return]


def _arguments(kind: type[Loss]) -> list[Any]:
    """Returns the sizes that a loss of Heron is built with."""
    wrong = one_hot(torch.arange(12) % CLASSES, CLASSES)
    sizes: dict[str, list[Any]] = {
        "C2ae": [2 * DIM, CLASSES],
        "Comco": [DIM, CLASSES],
        "Deepmtmv": [DIM, CLASSES, 2],
        "Infograph": [DIM],
        "Mib": [DIM],
        "Mulco": [DIM, CLASSES],
        "Pico": [DIM, wrong],
        "Plnl": [wrong],
        "SingleViewUnsupervised": [DIM, [DIM]],
        "WeightedUnsupervised": [DIM],
    }
    return sizes.get(kind.__name__, [])


def call(loss: Any, spec: LossSpec, inputs: Inputs) -> Tensor:
    """Calls a loss with rows, in its form."""
    if spec.inputs == "heron":
        return _call_heron(loss, inputs)
    (z1, z2, logits), classes = inputs.features, inputs.classes
    one, (u1, u2) = z1.new_ones(()), (normalize(z, dim=1) for z in (z1, z2))
    arguments: dict[str, tuple[Any, ...]] = {
        "views": ([z1, z2],),
        "pair": (z1, z2),
        "clip": (u1, u2, 10 * one),
        "siglip": (u1, u2, 10 * one, -one),
        "stacked": (torch.stack([u1, u2], 1), classes),
        "rows": (torch.cat([z1, z2]), classes.repeat(2)),
        "labelled": (z1, classes),
        "logits": (logits, classes),
    }
    value: Tensor = loss(*arguments[spec.inputs])
    return value


def _call_heron(loss: Any, inputs: Inputs) -> Tensor:
    (z1, z2, logits), classes = inputs.features, inputs.classes
    views, columns = [z1, z2], one_hot(classes, CLASSES)
    indices = inputs.first + torch.arange(len(z1))
    name, value = type(loss).__name__, None
    if name in ("Mulco", "Comco", "Pico"):
        last = indices if name == "Pico" else columns
        when: dict[str, Any] = {} if name == "Mulco" else {"epoch": 2.0}
        with torch.no_grad():  # fills the queue
            loss(z1, z2, logits, last, **when)
        value = loss(z1, z2, logits, last, **when)
    elif name == "Fixmatch":
        value = loss(4 * logits, [logits - 1])
    elif name == "Plnl":
        value = loss([logits, logits * 2], [logits - 1, logits], indices, epoch=0.0)
    elif name == "Mib":
        value = loss(views, epoch=0.5, rng_keys=indices)
    elif name == "Infograph":
        value = loss(torch.stack(views, 1), torch.ones(len(z1), 2, dtype=torch.bool))
    elif name == "Hierarchical":
        value = loss(views, torch.stack([classes // 2, classes], 1))
    elif name == "Hard" and not loss.supervised:
        value = loss(views)
    elif name in ("C2ae", "Deepmtmv", "Hard", "WeightedSupervised"):
        value = loss(views, columns)
    elif isinstance(loss, InputLoss):
        value = loss(views, [z1.detach(), z2.detach()])
    elif isinstance(loss, ProjectionLoss):
        value = loss(views)
    elif isinstance(loss, LabelledLoss):
        value = loss(views, classes)
    elif isinstance(loss, LogitLoss):
        value = loss(logits, columns)
    else:
        raise ConfigError(f"{name} has its own forward; pass a function that builds a loss")
    assert isinstance(value, Tensor)
    return value
