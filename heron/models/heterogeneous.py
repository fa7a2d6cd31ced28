"""The model: an encoder and a projector per view, a classifier, and the parts that terms add."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from heron.base.errors import ConfigError
from heron.distributed.sync_batchnorm import call_by_stream
from heron.models.encoders import build_encoder, mlp
from heron.models.options import ModelConfig, Precision

# The model's outputs by name: a tensor [rows, ...] per view, or one of all views.
Features = dict[str, list[Tensor]]
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # types of the precisions of a half
GRAPHS = 64  # compiled for one encoder at most: by shape, view, and with or without gradient


@dataclass(frozen=True)
class ModelSpec:
    """The model that the parts of a term are built for.

    Attributes:
        config: widths and kinds.
        shapes: of one sample of each view, as the model sees it.
        labels: width of the classifier's output.
        widths: of the hidden features of each view.
        classified: the number of views, from the first on, that the classifier sees.
        batch: rows of a global batch; 0: unknown.
    """

    config: ModelConfig
    shapes: Sequence[Sequence[int]]
    labels: int
    widths: Sequence[int]
    classified: int
    batch: int = 0

    @property
    def classified_width(self) -> int:
        """The width of the features that the classifier sees."""
        return sum(self.widths[: self.classified])


class Needed(Protocol):
    """What a term reads: see `heron.losses.terms.Needs`."""

    @property
    def features(self) -> frozenset[str]:
        """The names of all features that it reads."""


class ModelTerm(Protocol):
    """A term of the objective, as the model sees it: see `heron.losses.Loss`."""

    @property
    def needs(self) -> Needed:
        """What it reads."""

    def build_parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Returns functions, by name, that build the modules that the term adds."""

    def build_classifier(self, spec: ModelSpec) -> nn.Module | None:
        """Returns a module that replaces the linear classifier, or None."""


@dataclass(frozen=True)
class Encoded:
    """An encoded batch, the input of the parts of terms; see `Heterogeneous.embed`.

    Attributes:
        inputs: a tensor a view, [rows, ...].
        rng_keys: of the rows' random numbers, [rows].
        view_keys: of each view's random numbers; they differ where views share an encoder.
        sizes: rows of each stream, in order.
        hidden: features of each view, [rows, its width].
        classified: the features that the classifier sees, concatenated.
        projections: z of each view, or none.
        targets: the rows' labels as 0/1, for parts that learn from them; None in evaluation.
        nodes: features of the nodes of graphs, a tensor a view [rows, nodes, width], 0 where there
            is no node; empty unless the part of a term has `reads_nodes = True`.
        present: which views each row has, [rows, views]; None: all of them.
    """

    inputs: Sequence[Tensor]
    rng_keys: Tensor
    view_keys: Sequence[Tensor]
    sizes: Sequence[int]
    hidden: Sequence[Tensor]
    classified: Tensor
    projections: Sequence[Tensor]
    logits: Tensor | None
    classifier: nn.Module | None
    targets: Tensor | None
    nodes: Sequence[Tensor] = ()
    present: Tensor | None = None


@runtime_checkable
class FeaturePart(Protocol):
    """A term's module that adds features."""

    def add_features(self, encoded: Encoded) -> Features:
        """Returns features by name, which replace others of the same name."""


