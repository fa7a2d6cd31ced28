"""Bytes that the processes of a group exchange in a step, counted.

Every collective goes through torch's dispatcher, whoever asks for it: `gather` of
`collectives` and its backward, the sums of batch norm, DistributedDataParallel.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.scaling_turns import Gate
from heron.data.batches import Batch
from heron.data.plan import even_sizes, even_slice
from heron.data.random_keys import rng_keys
from heron.distributed import collectives
from heron.distributed.sync_batchnorm import synchronise
from heron.experiment.options import Optim
from heron.losses.exchange import ShardSizes
from heron.losses.named_terms import Terms
from heron.losses.objective import Objective, gather_batch
from heron.models.heterogeneous import Heterogeneous
from heron.models.options import Cnn, ModelConfig
from heron.training.optim import build_optimizer

VIEWS, LABELS, LEVELS = 2, 40, 3
# What each kind is, and over how many processes' parts its bytes are counted.
KINDS: dict[str, str] = {
    "gathered": "vectors and labels of others, and their batch norm's moments, forward",
    "scattered": "gradients of own vectors from others, backward",
    "statistics": "sums of batch norm, backward",
    "gradients": "of the parameters",
}
STEADY = 3  # the step that is counted: DDP agrees on its buckets after the first


@dataclass(frozen=True)
class Case:
    """A step whose bytes are counted.

    Attributes:
        terms: the objective.
        labelled: rows of the global batch; `unlabelled` too.
        size: of the pictures, a side.
        channels: of the encoder's stages.
        width: of a projection.
        matryoshka: widths that terms compare.
    """

    terms: Terms
    labelled: int
    unlabelled: int
    size: int
    channels: tuple[int, ...]
    width: int
    matryoshka: tuple[int, ...] = ()

    def build(self) -> tuple[Objective, Heterogeneous]:
        objective = Objective(self.terms, self.matryoshka)
        config = ModelConfig(
            encoder=Cnn(channels=list(self.channels)),
            projection_width=self.width,
            matryoshka=list(self.matryoshka),
        )
        shape = (self.size, self.size, 3)
        return objective, Heterogeneous(config, [shape] * VIEWS, LABELS, objective.terms)


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every collective while it is active, and the collectives.

    Of a gather, and of a gather's backward, what comes from other processes; of a sum the vector
    itself, which a ring sends 2 (P - 1) / P times.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.sum = "statistics"

    @contextmanager
    def sums(self, kind: str) -> Iterator[None]:
        """Count sums as something else."""
        before, self.sum = self.sum, kind
        yield
        self.sum = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            tensor_bytes = [x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor)]
            match func.__name__.partition(".")[0]:
                case "_allgather_base_":
                    kind, number = "gathered", tensor_bytes[0] - tensor_bytes[1]
                case "_reduce_scatter_base_":
                    kind, number = "scattered", tensor_bytes[1] - tensor_bytes[0]
                case "allreduce_":
                    kind, number = self.sum, sum(tensor_bytes)
                case other:
                    kind, number = other, sum(tensor_bytes)
            self.bytes[kind] += number
            self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


def count(gate: Gate, case: Case) -> None:
    """Sends the bytes of a step with random rows, and its collectives, by kind."""
    world, rank = collectives.world_size(), collectives.rank()
    torch.manual_seed(0)
    objective, model = case.build()
    synchronise(model)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)  # all have the same
    optimizer = build_optimizer(Optim(), model.parameters())
    tally = Tally()

    def hook(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        with tally.sums("gradients"):  # at once: torch's fake processes keep no promises
            done.set_result(collectives.sum_over_processes(bucket.buffer().div_(world)))
        return done

    wrapped.register_comm_hook(None, hook)
    counts = [n for n in (case.labelled, case.unlabelled) if n]
    local_sizes = [even_sizes(n, world)[rank] for n in counts]
    sizes = ShardSizes(even_sizes(case.labelled, world), even_sizes(case.unlabelled, world))
    local_labelled = even_slice(case.labelled, rank, world)
    labels = (torch.rand(case.labelled, LABELS) < 0.3).float()[local_labelled]
    paths = torch.randint(0, 2, (case.labelled, LEVELS))[local_labelled]
    rows = torch.arange(sum(local_sizes))
    row_keys = rng_keys(0, torch.zeros_like(rows), rows)
    batch = Batch({}, labels, rows, row_keys, local_sizes, paths)
    known_labels = labels.new_zeros(sum(local_sizes), LABELS)
    known_labels[: len(labels)] = labels  # for parts that learn from labels
    for _ in range(STEADY):
        inputs = [torch.rand(sum(local_sizes), 3, case.size, case.size) for _ in range(VIEWS)]
        tally.bytes.clear()
        tally.calls.clear()
        with tally:
            features = wrapped(inputs, row_keys, local_sizes, known_labels)
            gathered = gather_batch(features, batch, inputs, sizes, objective, 1.0)
            loss, _ = objective(gathered)
            optimizer.zero_grad()
            (loss * world).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    kinds = set(KINDS) | set(tally.bytes)  # of some there may be none
    totals = [{kind: counted[kind] for kind in kinds} for counted in (tally.bytes, tally.calls)]
    gate.connection.send(tuple(totals))
