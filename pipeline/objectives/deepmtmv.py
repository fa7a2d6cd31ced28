"""DeepMTMV: a classifier whose layers are shared by tasks that err together; a task is a label."""

import warnings
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.model import Sizes
from heron.pipeline.config.sections import Natural, Positive
from heron.pipeline.config.terms import KNOWN, Needs, Term, TermSetting
from heron.pipeline.models.heterogeneous import ModelSpec
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.classification import Bce, CrossEntropy
from heron.pipeline.objectives.memory import Memory, RunSpec, StepEnd

ROUNDS = 45  # of the views' alternation, as in DeepMTMV's code
SEEDS = 10  # of k-means, of which the cheapest clusters are taken
Affinity = Float[np.ndarray, "views branches branches"]


class Deepmtmv(Term):
    """DeepMTMV's classifier: layers that all labels share at first, and groups of them later.

    It has no loss of its own: `bce` or `cross_entropy` trains it.

    Attributes:
        widths: of the hidden layers; null: 1/2 and 1/4 of what it sees, as in the authors' code.
        every_epochs: epochs between two partings of the highest layer that all labels share, where
            that is cheaper.
        errors: averaged of each view alone, or of the joint prediction.
        decay: rate at which the averages of errors forget.
        cost: of a further group in the top layer; twice as much in each layer below.
        separation: how much it counts that labels of a group agree little in their errors.
        consensus: how strongly the views' clusters are drawn together.
    """

    widths: Sizes | None = None
    every_epochs: Natural = 10
    errors: Literal["view", "joint"] = "view"
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.99
    cost: Annotated[float, Field(ge=0)] = 0.0625
    separation: Positive = 1.95
    consensus: Annotated[float, Field(ge=0)] = 0.1

    needs: ClassVar[Needs] = Needs(own=("hidden",), labels=KNOWN)

    def refuse(self, name: str, setting: TermSetting) -> None:
        """Raises ConfigError where no term trains the classifier."""
        if not any(isinstance(term, Bce | CrossEntropy) for term in setting.terms.values()):
            raise ConfigError(
                f"objective.{name} is layers of a classifier that labels train; found the terms "
                f"{', '.join(setting.terms)}; expected bce or cross_entropy among them"
            )

    def classifier(self, spec: ModelSpec) -> "TaskGroups":
        """Brings the layers."""
        if len(widths := set(spec.widths[: spec.classified])) > 1:
            raise ConfigError(
                f"objective.deepmtmv compares views of one width; the encoders give {spec.widths}; "
                "expected encoders of one width"
            )
        return TaskGroups(self, widths.pop(), spec.classified, spec.labels)

    def memory(self, run: RunSpec) -> "TaskErrors":
        """Returns what watches the errors; the averages are the classifier's."""
        exclusive = any(isinstance(term, CrossEntropy) for term in run.terms.values())
        assert isinstance(run.model.classifier, TaskGroups)
        return TaskErrors(run.model.classifier, exclusive)

    def loss(self, batch: GlobalBatch, memory: "TaskErrors") -> None:
        """Shows the memory how wrong each view is about each task."""
        memory.update_task_errors(batch)


class TaskErrors(Memory):
    """Keeps the averages of a classifier's errors, and parts its layers by them."""

    def __init__(self, groups: "TaskGroups", exclusive: bool) -> None:
        """Watches a classifier; `exclusive`: a row has one class: softmax, else sigmoid."""
        super().__init__()
        self._groups, self.exclusive = (groups,), exclusive  # in a tuple: its state is the model's

    def update_task_errors(self, batch: GlobalBatch) -> None:
        """Takes the errors of all labelled rows into the averages."""
        (groups,) = self._groups
        hidden = batch.own_labelled("hidden")[0][:, : groups.view_width * groups.views].detach()
        logits = torch.stack(groups.alone(hidden), 1)
        scores = logits.softmax(2) if self.exclusive else logits.sigmoid()
        groups.observe(batch.gather_labelled((batch.own_targets[:, None] - scores).abs()))

    def update(self, step: StepEnd) -> list[str]:
        """Parts a layer every so many epochs where that is cheaper; every process the same."""
        (groups,) = self._groups
        if (step.number + 1) % (groups.options.every_epochs * step.per_epoch):
            return []
        with step.gathered_parameters():
            level, found = step.from_first(groups.choose())
        if len(found) == 1:
            return []
        groups.layers[level].part(found)
        named = " | ".join(" ".join(map(str, tasks)) for tasks in found)
        return [f"step {step.number}: layer {level + 1} of the task groups is parted: {named}"]