class Heterogeneous(nn.Module):
    """A network with one branch per view: views in, features out.

    Parts are always built in the same order (encoders, classifier, projectors, the terms' own), so
    that methods with the same seed have the same initial weights in the parts that they share. A
    part is built only where a term needs it: DDP refuses a parameter without a gradient.

    Attributes:
        classified: the number of views, from the first on, that the classifier sees; evaluation
            needs no others.
        widths: of the hidden features of each view.
        classified_width: of the concatenated features that the classifier sees.
        projection_width: of z and H(z).
        precision: "bf16" and "fp16" compute in half precision by autocast; parameters and features
            are float32. "fp64" computes in float64, which `double()` has made of the parameters.
        compiled: whether the encoders are compiled in training.
    """

    precision: Precision = "fp32"
    compiled = False

    def __init__(
        self,
        config: ModelConfig,
        shapes: Sequence[Sequence[int]],
        labels: int,
        terms: Mapping[str, ModelTerm],
        names: Sequence[str] = (),
        batch: int = 0,
    ) -> None:
        """Builds the parts that compute what the losses of `terms` read.

        `shapes` are of one sample of each view, as the model sees it; `labels` is the width of the
        classifier's output. `model.encoders` may give a view an encoder of its own by its name in
        `names`. `batch`, the rows of a global batch, is 0 where unknown, as where weights are
        loaded. Raises ConfigError if views, encoders and terms do not fit each other.
        """
        super().__init__()
        self.views = len(shapes)
        self.classified = 1 if config.classify_on == "first_view" else self.views
        self._refuse_misfits(config, shapes, terms)
        number = 1 if config.shared_encoder else self.views
        built = []
        for view, shape in enumerate(shapes[:number]):
            key, options = config.encoder_of(names[view] if names else "")
            built.append(build_encoder(options, shape, salt=100 * (view + 1), key=key))
        self.encoders = nn.ModuleList(encoder for encoder, _ in built)
        self.widths = [built[view % number][1] for view in range(self.views)]
        if config.shared_projector and len(set(self.widths)) > 1:
            raise ConfigError(
                f"model.shared_projector needs features of one width, got {self.widths} from the "
                "encoders of the views; set it to false"
            )
        self.projection_width = config.projection_width
        needed = set().union(*(term.needs.features for term in terms.values()))
        spec = ModelSpec(config, shapes, labels, self.widths, self.classified, batch)
        self.classified_width = spec.classified_width

        classifiers = {name: term.build_classifier(spec) for name, term in terms.items()}
        owners = [name for name, classifier in classifiers.items() if classifier is not None]
        if len(owners) > 1:
            raise ConfigError(
                f"objective.{' and objective.'.join(owners)} each bring their own classifier, and "
                "a model has one; set the weight of the others to 0"
            )
        self.classifier = classifiers[owners[0]] if owners else None
        if self.classifier is None and "logits" in needed:
            self.classifier = nn.Linear(self.classified_width, labels)
        projected = self.widths if "projections" in needed else []
        self.projectors = nn.ModuleList(
            nn.Sequential(*head(config, width))
            for width in projected[: 1 if config.shared_projector else self.views]
        )
        self._build_parts(spec, terms)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _refuse_misfits(
        self, config: ModelConfig, shapes: Sequence[Sequence[int]], terms: Mapping[str, ModelTerm]
    ) -> None:
        raw_features = {"inputs", "input_projections"}
        for name, term in terms.items():
            coded = [shape for shape in shapes if len(shape) in (2, 4)]
            if coded and raw_features & term.needs.features:
                is_graph = len(coded[0]) == 4
                kind, codes = ("graphs", "nodes") if is_graph else ("text", "tokens")
                raise ConfigError(
                    f"objective.{name} compares the inputs themselves, but a view has {kind}, "
                    f"where the numbers of {codes} cannot be compared; use another term, or views "
                    "of numbers and pictures"
                )
        if self.classified < self.views and not config.shared_encoder:
            raise ConfigError(
                f"model.classify_on is 'first_view', but each of {self.views} views has its own "
                "encoder, and evaluation would use only the first; set model.shared_encoder to "
                "true"
            )
        if config.shared_encoder and any(tuple(s) != tuple(shapes[0]) for s in shapes):
            raise ConfigError(
                f"model.shared_encoder needs views of one shape, got {[tuple(s) for s in shapes]}; "
                "set it to false"
            )

    def _build_parts(self, spec: ModelSpec, terms: Mapping[str, ModelTerm]) -> None:
        """Builds the parts of terms in an order that is independent of the configuration's."""
        builders: dict[str, Callable[[], nn.Module]] = {}
        for term_name, term in terms.items():
            parts = term.build_parts(spec)
            if taken := sorted(name for name in parts if hasattr(self, name)):
                raise ConfigError(
                    f"objective.{term_name} adds a part '{taken[0]}', a name that every model "
                    "already has; rename it"
                )
            builders = parts | builders
        names = sorted(builders, reverse=True)
        for name in names:
            self.add_module(name, builders[name]())
        names.append("classifier")
        self._reads_nodes = any(hasattr(getattr(self, name), "reads_nodes") for name in names)
        self._parts = [name for name in names if isinstance(getattr(self, name), FeaturePart)]

    def leave_out_parts(self, unneeded: Callable[[], bool]) -> None:
        """Disables, one by one, the parts of terms without which `unneeded()` is still true."""
        for name in list(self._parts):
            previous, self._parts = self._parts, [other for other in self._parts if other != name]
            if not unneeded():
                self._parts = previous

    def compile_encoders(self, backend: str) -> None:
        """Compiles each encoder in place, which keeps the names of parameters.

        Graphs have static shapes, so that a resumed run computes as one that was not interrupted.
        """
        from torch._dynamo import config  # imported here, since it takes seconds

        config.recompile_limit = max(config.recompile_limit, GRAPHS)
        for encoder in self.encoders:
            encoder.compile(backend=backend, dynamic=False)
        self.compiled = True

    def branch(self, view: int) -> tuple[nn.Module, nn.Module]:
        """Returns the encoder and the projector of a view."""
        projector = self.projectors[view % len(self.projectors)]
        return self.encoders[view % len(self.encoders)], projector

    def forward(
        self,
        inputs: Sequence[Tensor],
        rng_keys: Tensor,
        sizes: Sequence[int],
        targets: Tensor | None = None,
        present: Tensor | None = None,
    ) -> Features:
        """Runs `embed` in `precision`."""
        if self.precision == "fp64":
            inputs = [x.double() if x.is_floating_point() else x for x in inputs]
            targets = None if targets is None else targets.double()
        eager = self.compiled and not self.training and not torch.compiler.is_compiling()
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            if self.precision not in AUTOCAST:
                return self.embed(inputs, rng_keys, sizes, targets, present)
            half = AUTOCAST[self.precision]
            with torch.autocast(inputs[0].device.type, half, cache_enabled=False):
                features = self.embed(inputs, rng_keys, sizes, targets, present)
                return {name: [x.float() for x in xs] for name, xs in features.items()}

    def embed(
        self,
        inputs: Sequence[Tensor],
        rng_keys: Tensor,
        sizes: Sequence[int],
        targets: Tensor | None = None,
        present: Tensor | None = None,
    ) -> Features:
        r"""Encodes one tensor a view.

        Encoders, projectors and their batch norms see only the views that a row has. The features
        of a missing view are zeros, and the row's hidden features are scaled so that a linear map
        of S is, over the row's views P(i) of V,

        .. math:: W s_i = \frac{V}{|P(i)|} \sum_{v \in P(i)} W_v s_{iv}

        For the arguments see `Encoded`; the first `classified` views suffice.

        Returns:
            `hidden`: S, the views' concatenated features, [rows, all widths]; `logits` of the
            classifier on S or on the first view's share of it; `projections`: z, a tensor a view;
            and the features of the terms' parts. Features that no term needs are left out.
        """
        encoders = [self.encoders[view % len(self.encoders)] for view in range(len(inputs))]
        # Views that share an encoder have dropout masks of their own.
        view_keys = [
            rng_keys + (view if len(self.encoders) == 1 else 0) for view in range(len(inputs))
        ]
        arguments = [*zip(inputs, view_keys, strict=True)]
        nodes: list[Tensor] = []
        if self._reads_nodes:
            nodes = call_by_stream([*map(node_features, encoders)], sizes, arguments, present)
            hidden = [x.sum(1) for x in nodes]
        else:
            hidden = call_by_stream(encoders, sizes, arguments, present)
        projections: list[Tensor] = []
        if len(self.projectors):
            projectors = [
                self.projectors[view % len(self.projectors)] for view in range(len(hidden))
            ]
            projections = call_by_stream(projectors, sizes, [(h,) for h in hidden], present)
        if present is not None:
            count = present[:, : self.classified].sum(1, keepdim=True).clamp(min=1)
            hidden = [h * (min(self.classified, len(inputs)) / count) for h in hidden]
        classified = torch.cat(hidden[: self.classified], 1)
        features: Features = {"hidden": [torch.cat(hidden, 1)]}
        logits = None
        if self.classifier is not None:
            logits = self.classifier(classified)
            features["logits"] = [logits]
        if projections:
            features["projections"] = projections
        encoded = Encoded(
            inputs, rng_keys, view_keys, sizes, hidden, classified, projections, logits,
            self.classifier, targets, nodes, present,
        )  # fmt: skip
        for name in self._parts:
            added = getattr(self, name).add_features(encoded)
            if invalid := [key for key, tensors in added.items() if not isinstance(tensors, list)]:
                raise ConfigError(
                    f"model part '{name}' must return {invalid[0]} as a list with one tensor per "
                    f"view, got {type(added[invalid[0]]).__name__}"
                )
            features |= added
        return features


def node_features(encoder: nn.Module) -> Callable[..., Tensor]:
    """Returns the method `nodes` of a graph encoder; ConfigError where an encoder has none."""
    nodes: Callable[..., Tensor] | None = getattr(encoder, "nodes", None)
    if nodes is None:
        raise ConfigError(
            f"a term compares nodes of graphs, but {type(encoder).__name__} has no method "
            "nodes(x, rng_keys) that returns [rows, nodes, width]; use model.encoder.kind: gin"
        )
    return nodes


def head(config: ModelConfig, width: int) -> list[nn.Module]:
    """Returns the layers from hidden features of a width to a projection z.

    One Linear-ReLU-BatchNorm layer as in HeroCon's networks, or the two-layer head of SimCLR
    (Chen et al. 2020) and MoCo v2, without batch norm.
    """
    if config.projector == "mlp":
        return [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, config.projection_width)]
    return mlp(width, [config.projection_width], dropout=0, salt=0)
