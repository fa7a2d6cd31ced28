"""PLNL: guessed labels where the other network is sure, more complementary labels elsewhere."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from heron.base.artefact import Count
from heron.base.errors import ConfigError
from heron.base.sections import Natural, Share
from heron.distributed.sync_batchnorm import call_by_stream
from heron.losses.batch import GlobalBatch
from heron.losses.classification import (
    TrainingSetLoss,
    checked_logits,
    complementary_columns,
    log1m_exp,
)
from heron.losses.inputs import LossError, RowCounts, Views, as_views
from heron.losses.run import Memory, RunSpec, TermSetting
from heron.losses.terms import COMPLEMENTARY_LABELS, Needs
from heron.models.encoders import build_encoder
from heron.models.heterogeneous import Encoded, Features, ModelSpec

NETWORKS = 2
SALT = 5000  # of the second encoder's dropout
STRIP = 1 << 22  # cosines computed at a time


class SecondNetwork(nn.ModuleList):
    """An encoder and a classifier beside the model's own, for the same views."""

    def __init__(self, spec: ModelSpec) -> None:
        """Builds the model's architecture with other initial weights."""
        encoder, _ = build_encoder(spec.config.encoder, spec.shapes[0], salt=SALT)
        super().__init__([encoder, nn.Linear(spec.classified_width, spec.labels)])

    def add_features(self, encoded: Encoded) -> Features:
        """Returns `networks`, logits of each view by one network and then by the other.

        `logits`, a row's prediction, is the mean of both networks' on the first view.
        """
        encoder, classifier = self
        assert encoded.classifier is not None and encoded.logits is not None
        inputs = [*zip(encoded.inputs, encoded.view_keys, strict=True)]
        hidden = call_by_stream([encoder] * len(inputs), encoded.sizes, inputs)
        first = [encoded.logits, *map(encoded.classifier, encoded.hidden[1:])]
        second = [*map(classifier, hidden)]
        return {"networks": [*first, *second], "logits": [(first[0] + second[0]) / 2]}


class Plnl(TrainingSetLoss):
    r"""PLNL (Li, Li and Jia 2025, as in the authors' code): two networks select labels.

    For each network

    .. math:: -\frac1n \sum_i \sum_{k \in \bar Y_i} \log(1 - p_{ik})
        + \frac{1}{m K} \sum_{i : y_i} \sum_k \mathrm{BCE}(\sigma(f_{ik}), [k = y_i])
        + \frac wn \sum_i \sum_{v > 1} \mathrm{KL}(q_i \,\|\, p^v_i)

    For `pretrain_epochs` the loss is the first sum alone; then w rises over `consistency_epochs`.
    From `warmup_epochs` after that, each network's labels :math:`y_i` are guessed, and its sets
    :math:`\bar Y_i` enlarged, at the ends of epochs from the networks' outputs for every sample.
    """

    needs = Needs(own=("logits", "networks"), labels=COMPLEMENTARY_LABELS, views=2)
    remembers_rows = True

    def __init__(
        self,
        labels: Tensor | None = None,
        *,
        pretrain_epochs: Count = 200,
        warmup_epochs: Count = 20,
        consistency_epochs: Natural = 100,
        epochs: Natural = 3,
        sure: Share = 0.99,
        neighbours: Natural = 500,
        share: Share = 0.1,
    ) -> None:
        """Starts from the given labels.

        Args:
            labels: complementary labels of the whole training set, 0 or 1, [samples, classes]; a
                run has those of its data.
            pretrain_epochs: epochs of the first sum alone.
            warmup_epochs: further epochs before labels are guessed.
            consistency_epochs: epochs over which w rises.
            epochs: number of epochs over which a guess's probability is averaged.
            sure: the probability above which a guess is accepted.
            neighbours: number of neighbours that vote on further complementary labels.
            share: the fraction of the remaining classes that the set of a confident row gains.
        """
        super().__init__()
        self.pretrain_epochs, self.warmup_epochs = pretrain_epochs, warmup_epochs
        self.consistency_epochs, self.epochs, self.sure = consistency_epochs, epochs, sure
        self.neighbours, self.taken = neighbours, share
        if labels is not None:
            labels = complementary_columns(labels)
            rows = torch.arange(len(labels), device=labels.device)
            self.memory = PlnlMemory(rows, labels, epochs)
            self.register_buffer("labels", labels, persistent=False)

    def refuse(self, name: str, setting: TermSetting) -> None:
        """Raises ConfigError where a network could not see every view by one encoder."""
        model = setting.model
        only_term = len(setting.terms) == 1
        if not (only_term and model.shared_encoder and model.classify_on == "first_view"):
            raise ConfigError(
                f"objective.{name} has two networks, each of which sees every view and is scored "
                "on the first, so model.shared_encoder must be true, model.classify_on first_view "
                f"and this the only term, got {model.shared_encoder}, {model.classify_on} and "
                f"{', '.join(setting.terms)}"
            )

    def build_parts(self, spec: ModelSpec) -> dict[str, Callable[[], nn.Module]]:
        """Returns what builds the second network."""
        return {"second": lambda: SecondNetwork(spec)}

    def build_memory(self, run: RunSpec) -> "PlnlMemory":
        """Returns the memory of the networks' outputs for every labelled row."""
        return PlnlMemory(run.rows, run.read_targets(), self.epochs)

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns the sum of both networks' `plnl`, and records their outputs."""
        memory: PlnlMemory = self.memory
        networks = batch.own_labelled("networks")
        views = len(networks) // NETWORKS
        indices = batch.indices[: len(networks[0])]
        memory.end_epochs(
            int(batch.epoch),
            guess_from=self.pretrain_epochs + self.warmup_epochs,
            sure=self.sure,
            neighbours=self.neighbours,
            taken=self.taken,
        )
        all_indices = batch.gather_labelled(indices)
        logits = torch.stack([networks[n * views].detach() for n in range(NETWORKS)], 1)
        memory.record_logits(all_indices, batch.gather_labelled(logits))
        sets, guesses = memory.sets_and_guesses(indices)
        guessed = (memory.sets_and_guesses(all_indices)[1] >= 0).sum(1)
        epochs_since = batch.epoch - self.pretrain_epochs
        losses = [
            plnl(
                networks[n * views : (n + 1) * views],
                sets[n].to(batch.targets),
                guesses[n],
                total=batch.num_labelled,
                guessed=int(guessed[n]),
                consistency=min(max(epochs_since / self.consistency_epochs, 0.0), 1.0),
            )
            for n in range(NETWORKS)
        ]
        return torch.stack(losses).sum()

    def forward(
        self, first: Views, second: Views, indices: Tensor, *, epoch: float, sizes: RowCounts = None
    ) -> Tensor:
        """Returns the sum of both networks' losses, and records their outputs.

        Args:
            first: logits of one network, [batch, views, classes] or a tensor for each view, the
                least augmented view first.
            second: logits of the other network.
            indices: the samples' rows in the labels that the loss was built with, [batch].
            epoch: the current epoch, which may be fractional.
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: an input has the wrong shape, type or number of rows.
        """
        a, b = as_views(first, "logits"), as_views(second, "logits")
        if len(a) != len(b):
            raise LossError(f"logits must have the same number of views, got {len(a)} and {len(b)}")
        features: dict[str, Views] = {"networks": [*a, *b]}
        indices, targets = self.labels_of(indices, a[0])
        return self.evaluate(features, targets, indices=indices, epoch=epoch, sizes=sizes)


