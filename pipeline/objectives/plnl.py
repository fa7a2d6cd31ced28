"""PLNL: guessed labels where the other network is sure, further complementary labels elsewhere."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.sections import Natural, Share
from heron.pipeline.config.terms import WRONG, Needs, Term, TermSetting
from heron.pipeline.distributed.sync_batchnorm import by_stream
from heron.pipeline.models.encoders import build_encoder
from heron.pipeline.models.heterogeneous import Encoded, Features, ModelSpec
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.complementary import checked, log1m_exp
from heron.pipeline.objectives.memory import Memory, RunSpec
from heron.shards.artefact import Count

NETWORKS = 2
SALT = 5000  # of the dropout of the second encoder
STRIP = 1 << 22  # cosines at a time


class SecondNetwork(nn.ModuleList):
    """An encoder and a classifier beside the model's own, for the same views."""

    def __init__(self, spec: ModelSpec) -> None:
        """Draws other weights for the same architecture."""
        encoder, _ = build_encoder(spec.config.encoder, spec.shapes[0], salt=SALT)
        super().__init__([encoder, nn.Linear(spec.classified_width, spec.labels)])

    def add_features(self, encoded: Encoded) -> Features:
        """Returns `networks`, logits of each view by one network and then by the other.

        `logits`, a row's prediction, is the mean of both networks' on the first view.
        """
        encoder, classifier = self
        assert encoded.classifier is not None and encoded.logits is not None
        given = [*zip(encoded.inputs, encoded.view_keys, strict=True)]
        hidden = by_stream([encoder] * len(given), encoded.sizes, given)
        first = [encoded.logits, *map(encoded.classifier, encoded.hidden[1:])]
        second = [*map(classifier, hidden)]
        return {"networks": [*first, *second], "logits": [(first[0] + second[0]) / 2]}


class Plnl(Term):
    """PLNL's two networks, which choose for each other.

    Attributes:
        pretrain_epochs: epochs of SCL-LOG alone.
        warmup_epochs: epochs after these until labels are guessed.
        consistency_epochs: epochs over which the weight of the views' consistency rises.
        epochs: whose mean probability guesses a label.
        sure: probability above which a label is guessed.
        neighbours: samples that enhance a set of labels.
        share: of what a set could take that it takes.
    """

    pretrain_epochs: Count = 200
    warmup_epochs: Count = 20
    consistency_epochs: Natural = 100
    epochs: Natural = 3
    sure: Share = 0.99
    neighbours: Natural = 500
    share: Share = 0.1

    needs: ClassVar[Needs] = Needs(own=("logits", "networks"), labels=WRONG, views=2)
    remembers_rows: ClassVar[bool] = True

    def refuse(self, name: str, setting: TermSetting) -> None:
        """Raises ConfigError where a network could not see every view by one encoder."""
        model = setting.model
        alone = len(setting.terms) == 1 and model.shared_encoder
        if not (alone and model.classify_on == "first_view"):
            raise ConfigError(
                f"objective.{name} has two networks, each of which sees every view and is "
                f"scored on the first; found model.shared_encoder {model.shared_encoder}, "
                f"model.classify_on {model.classify_on}, terms {', '.join(setting.terms)}; "
                "expected true, first_view and this term alone"
            )

    def parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Brings the second network."""
        return {"second": lambda: SecondNetwork(spec)}

    def memory(self, run: RunSpec) -> "PlnlMemory":
        """Returns what the networks gave of every labelled row."""
        return PlnlMemory(run.rows, run.read_targets(), self)

    def loss(self, batch: GlobalBatch, memory: "PlnlMemory") -> Tensor:
        """Sums both networks' `plnl`."""
        networks = batch.own_labelled("networks")
        views = len(networks) // NETWORKS
        indices = batch.indices[: len(networks[0])]
        memory.end_epochs(int(batch.epoch))
        all_indices = batch.gather_labelled(indices)
        now = torch.stack([networks[n * views].detach() for n in range(NETWORKS)], 1)
        memory.record_logits(all_indices, batch.gather_labelled(now))
        sets, guesses = memory.of(indices)
        guessed = (memory.of(all_indices)[1] >= 0).sum(1)
        since = batch.epoch - self.pretrain_epochs
        losses = [
            plnl(
                networks[n * views : (n + 1) * views],
                sets[n].to(batch.targets),
                guesses[n],
                total=batch.num_labelled,
                guessed=int(guessed[n]),
                consistency=min(max(since / self.consistency_epochs, 0.0), 1.0),
            )
            for n in range(NETWORKS)
        ]
        return torch.stack(losses).sum()


