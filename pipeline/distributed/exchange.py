"""From one process's features to the global batch that the objective sees."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from heron.pipeline.config.terms import Comco, Mulco, Pico
from heron.pipeline.data.batches import Batch
from heron.pipeline.distributed.collectives import gather, gather_objects, rank
from heron.pipeline.models.heterogeneous import Features, Heterogeneous
from heron.pipeline.models.momentum import Momentum
from heron.pipeline.models.selection import NETWORKS, Selection
from heron.pipeline.models.task_groups import TaskGroups
from heron.pipeline.objectives.batch import Contrasts, GlobalBatch, PseudoLabels, Selected
from heron.pipeline.objectives.engine import unit
from heron.pipeline.objectives.objective import Objective


@dataclass(frozen=True)
class Split:
    """How many labelled and unlabelled rows each process holds; known from the plan."""

    labelled: Sequence[int]
    unlabelled: Sequence[int]

    @property
    def rows(self) -> list[int]:
        """Rows of each process."""
        return [a + b for a, b in zip(self.labelled, self.unlabelled, strict=True)]

    def firsts(self, parts: Sequence[int]) -> list[int]:
        """Where this process's part of each stream's global batch begins.

        Args:
            parts: the process's rows of each stream that there is: see `Batch`.
        """
        streams = [sizes for sizes in (self.labelled, self.unlabelled) if sum(sizes)]
        assert len(streams) == len(parts)
        return [sum(sizes[: rank()]) for sizes in streams]

    @cached_property
    def places(self) -> Tensor:
        """Where the labelled rows lie among all rows, in the order of `gather`."""
        starts = itertools.accumulate(self.rows, initial=0)
        own = zip(starts, self.labelled, strict=False)
        return torch.cat([torch.arange(start, start + count) for start, count in own])


def globalise(
    features: Features,
    batch: Batch,
    inputs: Sequence[Tensor],
    shares: Split,
    objective: Objective,
    momentum: Momentum | None = None,
    epoch: float = 0.0,
    selection: Selection | None = None,
) -> GlobalBatch:
    """Gather what the terms need of all processes' rows, and nothing else; never logits.

    Args:
        features: of this process's rows, the labelled ones first.
        batch: the rows, with the labels of the labelled ones.
        inputs: what the features were made of, a tensor a view.
        shares: the rows of every process.
        objective: says what is needed.
        momentum: the momentum encoder, where a term has one; what PiCO remembers of the rows
            moves.
        epoch: now; a fraction of it counts.
        selection: what PLNL's networks remember of the rows, which moves.

    Returns:
        The global batch, differentiable back to every process's features.
    """
    own = shares.labelled[rank()]
    hidden, targets = features.hidden[:own], batch.targets
    whole = GlobalBatch(
        logits=None if features.logits is None else features.logits[:own],
        targets=targets,
        hidden=gather(hidden, shares.labelled) if objective.needs("share_hidden") else hidden,
        all_targets=gather(targets, shares.labelled),
        labelled=_own(shares.labelled),
        projections=[gather(z, shares.rows) for z in features.projections],
        weights=[gather(h, shares.rows) for h in features.weights],
        rows=_own(shares.rows),
        places=shares.places.to(hidden.device),
        paths=gather(batch.paths, shares.labelled)
        if objective.needs("share_paths")
        else batch.paths,
        inputs=[gather(x.flatten(1), shares.rows) for x in inputs]
        if objective.needs("share_inputs")
        else [],
        input_projections=features.input_projections,
        codes=[gather(code[:own], shares.labelled) for code in features.codes],
        means=features.means,
        deviations=features.deviations,
        critics=[gather(c, shares.rows) for c in features.critics],
        networks=[logits[:own] for logits in features.networks],
    )
    if selection is not None:
        return replace(whole, selected=_selected(selection, whole, batch, shares, epoch))
    if momentum is None or whole.logits is None:
        return whole
    keys = momentum.embed(inputs[momentum.view][:own], batch.keys[:own])
    contrasts = Contrasts(keys, whole.logits.detach().softmax(1), *momentum.queue())
    if isinstance(objective.keyed, Pico):
        contrasts = _disambiguate(contrasts, whole, batch, shares, momentum, objective.keyed, epoch)
    elif isinstance(objective.keyed, Comco):
        classes = gather(contrasts.posteriors.argmax(1), shares.labelled)
        taken = _columns(classes, contrasts.posteriors)[whole.labelled]
        pseudo = PseudoLabels(gather(keys, shares.labelled), classes)
        said = torch.cat([taken, targets.to(taken)], 1)
        contrasts = replace(contrasts, posteriors=said, pseudo=pseudo)
    return replace(whole, contrasts=contrasts)


def _selected(
    selection: Selection, whole: GlobalBatch, batch: Batch, shares: Split, epoch: float
) -> Selected:
    """What PLNL's networks know of the batch; they hear what is said of it now."""
    selection.close(int(epoch))
    own = batch.rows[: shares.labelled[rank()]]
    rows = gather(own, shares.labelled)
    views = len(whole.networks) // NETWORKS
    said = torch.stack([whole.networks[n * views].detach() for n in range(NETWORKS)], 1)
    selection.hear(rows, gather(said, shares.labelled))
    sets, guesses = selection.of(own)
    return Selected(sets.to(whole.targets), guesses, (selection.of(rows)[1] >= 0).sum(1))