def plnl(
    views: Sequence[Float[Tensor, "rows classes"]],
    ybar: Float[Tensor, "rows classes"],
    guesses: Int[Tensor, " rows"],
    *,
    total: int,
    guessed: int,
    consistency: float,
) -> Float[Tensor, ""]:
    """Loss of one of PLNL's two networks (Li, Li and Jia 2025): the equation of `Plnl`.

    The first term is SCL-LOG on the enhanced sets, the second the supervised loss of the m samples
    whose label is guessed. p and f are of the first view, p^v of another view, and q is p outside
    the set, normalised, without gradient.

    Args:
        views: logits of this process's samples, one tensor a view, the first the least augmented.
        ybar: their complementary labels, the added ones included, 0 or 1.
        guesses: their guessed classes, -1 for none.
        total: samples in the whole batch; 0 gives a loss of 0.
        guessed: m, the samples of the whole batch whose label is guessed.
        consistency: w.

    Raises:
        ValueError: a set is empty or holds every class, or is not of 0 and 1.
    """
    logits = checked_logits(views[0], ybar)
    log_p = logits.log_softmax(1)
    scl_log = -(ybar * log1m_exp(log_p)).sum() / max(total, 1)
    has_guess = guesses >= 0
    targets = F.one_hot(guesses[has_guess], logits.shape[1]).to(logits)
    bce = F.binary_cross_entropy_with_logits(logits[has_guess], targets, reduction="sum")
    q = log_p.detach().masked_fill(ybar == 1, -torch.inf).softmax(1)
    kl = [F.kl_div(view.to(q).log_softmax(1), q, reduction="sum") for view in views[1:]]
    mean_kl = torch.stack([scl_log.new_zeros(()), *kl]).sum() / max(total, 1)
    return scl_log + bce / max(guessed * logits.shape[1], 1) + consistency * mean_kl