def plnl(
    views: Sequence[Float[Tensor, "rows classes"]],
    ybar: Float[Tensor, "rows classes"],
    guesses: Int[Tensor, " rows"],
    *,
    total: int,
    guessed: int,
    consistency: float,
) -> Float[Tensor, ""]:
    r"""The loss of one of PLNL's two networks (Li, Li and Jia 2025, as in the authors' code).

    .. math:: -\frac1n \sum_i \sum_{k \in \bar Y_i} \log(1 - p_{ik})
        + \frac{1}{m K} \sum_{i : y_i} \sum_k \mathrm{BCE}(\sigma(f_{ik}), [k = y_i])
        + \frac wn \sum_i \sum_{v > 1} \mathrm{KL}(q_i \,\|\, p^v_i)

    The first is SCL-LOG on the enhanced sets, the second the supervised loss of the m samples whose
    label is guessed. p and f are of the first view, p^v of another, and q is p outside the set,
    normalised, without gradient.

    Args:
        views: logits of this process's samples, one tensor a view, the first the least augmented.
        ybar: their complementary labels with what was added to them, 0 or 1.
        guesses: their guessed classes, -1 where there is none.
        total: samples in the whole batch; 0 gives a loss of 0.
        guessed: those of the whole batch whose label is guessed.
        consistency: w.

    Returns:
        The process's share of the loss.

    Raises:
        ValueError: a set is empty or holds every class, or is not of 0 and 1.
    """
    logits = checked(views[0], ybar)
    log_p = logits.log_softmax(1)
    wrong = -(ybar * log1m_exp(log_p)).sum() / max(total, 1)
    sure = guesses >= 0
    guessed_targets = F.one_hot(guesses[sure], logits.shape[1]).to(logits)
    right = F.binary_cross_entropy_with_logits(logits[sure], guessed_targets, reduction="sum")
    q = log_p.detach().masked_fill(ybar == 1, -torch.inf).softmax(1)
    apart = [F.kl_div(view.to(q).log_softmax(1), q, reduction="sum") for view in views[1:]]
    agree = torch.stack([wrong.new_zeros(()), *apart]).sum() / max(total, 1)
    return wrong + right / max(guessed * logits.shape[1], 1) + consistency * agree


class PlnlMemory(Memory):
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
        self, rows: Int[Tensor, " labelled"], ybar: Float[Tensor, "labelled classes"], term: "Plnl"
    ) -> None:
        """Begins with what the labels say.

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
        """Returns sets [networks, batch, classes] and guesses [networks, batch] of some rows."""
        at = torch.searchsorted(self.rows, rows)
        return self.sets[:, at], self.guesses[:, at]

    @torch.no_grad()
    def record_logits(
        self, rows: Int[Tensor, " batch"], logits: Float[Tensor, "batch networks classes"]
    ) -> None:
        """Keeps the logits that the networks give of some rows."""
        at = torch.searchsorted(self.rows, rows)
        self.logits[:, at] = logits.transpose(0, 1).to(self.logits)

    @torch.no_grad()
    def end_epochs(self, epoch: int) -> None:
        """Ends the epochs before `epoch` that are open: guess, and enhance the sets."""
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
    rank = votes.argsort(stable=True, dim=1, descending=True).argsort(1)
    return torch.maximum(ybar, (rank < wanted[:, None]).to(ybar))