class _OfGroups(torch.autograd.Function):
    """A row a group out of a row a task; what a group learns goes back to each of its tasks."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, firsts: list[int], numbers: list[int]) -> Tensor:
        ctx.place = [firsts.index(number) for number in numbers]  # type: ignore[attr-defined]
        return rows[firsts]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.place], None, None  # type: ignore[attr-defined]


class GroupedLinear(nn.Module):
    """A linear layer a group of tasks.

    Every task has weights of its own. Those of a group are equal and get the gradient of the layer
    that they share, so they stay equal, to rounding, under any optimiser that moves numbers one by
    one or a parameter by its length; of a group, its first task's are used. To part a group is then
    to change `groups` and nothing else: the new groups begin with copies of weights and of
    optimiser state, however a strategy holds these, and the parameters are the same from the first
    step to the last.

    Attributes:
        groups: number of each task's group, which is that of its first task; part of the state.
        numbers: the same, where no device has to be asked.
    """

    groups: Tensor
    numbers: list[int]

    def __init__(self, groups: Int[Tensor, " tasks"], width: int, out: int) -> None:
        """A layer a group, drawn as `nn.Linear` draws; `out` is the width of a group's output."""
        super().__init__()
        drawn = nn.Linear(width, len(groups) * out)
        self.weight = nn.Parameter(drawn.weight.detach().view(-1, out, width)[groups])
        self.bias = nn.Parameter(drawn.bias.detach().view(-1, out)[groups])
        self.register_buffer("groups", groups.clone())
        self.numbers = groups.tolist()
        self.register_load_state_dict_post_hook(lambda layer, _: layer.part(()))  # type: ignore[no-untyped-call]

    def part(self, groups: Sequence[Sequence[int]]) -> None:
        """Part the tasks into groups; into none: read those of a state that was loaded."""
        for group in groups:
            self.groups[list(group)] = min(group)
        self.numbers = self.groups.tolist()

    def forward(
        self, x: Float[Tensor, "below rows width"], below: Sequence[int]
    ) -> Float[Tensor, "groups rows out"]:
        """The layer of each group on what the group's tasks share below.

        Args:
            x: what comes out of the layer below, a slice a group, by its number.
            below: `numbers` there, of whose groups those here are parts.
        """
        firsts, slices = sorted(set(self.numbers)), sorted(set(below))
        place = [slices.index(below[task]) for task in firsts]
        weight, bias = (_OfGroups.apply(p, firsts, self.numbers) for p in (self.weight, self.bias))  # type: ignore[no-untyped-call]
        found: Tensor = torch.baddbmm(bias[:, None], x[place], weight.mT)
        return found


