"""Every term of the objective by name: its function, and what it needs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.terms import CustomTerm
from heron.pipeline.objectives import classification, complementary
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.c2ae import c2ae
from heron.pipeline.objectives.comco import comco, scl_nl
from heron.pipeline.objectives.hard import debiased, hard
from heron.pipeline.objectives.hierarchical import hierarchical
from heron.pipeline.objectives.mib import mib
from heron.pipeline.objectives.mulco import mulco
from heron.pipeline.objectives.pico import pico, pseudo_target_loss
from heron.pipeline.objectives.plnl import plnl
from heron.pipeline.objectives.single_view import single_view_unsupervised
from heron.pipeline.objectives.supcon import supcon
from heron.pipeline.objectives.supervised import weighted_supervised
from heron.pipeline.objectives.unsupervised import (
    cmc,
    input_weighted_unsupervised,
    nt_xent,
    weighted_unsupervised,
)

Loss = Callable[[GlobalBatch, Mapping[str, Any], float], Tensor]


@dataclass(frozen=True)
class Definition:
    """A term: its function, and what it needs the model to build and the processes to share.

    Attributes:
        loss: (batch, options, epoch) -> the share of this process.
        classify: needs the classifier.
        share_hidden: needs S of all labelled rows.
        share_paths: needs the hierarchical labels of all labelled rows.
        project: needs projections; `weigh`: and H of them; `share_inputs`: and the raw inputs.
        project_inputs: needs projections of the own rows' raw inputs.
        encode_labels: needs C2AE's label autoencoder, which then is the classifier.
        narrow: needs MIB's bottlenecks on the projections.
        pair: needs PLNL's second network.
        views: the fewest views it is defined for.
        kinds: the kinds of labels it is defined for; none: it looks at no label.
    """

    loss: Loss
    classify: bool = False
    share_hidden: bool = False
    share_paths: bool = False
    project: bool = False
    weigh: bool = False
    share_inputs: bool = False
    project_inputs: bool = False
    encode_labels: bool = False
    narrow: bool = False
    pair: bool = False
    views: int = 1
    kinds: tuple[str, ...] = ()


def _classifier(function: Callable[..., Tensor], *kinds: str) -> Definition:
    """A loss of the logits and labels of the own labelled rows."""

    def loss(batch: GlobalBatch, options: Mapping[str, Any], _: float) -> Tensor:
        assert batch.logits is not None
        return function(batch.logits, batch.targets, total=len(batch.all_targets), **options)

    return Definition(loss, classify=True, kinds=kinds)


def _of_views(function: Callable[..., Tensor]) -> Definition:
    """A loss of the projections of all rows."""
    return Definition(
        lambda batch, options, _: function(batch.projections, rows=batch.rows, **options),
        project=True,
        views=2,
    )


def custom(term: CustomTerm) -> Definition:
    """Returns the definition of a user's own term.

    Raises:
        ConfigError: it needs something that there is not.
    """
    flags = [name for name, kind in Definition.__annotations__.items() if kind is bool]
    if unknown := sorted(set(term.needs) - set(flags)):
        raise ConfigError(
            f"{type(term).__module__}.{type(term).__name__}.needs holds {', '.join(unknown)}; "
            f"expected some of {', '.join(flags)}"
        )
    return Definition(
        lambda batch, _, epoch: term.loss(batch, epoch),
        views=term.views,
        kinds=term.kinds,
        **dict.fromkeys(term.needs, True),
    )


def _hard(batch: GlobalBatch, options: Mapping[str, Any], epoch: float) -> Tensor:
    shared = {key: options[key] for key in ("tau", "hardening", "beta", "positives", "detach")}
    # tau_h = e^(l / tau), l going linearly from start to end (H-SCL, Eq. 4)
    start, end = options["threshold_start"], options["threshold_end"]
    least = start + min(epoch / options["threshold_epochs"], 1.0) * (end - start)
    shared["threshold"] = math.exp(least / options["tau"])
    if not options["supervised"]:
        return hard(batch.projections, rows=batch.rows, **shared)
    return hard(batch.labelled_projections, batch.classes, rows=batch.labelled, **shared)


def _mulco(batch: GlobalBatch, options: Mapping[str, Any], _: float) -> Tensor:
    assert batch.contrasts is not None and batch.logits is not None
    return mulco(
        batch.labelled_projections[0][batch.labelled],
        batch.contrasts.keys,
        batch.contrasts.queue,
        batch.logits.softmax(1),
        batch.contrasts.queue_posteriors,
        batch.targets,
        total=len(batch.all_targets),
        **{key: options[key] for key in ("tau", "kind", "tau_plus")},
    )


def _c2ae(batch: GlobalBatch, options: Mapping[str, Any], _: float) -> Tensor:
    x, e, decoded = batch.codes
    return c2ae(x, e, decoded, batch.all_targets, rows=batch.labelled, **options)


def _mib(batch: GlobalBatch, options: Mapping[str, Any], epoch: float) -> Tensor:
    # Beta grows exponentially, as in the paper's experiments.
    start, end = options["beta_start"], options["beta"]
    beta = start * (end / start) ** min(epoch / options["beta_epochs"], 1.0)
    return mib(batch.critics, batch.means, batch.deviations, beta=beta, rows=batch.rows)


def _pico(batch: GlobalBatch, options: Mapping[str, Any], epoch: float) -> Tensor:
    contrasts, total = batch.contrasts, len(batch.all_targets)
    assert contrasts is not None and contrasts.pseudo is not None and batch.logits is not None
    assert contrasts.pseudo.targets is not None
    q, tau = batch.labelled_projections[0], options["tau"]
    queue, of_queue = contrasts.queue, contrasts.queue_posteriors
    if epoch < options["warmup_epochs"]:  # MoCo: a sample's own key alone is positive
        own = q[batch.labelled], contrasts.keys, queue, contrasts.posteriors, of_queue
        contrast = mulco(*own, batch.targets, tau=tau, kind="standard", total=total)
    else:
        pseudo = contrasts.pseudo
        seen = q, pseudo.keys, queue, pseudo.classes, of_queue.argmax(1)
        contrast = pico(*seen, tau=tau, rows=batch.labelled)
    classified = pseudo_target_loss(batch.logits, contrasts.pseudo.targets, total=total)
    weight: float = options["contrast"]
    return classified + weight * contrast


def _comco(batch: GlobalBatch, options: Mapping[str, Any], epoch: float) -> Tensor:
    contrasts, ybar = batch.contrasts, batch.all_targets
    assert contrasts is not None and contrasts.pseudo is not None and batch.logits is not None
    of_queue, queue_ybar = contrasts.queue_posteriors.chunk(2, 1)
    contrast = comco(
        batch.labelled_projections[0],
        contrasts.pseudo.keys,
        contrasts.queue,
        contrasts.pseudo.classes,
        of_queue.argmax(1),
        ybar,
        queue_ybar,
        tau=options["tau"],
        neighbours=options["neighbours"] if epoch >= options["neighbour_epochs"] else 0,
        select=epoch >= options["warmup_epochs"],
        rows=batch.labelled,
    )
    weight: float = options["contrast"]
    return scl_nl(batch.logits, batch.targets, total=len(ybar)) + weight * contrast


def _plnl(batch: GlobalBatch, options: Mapping[str, Any], epoch: float) -> Tensor:
    selected, since = batch.selected, epoch - options["pretrain_epochs"]
    assert selected is not None
    views = len(batch.networks) // len(selected.sets)
    losses = [
        plnl(
            batch.networks[n * views : (n + 1) * views],
            selected.sets[n],
            selected.guesses[n],
            total=len(batch.all_targets),
            guessed=int(selected.guessed[n]),
            consistency=min(max(since / options["consistency_epochs"], 0.0), 1.0),
        )
        for n in range(len(selected.sets))
    ]
    return torch.stack(losses).sum()


# Parts of a model, as terms need them.
PARTS = ("classify", "project", "weigh", "project_inputs", "encode_labels", "narrow", "pair")
KNOWN = ("multi_label", "multi_class", "hierarchical")  # labels that say what a row is
ONE = ("multi_class", "hierarchical")  # one class a row
WRONG = ("complementary",)  # labels that say what a row is not
TERMS = {
    "bce": _classifier(classification.bce, *KNOWN),
    "cross_entropy": _classifier(classification.cross_entropy, *ONE),
    "nt_xent": _of_views(nt_xent),
    "cmc": _of_views(cmc),
    "weighted_unsupervised": Definition(
        lambda batch, options, _: weighted_unsupervised(
            batch.projections, batch.weights, rows=batch.rows, **options
        ),
        project=True,
        weigh=True,
        views=2,
    ),
    "input_weighted_unsupervised": Definition(
        lambda batch, options, _: input_weighted_unsupervised(
            batch.projections, batch.inputs, rows=batch.rows, **options
        ),
        project=True,
        share_inputs=True,
        views=2,
    ),
    "single_view_unsupervised": Definition(
        lambda batch, options, _: single_view_unsupervised(
            batch.input_projections,
            batch.projections,
            batch.weights,
            rows=batch.rows,
            **options,
        ),
        project=True,
        weigh=True,
        project_inputs=True,
    ),
    "weighted_supervised": Definition(
        lambda batch, options, _: weighted_supervised(
            batch.hidden, batch.all_targets, rows=batch.labelled, **options
        ),
        share_hidden=True,
        kinds=KNOWN,
    ),
    "supcon": Definition(
        lambda batch, options, _: supcon(
            batch.labelled_projections, batch.classes, rows=batch.labelled, **options
        ),
        project=True,
        kinds=KNOWN,
    ),
    "hard": Definition(_hard, project=True, views=2),
    "debiased": _of_views(debiased),
    "mulco": Definition(_mulco, classify=True, project=True, views=2, kinds=WRONG),
    "pico": Definition(_pico, classify=True, project=True, views=2, kinds=WRONG),
    "comco": Definition(_comco, classify=True, project=True, views=2, kinds=WRONG),
    "plnl": Definition(_plnl, classify=True, pair=True, views=2, kinds=WRONG),
    "hierarchical": Definition(
        lambda batch, options, _: hierarchical(
            batch.labelled_projections, batch.paths, rows=batch.labelled, **options
        ),
        share_paths=True,
        project=True,
        kinds=("hierarchical",),
    ),
    "mib": Definition(_mib, project=True, narrow=True, views=2),
    "c2ae": Definition(_c2ae, classify=True, encode_labels=True, kinds=KNOWN),
    "ub_log": _classifier(complementary.ub_log, *WRONG),
    "ub_exp": _classifier(complementary.ub_exp, *WRONG),
    "mse": _classifier(complementary.mse, *WRONG),
    "gce": _classifier(complementary.gce, *WRONG),
    "l_uw": _classifier(complementary.l_uw, *WRONG),
    "mlcl": _classifier(complementary.mlcl, *WRONG),
}
