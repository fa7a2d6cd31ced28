"""The model of HeroCon: an encoder and a projector a view, a weight net, a classifier."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.experiment import Precision
from heron.pipeline.config.model import Model
from heron.pipeline.models.bottleneck import Bottleneck
from heron.pipeline.models.encoders import build_encoder, mlp
from heron.pipeline.models.label_autoencoder import LabelAutoencoder
from heron.pipeline.models.task_groups import TaskGroups

SECOND = 5000  # salt of the dropout of PLNL's second encoder


class Features(NamedTuple):
    """What the model makes of a batch; a part that no term asks for is not there.

    Attributes:
        hidden: S, the views' hidden features side by side, [batch, views * hidden width].
        logits: of the classifier on S, or on the first view's part of it, [batch, labels]; of PLNL
            the mean of both networks'.
        projections: z, a tensor [batch, projection width] a view, or none.
        weights: H(z), as the projections, or none.
        input_projections: of the raw inputs, as the projections, or none.
        codes: of C2AE, see `LabelAutoencoder.codes`, or none.
        means: of MIB's p(z|v), a tensor a view, or none; see `Bottleneck`.
        deviations: as the means.
        critics: c(z), as the means.
        networks: logits of each view by PLNL's first network, then by its second, or none.
    """

    hidden: Tensor
    logits: Tensor | None
    projections: Sequence[Tensor]
    weights: Sequence[Tensor]
    input_projections: Sequence[Tensor] = ()
    codes: Sequence[Tensor] = ()
    means: Sequence[Tensor] = ()
    deviations: Sequence[Tensor] = ()
    critics: Sequence[Tensor] = ()
    networks: Sequence[Tensor] = ()

    def each(self, change: Callable[[Tensor], Tensor]) -> "Features":
        """The features with every tensor changed, in order; what is not there stays so."""
        hidden, logits, *lists = self
        return Features(
            change(hidden),
            None if logits is None else change(logits),
            *([change(tensor) for tensor in part] for part in lists),
        )


class Heterogeneous(nn.Module):
    """Views in, features out.

    Parts are built in one order (encoders, classifier, projectors, weight net, what single terms
    need), so that methods that share a seed share the initial weights of the parts they share. A
    part is built only where a term needs it: a parameter without a gradient would be refused by
    DDP.

    Attributes:
        classified: how many views, from the first on, the classifier sees; evaluation needs and
            makes no others.
        width: of the hidden features of one view.
        projection_width: of z and H(z).
        precision: "bf16" computes in bfloat16 by autocast; parameters and features are float32.
            "fp64" computes in float64, which `double()` has made of the parameters.
    """

    precision: Precision = "fp32"

    def __init__(
        self,
        config: Model,
        shapes: Sequence[Sequence[int]],
        labels: int,
        *,
        classify: bool,
        project: bool,
        weigh: bool,
        project_inputs: bool = False,
        encode_labels: bool = False,
        narrow: bool = False,
        pair: bool = False,
    ) -> None:
        """Build the parts.

        Args:
            config: widths and kinds.
            shapes: of one sample of each view, as the model sees it.
            labels: width of the classifier's output.
            classify: build the classifier.
            project: build the projectors.
            weigh: build the weight net H.
            project_inputs: build a linear map of a view's input to the width of z; views that
                share encoder and projector share it.
            encode_labels: the classifier is C2AE's label autoencoder.
            narrow: build MIB's bottlenecks, on the projections.
            pair: build PLNL's second network; a prediction is then the mean of both networks'.
        """
        super().__init__()
        self.views = len(shapes)
        self.classified = 1 if config.classify_on == "first_view" else self.views
        if self.classified < self.views and not config.shared_encoder:
            raise ConfigError(
                f"model.classify_on is 'first_view', but each of {self.views} views has an encoder "
                "of its own, of which evaluation would see the first; set model.shared_encoder "
                "to true"
            )
        number = 1 if config.shared_encoder else self.views
        if config.shared_encoder and any(tuple(s) != tuple(shapes[0]) for s in shapes):
            raise ConfigError(
                f"model.shared_encoder needs views of one shape; found "
                f"{[tuple(s) for s in shapes]}; set it to false"
            )
        built = [
            build_encoder(config.encoder, shape, salt=100 * (view + 1))
            for view, shape in enumerate(shapes[:number])
        ]
        self.encoders = nn.ModuleList(encoder for encoder, _ in built)
        self.width = width = built[0][1]
        self.projection_width = config.projection_width
        seen = width * self.classified
        self.classifier: nn.Linear | LabelAutoencoder | TaskGroups | None = None
        if encode_labels:
            self.classifier = LabelAutoencoder(config.label_autoencoder, seen, labels)
        elif classify and config.task_groups is not None:
            self.classifier = TaskGroups(config.task_groups, width, self.classified, labels)
        elif classify:
            self.classifier = nn.Linear(seen, labels)
        projectors = (1 if config.shared_projector else self.views) if project else 0
        self.projectors = nn.ModuleList(
            nn.Sequential(*head(config, width)) for _ in range(projectors)
        )
        self.weight = (
            nn.Sequential(nn.Linear(config.projection_width, config.projection_width), nn.Sigmoid())
            if weigh
            else None
        )
        self.bottlenecks = nn.ModuleList(
            Bottleneck(config.projection_width, view) for view in range(self.views if narrow else 0)
        )
        # PLNL's second network: an encoder and a classifier of its own, for the same views.
        self.second = nn.ModuleList()
        if pair:
            other, _ = build_encoder(config.encoder, shapes[0], salt=SECOND)
            self.second.extend([other, nn.Linear(seen, labels)])
        alike = config.shared_encoder and config.shared_projector
        self.input_projectors = nn.ModuleList(
            nn.Linear(math.prod(shape), config.projection_width, bias=False)
            for shape in (shapes[: 1 if alike else None] if project_inputs else [])
        )
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def branch(self, view: int) -> tuple[nn.Module, nn.Module]:
        """The encoder and the projector of a view."""
        projector = self.projectors[view % len(self.projectors)]
        return self.encoders[view % len(self.encoders)], projector

    def forward(
        self,
        inputs: Sequence[Tensor],
        keys: Tensor,
        parts: Sequence[int],
        targets: Tensor | None = None,
    ) -> Features:
        """Encode one tensor a view; see `embed`, which this runs in `precision`."""
        if self.precision == "fp64":
            inputs = [x.double() for x in inputs]
            targets = None if targets is None else targets.double()
        if self.precision != "bf16":
            return self.embed(inputs, keys, parts, targets)
        with torch.autocast(inputs[0].device.type, torch.bfloat16, cache_enabled=False):
            return self.embed(inputs, keys, parts, targets).each(Tensor.float)

    def embed(
        self,
        inputs: Sequence[Tensor],
        keys: Tensor,
        parts: Sequence[int],
        targets: Tensor | None = None,
    ) -> Features:
        """Encode one tensor a view.

        Batch norm sees one part at a time: labelled and unlabelled rows are drawn differently and
        are each normalised by their own statistics, as in HeroCon's code (on Scene, statistics of
        both together cost more than ten points of F1).

        Args:
            inputs: one tensor [rows, ...] a view; the first `classified` views alone will do.
            keys: of the rows' random numbers, [rows].
            parts: how many rows each part has, in order.
            targets: the rows' labels as 0/1, which only a label autoencoder sees; None in
                evaluation.
        """
        hidden, projections, of_inputs, narrowed, seconds = [], [], [], [], []
        for view, x in enumerate(inputs):
            encoder = self.encoders[view % len(self.encoders)]
            drawn = keys + view if len(self.encoders) == 1 else keys  # masks of each view's own
            cut = [torch.split(rows, list(parts)) for rows in (x, drawn)]
            pieces = [*map(encoder, *cut)]
            hidden.append(torch.cat(pieces))
            if len(self.second):
                seconds.append(torch.cat([*map(self.second[0], *cut)]))
            if len(self.projectors):
                projector = self.projectors[view % len(self.projectors)]
                projections.append(torch.cat([projector(piece) for piece in pieces]))
            if len(self.input_projectors):
                projector = self.input_projectors[view % len(self.input_projectors)]
                of_inputs.append(projector(x.flatten(1)))
            if len(self.bottlenecks):
                narrowed.append(self.bottlenecks[view](projections[view], keys))
        means, deviations, critics = zip(*narrowed, strict=True) if narrowed else ((), (), ())
        seen = torch.cat(hidden[: self.classified], 1)
        logits, networks = None, []
        if self.classifier is not None and seconds:
            networks = [*map(self.classifier, hidden), *map(self.second[1], seconds)]
            logits = (networks[0] + networks[len(hidden)]) / 2
        elif self.classifier is not None:
            logits = self.classifier(seen)
        return Features(
            hidden=torch.cat(hidden, 1),
            logits=logits,
            projections=projections,
            weights=[] if self.weight is None else [self.weight(z) for z in projections],
            input_projections=of_inputs,
            codes=self.classifier.codes(seen, targets)
            if isinstance(self.classifier, LabelAutoencoder) and targets is not None
            else [],
            means=means,
            deviations=deviations,
            critics=critics,
            networks=networks,
        )


def head(config: Model, width: int) -> list[nn.Module]:
    """The layers from hidden features of a width to a projection z.

    One Linear-ReLU-BatchNorm layer as in HeroCon's networks, or the two-layer head of SimCLR
    (Chen et al. 2020) and MoCo v2, without batch norm.
    """
    if config.projector == "mlp":
        return [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, config.projection_width)]
    return mlp(width, [config.projection_width], dropout=0, salt=0)