class PlnlMemory(Memory):
    """Two networks' outputs over epochs, guessed labels and enhanced sets (Li et al. 2025).

    A guess for a network is made from the outputs of the other. All processes hold the same.

    Attributes:
        logits: of each network for each row when it was last seen, [networks, rows, classes].
        history: probabilities at the ends of the last epochs, oldest first,
            [networks, epochs, rows, classes].
        sets: complementary labels, the added ones included, [networks, rows, classes].
        guesses: each row's guessed class, or -1, [networks, rows].
        closed: number of epochs done.
    """

    logits: Tensor
    history: Tensor
    sets: Tensor
    guesses: Tensor
    closed: Tensor
    rows: Tensor
    ybar: Tensor

    def __init__(
        self, rows: Int[Tensor, " labelled"], ybar: Float[Tensor, "labelled classes"], epochs: int
    ) -> None:
        """Starts without guesses, with uniform probabilities and the given complementary labels.

        `rows` are the numbers of all labelled rows, in any order; `epochs` are averaged.
        """
        super().__init__()
        order = rows.argsort()
        sets = ybar[order]
        self.register_buffer("rows", rows[order], persistent=False)
        self.register_buffer("ybar", sets, persistent=False)
        self.register_buffer("sets", sets.repeat(NETWORKS, 1, 1))
        self.register_buffer("guesses", rows.new_full((NETWORKS, len(rows)), -1))
        self.register_buffer("logits", torch.zeros_like(self.sets))
        uniform = torch.full_like(sets, 1 / sets.shape[1])
        self.register_buffer("history", uniform.repeat(NETWORKS, epochs, 1, 1))
        self.register_buffer("closed", torch.zeros((), dtype=torch.int64))

    def sets_and_guesses(self, rows: Int[Tensor, " batch"]) -> tuple[Tensor, Tensor]:
        """Returns sets [networks, batch, classes] and guesses [networks, batch] of some rows."""
        index = torch.searchsorted(self.rows, rows)
        return self.sets[:, index], self.guesses[:, index]

    @torch.no_grad()
    def record_logits(
        self, rows: Int[Tensor, " batch"], logits: Float[Tensor, "batch networks classes"]
    ) -> None:
        """Stores the networks' logits of some rows."""
        index = torch.searchsorted(self.rows, rows)
        self.logits[:, index] = logits.transpose(0, 1).to(self.logits)

    @torch.no_grad()
    def end_epochs(
        self, epoch: int, *, guess_from: int, sure: float, neighbours: int, taken: float
    ) -> None:
        """Ends the open epochs before `epoch`: from `guess_from` on guesses labels, enhances sets.

        See `guess` for `sure`, and `enhance` for `neighbours` and the share that is `taken`.
        """
        if epoch <= int(self.closed):
            return
        self.closed.fill_(epoch)
        self.history.copy_(torch.cat([self.history[:, 1:], self.logits.softmax(2)[:, None]], 1))
        if epoch < guess_from:
            return
        for network in range(NETWORKS):
            other = self.history[NETWORKS - 1 - network]
            self.guesses[network] = guess(other, self.sets[network], sure)
            self.sets[network] = enhance(self.logits[network], self.ybar, neighbours, taken)


def guess(
    history: Float[Tensor, "epochs rows classes"], sets: Float[Tensor, "rows classes"], sure: float
) -> Int[Tensor, " rows"]:
    """Guesses positive labels: the class of the largest mean probability over epochs, or -1.

    A class is guessed if it is no complementary label, its mean is above `sure`, and all epochs
    agree on the most probable class.
    """
    probability, label = history.mean(0).max(1)
    is_candidate = sets.gather(1, label[:, None])[:, 0] == 0
    is_steady = (history.argmax(2) == history[0].argmax(1)).all(0)
    return torch.where(is_candidate & is_steady & (probability > sure), label, -1)


def enhance(
    logits: Float[Tensor, "rows classes"],
    ybar: Float[Tensor, "rows classes"],
    neighbours: int,
    share: float,
) -> Float[Tensor, "rows classes"]:
    """Enhances negative labels: adds the complementary labels that most neighbours have.

    A row's neighbours are the rows with the largest cosine of logits. A set of s labels could take
    K - 1 - s more: a row whose largest probability is above the mean of all rows takes the `share`
    of these, rounded up, that most neighbours exclude; any other row takes one. Labels that are in
    the set already count among those taken.
    """
    count, classes = ybar.shape
    unit = F.normalize(logits, dim=1)
    k = min(neighbours, count - 1)
    votes = torch.zeros_like(ybar)
    all_rows = torch.arange(count, device=ybar.device)
    for rows in torch.split(all_rows, max(1, STRIP // max(count, 1))):
        cosines = unit[rows] @ unit.T
        cosines.scatter_(1, rows[:, None], -torch.inf)
        votes[rows] = ybar[cosines.topk(k, 1).indices].sum(1)
    room = classes - 1 - ybar.sum(1)
    confidence = logits.softmax(1).amax(1)
    is_confident = confidence > confidence.mean()
    taken = torch.where(is_confident, (share * room).ceil(), 1.0).minimum(room)
    rank = votes.argsort(stable=True, dim=1, descending=True).argsort(1)
    return torch.maximum(ybar, (rank < taken[:, None]).to(ybar))