class TaskGroups(nn.Module):
    """The classifier of DeepMTMV (Zheng, Cheng and He 2019), in which a task is a label.

    Layers shared by groups of tasks stand on the views' features side by side; each task ends in a
    unit of its own. At first all tasks share all layers. From the top down a layer is parted into
    groups of tasks that find the same samples difficult (see `task_clusters`). What it knows of the
    tasks' errors is averages over batches, which are part of the state and the same on every
    process.

    Attributes:
        margins: mean error of each task, [views, tasks].
        agreement: probability that two tasks find a sample both difficult, or both easy, which is
            when the error is at least its mean, or below, [views, tasks, tasks].
        weight: sum of the weights of the batches in these averages.
    """

    margins: Tensor
    agreement: Tensor
    weight: Tensor

    def __init__(self, options: Deepmtmv, width: int, views: int, tasks: int) -> None:
        """Builds the layers, all shared, on `views` views of `width` features side by side."""
        super().__init__()
        self.options, self.view_width, self.views = options, width, views
        seen = width * views
        widths = options.widths or [max(1, seen // 2), max(1, seen // 4)]
        pairs = zip([seen, *widths], widths, strict=False)
        one = torch.zeros(tasks, dtype=torch.int64)
        self.hidden = nn.ModuleList(GroupedLinear(one, a, b) for a, b in pairs)
        self.heads = GroupedLinear(torch.arange(tasks), widths[-1], 1)
        self.register_buffer("margins", torch.zeros(views, tasks))
        self.register_buffer("agreement", torch.zeros(views, tasks, tasks))
        self.register_buffer("weight", torch.zeros(()))

    def forward(self, seen: Float[Tensor, "rows width"]) -> Float[Tensor, "rows tasks"]:
        """The logits of rows whose views' features stand side by side."""
        x, below = seen[None], [0] * len(self.heads.numbers)
        for layer in self.layers:
            x, below = layer(x, below).relu(), layer.numbers
        logits: Tensor = self.heads(x, below)[:, :, 0].T
        return logits

    @property
    def layers(self) -> list[GroupedLinear]:
        """The hidden layers, from the features up."""
        return [layer for layer in self.hidden if isinstance(layer, GroupedLinear)]

    @torch.no_grad()
    def alone(self, seen: Float[Tensor, "rows width"]) -> list[Float[Tensor, "rows tasks"]]:
        """The logits of each view alone, the others' features being zero; no gradient."""
        if self.views == 1 or self.options.errors == "joint":
            return [self.forward(seen)] * self.views
        parts = torch.split(seen, self.view_width, 1)
        nothing = torch.zeros_like(parts[0])
        return [
            self.forward(
                torch.cat([part if u == v else nothing for u, part in enumerate(parts)], 1)
            )
            for v in range(self.views)
        ]

    @torch.no_grad()
    def observe(self, errors: Float[Tensor, "rows views tasks"]) -> None:
        r"""Take the errors |y - p| of a whole batch's labelled rows into the averages.

        With e = 1 where an error is at least the mean of the batches before, the agreement of two
        tasks is E[e_i e_j + (1 - e_i)(1 - e_j)] (Lu et al. 2017, the affinity of tasks). A batch
        has the weight 1, and that of those before it falls by `decay`.
        """
        if not len(errors):
            return
        errors = errors.to(self.margins)
        hard = (errors >= self.margins).to(errors)
        pairs = torch.stack([torch.einsum("rvi,rvj->vij", e, e) for e in (hard, 1 - hard)])
        before = self.weight * self.options.decay
        self.weight.copy_(before + 1)
        for mean, found in (
            (self.margins, errors.mean(0)),
            (self.agreement, pairs.sum(0) / len(errors)),
        ):
            mean.mul_(before).add_(found).div_(self.weight)

    @torch.no_grad()
    def choose(self) -> tuple[int, list[list[int]]]:
        """How to part the highest layer that all tasks share, from the averages and the weights.

        The weights must be whole. Returns the layer's number and its groups of tasks: one group,
        when nothing else is cheaper, or nothing is left to part.
        """
        tasks = self.heads.numbers
        shared = [i for i, layer in enumerate(self.layers) if not any(layer.numbers)]
        if not shared or not self.weight:
            return 0, [tasks]
        level = shared[-1]
        above = [*self.layers, self.heads][level + 1]
        # How much the first layer takes of each view, as the authors' code weighs the views.
        taken = torch.split(self.layers[0].weight[0].relu(), self.view_width, 1)
        importance = torch.stack([part.mean() for part in taken]).double().softmax(0)
        found = partition(
            self.agreement.double().cpu().numpy(),
            members(above.numbers),
            importance.cpu().numpy(),
            cost=self.options.cost * 2 ** (len(self.layers) - 1 - level),
            separation=self.options.separation,
            consensus=self.options.consensus,
        )
        return level, found


def members(numbers: Sequence[int]) -> list[list[int]]:
    """The tasks of each group, by its number."""
    return [[t for t, of in enumerate(numbers) if of == number] for number in sorted(set(numbers))]


def partition(
    agreement: Float[np.ndarray, "views tasks tasks"],
    branches: Sequence[Sequence[int]],
    importance: Float[np.ndarray, " views"],
    *,
    cost: float,
    separation: float,
    consensus: float,
) -> list[list[int]]:
    r"""The groups of branches that cost least (Zheng, Cheng and He 2019; Lu et al. 2017).

    C groups g cost, with A of `affinity` and the view's importance alpha_v,

    .. math:: (C - 1) \, \mathrm{cost} + \frac{\mathrm{separation}}{V C} \sum_v \alpha_v
        \sum_g \left(1 - \operatorname{mean}_{k \in g} \min_{l \in g} A^v_{kl}\right)

    For every C from 1 to the branches less one the groups are clusters of `embedding`; of the
    cheapest C the groups are taken. As in DeepMTMV's code, some branches always stay together.

    Args:
        agreement: of the tasks' errors: see `TaskGroups.agreement`.
        branches: the tasks of each branch of the layer above.
        importance: weights of the views, which sum to 1.
        cost: of a further group.
        separation: weight of the groups' disagreement.
        consensus: see `embedding`.

    Returns:
        The tasks of each group, groups in order of their first task.
    """
    a = affinity(agreement, branches)
    found = [(disagreement(a, np.zeros(len(branches), np.int64), importance), [0] * len(branches))]
    for count in range(2, len(branches)):
        points = embedding(a, count, consensus)
        tries = [_cluster(points, count, seed) for seed in range(SEEDS)]
        full = [labels for labels in tries if len(set(labels.tolist())) == count]
        costs = [disagreement(a, labels, importance) for labels in full]
        if costs:
            least = int(np.argmin(costs))
            found.append((costs[least], full[least].tolist()))
    total = [(len(set(labels)) - 1) * cost + separation / len(a) * apart for apart, labels in found]
    labels = found[int(np.argmin(total))][1]
    groups: dict[int, list[int]] = {}
    for label, tasks in zip(labels, branches, strict=True):
        groups.setdefault(label, []).extend(tasks)
    return sorted(sorted(group) for group in groups.values())


def affinity(
    agreement: Float[np.ndarray, "views tasks tasks"], branches: Sequence[Sequence[int]]
) -> Affinity:
    """How far branches agree: the mean over tasks of one of the least agreement with the other's.

    Lu et al. 2017, affinity of branches; made symmetric by the mean of both ways.
    """
    pairs = [[np.ix_(one, other) for other in branches] for one in branches]
    a = np.array([[[of[at].min(1).mean() for at in row] for row in pairs] for of in agreement])
    mean: NDArray[np.float64] = (a + a.transpose(0, 2, 1)) / 2
    return mean


def disagreement(
    a: Affinity, labels: Int[np.ndarray, " branches"], importance: NDArray[np.float64]
) -> float:
    """How little the branches of a group agree, the mean over groups, weighted over views."""
    groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    apart = [[1 - of[np.ix_(g, g)].min(1).mean() for g in groups] for of in a]
    return float(importance @ np.mean(apart, 1))


def embedding(
    a: Affinity, count: int, consensus: float
) -> Float[np.ndarray, "branches coordinates"]:
    r"""Co-regularised spectral embedding (Kumar, Rai and Daume 2011, its pairwise form).

    With L_v = D_v^{-1/2} A_v D_v^{-1/2}, the views' bases U_v of `count` orthonormal columns take
    turns to maximise

    .. math:: \sum_v \operatorname{tr}(U_v^T L_v U_v)
        + \lambda \sum_{v < w} \operatorname{tr}(U_v U_v^T U_w U_w^T)

    Returns:
        The bases' rows, each of length 1, side by side over views.
    """
    root = np.sqrt(np.maximum(a.sum(2), np.finfo(np.float64).tiny))
    laplacians = a / (root[:, :, None] * root[:, None, :])
    bases = np.stack([_top(laplacian, count) for laplacian in laplacians])
    for _ in range(ROUNDS if len(a) > 1 else 0):
        for v in range(len(a)):
            others = np.delete(bases, v, 0)
            drawn = np.einsum("wik,wjk->ij", others, others)
            bases[v] = _top(laplacians[v] + consensus * drawn, count)
    lengths = np.linalg.norm(bases, axis=2, keepdims=True)
    return np.concatenate(list(bases / np.where(lengths > 0, lengths, 1)), 1)


def _top(symmetric: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Eigenvectors of the largest eigenvalues, as columns."""
    found: NDArray[np.float64] = np.linalg.eigh(symmetric)[1][:, -count:]
    return found


def _cluster(points: NDArray[np.float64], count: int, seed: int) -> NDArray[np.int64]:
    from sklearn.cluster import KMeans  # here: only task groups need it, and it loads scipy
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer points apart than clusters
        labels = KMeans(count, n_init=1, random_state=seed).fit_predict(points)
    return np.asarray(labels, np.int64)
