"""DeepMTMV's classifier: a tree of layers in which tasks that err together share."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from heron.pipeline.config import model as architecture
from heron.pipeline.models.task_clusters import partition


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
        """A layer a group, drawn as `nn.Linear` draws.

        Args:
            groups: to begin with.
            width: of what goes in.
            out: of what comes out, a group.
        """
        super().__init__()
        drawn = nn.Linear(width, len(groups) * out)
        self.weight = nn.Parameter(drawn.weight.detach().view(-1, out, width)[groups])
        self.bias = nn.Parameter(drawn.bias.detach().view(-1, out)[groups])
        self.register_buffer("groups", groups.clone())
        self.numbers = groups.tolist()
        self.register_load_state_dict_post_hook(_read)  # type: ignore[no-untyped-call]

    def part(self, groups: Sequence[Sequence[int]]) -> None:
        """Part the tasks into groups."""
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


def _read(layer: GroupedLinear, _: object) -> None:
    """The groups of a state that was loaded."""
    layer.numbers = layer.groups.tolist()


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

    def __init__(self, config: architecture.TaskGroups, width: int, views: int, tasks: int) -> None:
        """Build the layers, all shared.

        Args:
            config: widths, and when tasks part.
            width: of the features of one view.
            views: how many are seen, side by side.
            tasks: how many labels there are.
        """
        super().__init__()
        self.config, self.view_width, self.views = config, width, views
        seen = width * views
        widths = config.widths or [max(1, seen // 2), max(1, seen // 4)]
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
        if self.views == 1 or self.config.errors == "joint":
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
        before = self.weight * self.config.decay
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
            cost=self.config.cost * 2 ** (len(self.layers) - 1 - level),
            separation=self.config.separation,
            consensus=self.config.consensus,
        )
        return level, found

    def part(self, level: int, groups: Sequence[Sequence[int]]) -> None:
        """Part a layer into groups of tasks, each of which goes on with a copy of the layer."""
        self.layers[level].part(groups)


def members(numbers: Sequence[int]) -> list[list[int]]:
    """The tasks of each group, by its number."""
    return [[t for t, of in enumerate(numbers) if of == number] for number in sorted(set(numbers))]