def _disambiguate(
    contrasts: Contrasts,
    whole: GlobalBatch,
    batch: Batch,
    shares: Split,
    momentum: Momentum,
    term: Pico,
    epoch: float,
) -> Contrasts:
    """Let PiCO's prototypes and pseudo-targets see the batch, in the order of its Algorithm 1."""
    memory, rows = momentum.disambiguation, batch.rows[: shares.labelled[rank()]]
    assert memory is not None
    posteriors = contrasts.posteriors.masked_fill(whole.targets == 1, -torch.inf)
    classes = gather(posteriors.argmax(1), shares.labelled)
    q = unit(whole.labelled_projections[0].detach())
    memory.learn(q, classes)
    if epoch >= term.warmup_epochs:
        part = min(epoch / term.phi_epochs, 1.0)
        phi = term.phi_start + part * (term.phi_end - term.phi_start)
        memory.judge(gather(rows, shares.labelled), q, whole.all_targets, phi)
    keys = gather(contrasts.keys, shares.labelled)
    pseudo = PseudoLabels(keys, classes, memory.of(rows).to(posteriors))
    taken = _columns(classes, posteriors)[whole.labelled]
    return replace(contrasts, posteriors=taken, pseudo=pseudo)


def _columns(classes: Tensor, like: Tensor) -> Tensor:
    """Classes as 0/1 columns."""
    return torch.nn.functional.one_hot(classes, like.shape[1]).to(like)


def slow_copy(
    model: Heterogeneous, term: Mulco | Pico | Comco, rows: Tensor, ybar: Tensor
) -> Momentum:
    """The momentum encoder of a term with its queue, and what the term remembers.

    Args:
        model: what is followed, in its initial state; keys are made of the second view.
        term: its options.
        rows: numbers of all labelled rows.
        ybar: their complementary labels.
    """
    said = ybar.shape[1] * (2 if isinstance(term, Comco) else 1)  # of a row of the queue
    momentum = Momentum(model, 1, term.queue, said, term.momentum)
    if isinstance(term, Pico):
        momentum.disambiguate(rows, ybar, term.gamma)
    return momentum


def remember(momentum: Momentum, batch: GlobalBatch, shares: Split) -> None:
    """Put the keys of all processes, with what the classifier says of them, into the queue."""
    assert batch.contrasts is not None
    momentum.enqueue(
        gather(batch.contrasts.keys, shares.labelled),
        gather(batch.contrasts.posteriors, shares.labelled),
    )


def judge_tasks(
    groups: TaskGroups, features: Features, targets: Tensor, shares: Split, exclusive: bool
) -> None:
    """Show DeepMTMV's task groups how wrong each view is about every task of all labelled rows.

    Args:
        groups: the classifier.
        features: of this process's rows, the labelled ones first.
        targets: labels of the labelled ones.
        shares: the rows of every process.
        exclusive: a row has one class: softmax, else sigmoid.
    """
    seen = features.hidden[: len(targets), : groups.view_width * groups.views].detach()
    logits = torch.stack(groups.alone(seen), 1)
    scores = logits.softmax(2) if exclusive else logits.sigmoid()
    groups.observe(gather((targets[:, None] - scores).abs(), shares.labelled))


def part_tasks(groups: TaskGroups, step: int) -> list[str]:
    """Part a layer of DeepMTMV's task groups where that is cheaper; a line that says how.

    The weights must be whole; every process must call it, and parts the same.
    """
    level, found = gather_objects(groups.choose())[0]
    if len(found) == 1:
        return []
    groups.part(level, found)
    named = " | ".join(" ".join(map(str, tasks)) for tasks in found)
    return [f"step {step}: layer {level + 1} of the task groups is parted: {named}"]


def culprits(features: Features) -> list[str]:
    """Which embeddings of which process are not finite, for a message; every process calls it."""
    parts = {"hidden features": features.hidden, "logits": features.logits}
    parts |= {f"projections of view {v + 1}": z for v, z in enumerate(features.projections)}
    parts |= {f"weights H(z) of view {v + 1}": h for v, h in enumerate(features.weights)}
    inputs = enumerate(features.input_projections)
    parts |= {f"input projections of view {v + 1}": x for v, x in inputs}
    parts |= dict(zip(("codes", "codes of labels", "decoded labels"), features.codes, strict=False))
    for name in ("means", "deviations", "critics"):
        lists = enumerate(getattr(features, name))
        parts |= {f"bottleneck {name} of view {v + 1}": part for v, part in lists}
    views = len(features.networks) // NETWORKS
    for i, logits in enumerate(features.networks):
        parts[f"logits of view {i % views + 1} by network {i // views + 1}"] = logits
    own = []
    for name, part in parts.items():
        if part is not None and (bad := int((~part.isfinite()).any(1).sum())):
            own.append(f"rank {rank()}: {name} of {bad} of {len(part)} rows are not finite")
    return [line for lines in gather_objects(own) for line in lines]


def _own(sizes: Sequence[int]) -> slice:
    """This process's rows in the order of `gather`."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return slice(ends[rank()], ends[rank() + 1])
