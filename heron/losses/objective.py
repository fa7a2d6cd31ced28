"""The weighted sum of terms that a step minimises."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heron.base.errors import ConfigError, TrainingError
from heron.data.options import ModelView
from heron.losses.batch import GlobalBatch
from heron.losses.exchange import ShardSizes, exchange
from heron.losses.loss import Loss
from heron.losses.named_terms import Terms, named_terms
from heron.losses.products import recording
from heron.losses.run import Memory, RunSpec, StepEnd, TermSetting
from heron.losses.terms import Needs
from heron.models.heterogeneous import Features
from heron.models.options import ModelConfig

if TYPE_CHECKING:  # losses used outside the trainer do not load the data pipeline
    from heron.data.batches import Batch

COMMON = "hidden", "inputs", "logits", "paths", "projections"  # features without a part


class Objective:
    """``sum_t weight_t(epoch) loss_t(batch)``.

    Attributes:
        terms: the losses of weight above 0, by name.
        sections: their weights and options, by name.
        matryoshka: widths of projections, see `heron.losses.Matryoshka`; empty: compared whole.
        needs: the union of the terms' needs.
        paths: how each term has compared its pairs so far, see `products.describe_path`.
    """

    def __init__(self, terms: Terms, matryoshka: Sequence[int] = ()) -> None:
        """Builds the losses; `matryoshka` is `models.options.ModelConfig.matryoshka`."""
        self.sections, self.matryoshka = terms.terms(), tuple(matryoshka)
        self.terms = build_losses(terms)
        self.paths: dict[str, set[str]] = {name: set() for name in self.terms}
        for loss in self.terms.values():
            loss.set_widths(self.matryoshka)
        # Bound once: a term that is compared whole has no mean over widths to take.
        self._shares = {
            name: loss.nested_share if loss.truncated_features else loss.share
            for name, loss in self.terms.items()
        }
        ramps = any(section.ramp_epochs for section in self.sections.values())
        self._weights = {} if ramps else self.weights(0.0)
        union: dict[str, Any] = {}
        for scope in ("gathered", "labelled", "own", "vectors", "labelled_vectors"):
            by_term = (getattr(loss.needs, scope) for loss in self.terms.values())
            union[scope] = tuple(dict.fromkeys(itertools.chain(*by_term)))
        self.needs = Needs(**union)

    @property
    def memories(self) -> dict[str, Memory]:
        """The memories of the terms that have one, by the term's name: see `build_memories`."""
        return {name: loss.memory for name, loss in self.terms.items() if loss.memory is not None}

    @property
    def supervised(self) -> bool:
        """Whether every term needs labels, so that unlabelled rows train nothing."""
        return all(term.needs.labels for term in self.terms.values())

    def refuse_unfit(
        self, kind: str, views: Sequence[ModelView], labelled: int, model: ModelConfig
    ) -> None:
        """Raises ConfigError for a term that does not fit the data.

        `kind` is that of the labels that training sees, `labelled` the labelled rows of a batch.
        """
        if labelled == 0 and self.supervised:
            raise ConfigError(
                f"objective: {', '.join(sorted(self.terms))} need labelled rows, so "
                "data.batch.labelled must be above 0, got 0: there is nothing to train on"
            )
        for name, term in self.terms.items():
            needs = term.needs
            if needs.labels and kind not in needs.labels:
                fitting = [
                    other_name
                    for other_name, other in named_terms().items()
                    if "logits" in other.loss.needs.own and kind in other.loss.needs.labels
                ]
                raise ConfigError(
                    f"objective.{name} needs labels of kind {' or '.join(needs.labels)}, but "
                    f"training sees {kind} labels, for which there are {', '.join(fitting)}"
                )
            if len(views) < needs.views:
                raise ConfigError(
                    f"objective.{name} needs at least {needs.views} views, but data.views has "
                    f"{len(views)}; add the stored view twice, each with its augmentation"
                )
            if model.matryoshka and term.truncated is None and "projections" in needs.features:
                raise ConfigError(
                    f"objective.{name} cannot use the first numbers of a projection: its "
                    "`truncated` is None; set model.matryoshka: [] with it, or use another term"
                )
            term.refuse(name, TermSetting(model, self.terms, labelled))
        projected = any("projections" in t.needs.features for t in self.terms.values())
        if model.matryoshka and not projected:
            raise ConfigError(
                f"model.matryoshka is {model.matryoshka}, but none of {', '.join(self.terms)} "
                "compares projections; use a term that does, such as nt_xent, or set it to []"
            )

    def refuse_partial_rows(self, missing: bool, unknown: bool, weighted: bool = False) -> None:
        """Raises ConfigError for a term undefined for missing views, unknown or weighed labels."""
        if weighted and not any(term.weighs_labels for term in self.terms.values()):
            raise ConfigError(
                f"data.protocol.label_weights weighs labels, but none of {', '.join(self.terms)} "
                "counts them; add weighted_supervised, bce or cross_entropy, or remove it"
            )
        for name, term in self.terms.items():
            needs = term.needs
            if missing and not term.missing_views:
                fitting = [n for n, t in named_terms().items() if t.loss.missing_views]
                raise ConfigError(
                    f"objective.{name} cannot use rows without all views, and some lack one; use "
                    f"some of {', '.join(fitting)}, or train only on whole rows: "
                    "data.protocol.partial_rows=drop"
                )
            if unknown and needs.labels and not term.unknown_labels:
                fitting = [n for n, t in named_terms().items() if t.loss.unknown_labels]
                raise ConfigError(
                    f"objective.{name} cannot use rows whose labels are only partly known, and "
                    f"some are; use some of {', '.join(fitting)}, or train only on whole rows: "
                    "data.protocol.partial_rows=drop"
                )

            if weighted and needs.labels and not term.weighs_labels:
                fitting = [n for n, t in named_terms().items() if t.loss.weighs_labels]
                raise ConfigError(
                    f"objective.{name} cannot weigh labels, as data.protocol.label_weights asks; "
                    f"use some of {', '.join(fitting)}, or leave samples out instead: "
                    "data.protocol.leave_out"
                )

    def weights(self, epoch: float) -> dict[str, float]:
        """Returns each term's weight at an epoch, which may be fractional."""
        return {name: section.weight_at(epoch) for name, section in self.sections.items()}

    def __call__(self, batch: GlobalBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes this process's share of the objective, and of every term before its weight.

        The objective's share is differentiable, those of the terms by name are detached; summed
        over the processes they are the values of the whole batch.

        Raises:
            TrainingError: a term refuses its input or returns no scalar, or no term has a loss.
        """
        weights, losses = self._weights or self.weights(batch.epoch), {}
        for name, share in self._shares.items():
            try:
                with recording(self.paths[name]):
                    loss: Any = share(batch)
            except ValueError as fault:
                raise TrainingError(f"objective.{name}: {fault}") from None
            if loss is None:
                continue
            if not isinstance(loss, Tensor) or loss.dim():
                shown = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
                raise TrainingError(
                    f"objective.{name}: its loss must be a scalar tensor, got {shown}"
                )
            losses[name] = loss
        if not losses:
            raise TrainingError(
                f"objective: {', '.join(self.terms)} gave no loss; add a term that does"
            )
        total = torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()
        return total, {name: loss.detach() for name, loss in losses.items()}

    def build_memories(self, run: RunSpec) -> None:
        """Builds the terms' memories on the model's device; TrainingError if one is no `Memory`."""
        device = next(run.model.parameters()).device
        for name, loss in self.terms.items():
            memory = loss.build_memory(run)
            if not isinstance(memory, Memory | None):
                raise TrainingError(
                    f"objective.{name}: its memory must be a Memory, got {type(memory).__name__}"
                )
            if memory is not None:
                loss.memory = memory.to(device)

    def update_memories(self, step: StepEnd) -> list[str]:
        """Updates every memory after a step; returns lines for the log."""
        return [line for memory in self.memories.values() for line in memory.update(step)]

    def memory_state(self) -> dict[str, Tensor]:
        """Returns the state of all memories, by keys `TERM/NAME`, for a checkpoint."""
        return {
            f"{term}/{name}": value
            for term, memory in self.memories.items()
            for name, value in memory.state_dict().items()
        }

    def load_memory_state(self, state: Mapping[str, Tensor]) -> None:
        """Loads what `memory_state` returned."""
        if not any("/" in key for key in state):  # written when there was one memory alone
            state = {f"{term}/{name}": x for term in self.memories for name, x in state.items()}
        for term, memory in self.memories.items():
            prefix = f"{term}/"
            own_state: dict[str, Any] = {
                key.removeprefix(prefix): value
                for key, value in state.items()
                if key.startswith(prefix)
            }
            memory.load_state_dict(own_state)


def build_losses(terms: Terms) -> dict[str, Loss]:
    """Returns a new loss for each term of weight above 0, by name."""
    return {name: section.build_loss() for name, section in terms.terms().items()}


def gather_batch(
    features: Features,
    batch: "Batch",
    inputs: Sequence[Tensor],
    sizes: ShardSizes,
    objective: Objective,
    epoch: float = 0.0,
    half: bool = False,
    labels_known: bool = False,
) -> GlobalBatch:
    """Gathers from all processes only what the terms need, in one collective.

    The features and the batch are of this process's rows, the labelled ones first; `inputs` are the
    tensors, one a view, that the features were computed from. The result is differentiable back to
    every process's features. Raises ConfigError if a term needs a feature that neither the model
    nor the batch has.

    With `half`, vectors are sent as bfloat16, to which they are rounded on one process, too. With
    `labels_known` the data have no unknown label.
    """
    needs, features = objective.needs, dict(features)
    has_float64 = any(x.dtype == torch.float64 for xs in features.values() for x in xs)
    if "inputs" in needs.features:  # a copy of pictures, whose memory is channels-last
        features["inputs"] = [x.flatten(1) for x in inputs]
    if "paths" in needs.features:
        features["paths"] = [batch.paths]
    for name, term in objective.terms.items():
        if missing := sorted(term.needs.features - features.keys()):
            expected = ", ".join(sorted({*features, *COMMON}))
            raise ConfigError(
                f"objective.{name} needs {', '.join(missing)}, which no part of the model makes; "
                f"use some of {expected}, or add a part that makes it"
            )
    # Losses of float64 logits and float32 labels would be rounded to float32.
    targets = batch.targets.double() if has_float64 else batch.targets
    weights = batch.label_weights
    vectors = {*needs.vectors, *needs.labelled_vectors} if half else ()
    return exchange(
        features,
        needs,
        sizes,
        targets,
        inputs=inputs,
        indices=batch.indices,
        rng_keys=batch.rng_keys,
        epoch=epoch,
        present=batch.present,
        wire_dtypes=dict.fromkeys(vectors, torch.bfloat16),
        labels_known=labels_known,
        label_weights=weights if weights is None else weights.to(targets.dtype),
    )
