"""What PLNL's two networks said of every labelled row, and what follows from it."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from heron.pipeline.config.terms import Plnl

NETWORKS = 2
STRIP = 1 << 22  # cosines at a time


class Selection(nn.Module):
    """The outputs of two networks over epochs, guessed labels and enhanced sets (Li et al. 2025).

    A guess for a network is made from the outputs of the other. All processes hold the same.

    Attributes:
        logits: of each network for each row when it was last seen, [networks, rows, classes].
        history: their probabilities at the ends of the last epochs, oldest first,
            [networks, epochs, rows, classes].
        sets: complementary labels and what was added to them, [networks, rows, classes].
        guesses: the class that a row is taken for, or -1, [networks, rows].
        closed: how many epochs are done.
    """

    logits: Tensor
    history: Tensor
    sets: Tensor
    guesses: Tensor
    closed: Tensor
    rows: Tensor
    ybar: Tensor

    def __init__(
        self, rows: Int[Tensor, " labelled"], ybar: Float[Tensor, "labelled classes"], term: Plnl
    ) -> None:
        """Begin with what the labels say.

        Args:
            rows: numbers of all labelled rows, in any order.
            ybar: their complementary labels, 1 where a class is known to be wrong.
            term: its options.
        """
        super().__init__()
        self.term = term
        order = rows.argsort()
        sets = ybar[order]
        self.register_buffer("rows", rows[order], persistent=False)
        self.register_buffer("ybar", sets, persistent=False)
        self.register_buffer("sets", sets.repeat(NETWORKS, 1, 1))
        self.register_buffer("guesses", rows.new_full((NETWORKS, len(rows)), -1))
        self.register_buffer("logits", torch.zeros_like(self.sets))
        even = torch.full_like(sets, 1 / sets.shape[1])
        self.register_buffer("history", even.repeat(NETWORKS, term.epochs, 1, 1))
        self.register_buffer("closed", torch.zeros((), dtype=torch.int64))

    def of(self, rows: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
        """The sets [networks, batch, classes] and guesses [networks, batch] of some rows."""
        place = torch.searchsorted(self.rows, rows)
        return self.sets[:, place], self.guesses[:, place]

    @torch.no_grad()
    def hear(
        self, rows: Int[Tensor, " batch"], logits: Float[Tensor, "batch networks classes"]
    ) -> None:
        """Keep what the networks say of some rows."""
        place = torch.searchsorted(self.rows, rows)
        self.logits[:, place] = logits.transpose(0, 1).to(self.logits)

    @torch.no_grad()
    def close(self, epoch: int) -> None:
        """End the epochs before `epoch` that are open: guess, and enhance the sets."""
        if epoch <= int(self.closed):
            return
        self.closed.fill_(epoch)
        self.history.copy_(torch.cat([self.history[:, 1:], self.logits.softmax(2)[:, None]], 1))
        if epoch < self.term.pretrain_epochs + self.term.warmup_epochs:
            return
        for network in range(NETWORKS):
            other = self.history[NETWORKS - 1 - network]
            self.guesses[network] = guess(other, self.sets[network], self.term.sure)
            self.sets[network] = enhance(
                self.logits[network], self.ybar, self.term.neighbours, self.term.share
            )


def guess(
    history: Float[Tensor, "epochs rows classes"],
    sets: Float[Tensor, "rows classes"],
    sure: float,
) -> Int[Tensor, " rows"]:
    """Positive label guessing: the class of the mean probability over epochs, or -1.

    It is taken where it is no complementary label, where the mean is above `sure`, and where it is
    the most probable class of every epoch.
    """
    value, found = history.mean(0).max(1)
    outside = sets.gather(1, found[:, None])[:, 0] == 0
    steady = (history.argmax(2) == history[0].argmax(1)).all(0)
    return torch.where(outside & steady & (value > sure), found, -1)


def enhance(
    logits: Float[Tensor, "rows classes"],
    ybar: Float[Tensor, "rows classes"],
    neighbours: int,
    share: float,
) -> Float[Tensor, "rows classes"]:
    """Negative label enhancement: complementary labels that most of a row's neighbours have.

    A row's neighbours are those of the largest cosine of logits. Of K - 1 - s classes that a set of
    s could still take, a row whose largest probability is above the mean of all rows takes the
    share, rounded up, that most neighbours exclude, and other rows the first of these. What is in
    the set already counts among them.
    """
    count, classes = ybar.shape
    unit = F.normalize(logits, dim=1)
    near = min(neighbours, count - 1)
    votes = torch.zeros_like(ybar)
    for part in torch.split(
        torch.arange(count, device=ybar.device), max(1, STRIP // max(count, 1))
    ):
        cosines = unit[part] @ unit.T
        cosines.scatter_(1, part[:, None], -torch.inf)
        votes[part] = ybar[cosines.topk(near, 1).indices].sum(1)
    room = classes - 1 - ybar.sum(1)
    certain = logits.softmax(1).amax(1)
    wanted = torch.where(certain > certain.mean(), (share * room).ceil(), 1.0).minimum(room)
    place = votes.argsort(stable=True, dim=1, descending=True).argsort(1)
    return torch.maximum(ybar, (place < wanted[:, None]).to(ybar))
