"""Embeds a data set in the tasks of an executor, such as a Ray cluster: a part of the rows each.

The files are those of `heron.retrieval.embed`, and either goes on where the other stopped.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from heron.base.errors import RetrievalError
from heron.base.workers import Executor
from heron.distributed.agreement import differences
from heron.distributed.collectives import world_size
from heron.retrieval.embed import Choice, Embedder, open_embedder, write
from heron.retrieval.embedding_model import open_run
from heron.retrieval.embeddings import Embeddings
from heron.training.pretrained import weights_sha256


@dataclass(frozen=True)
class _Job:
    """Embeds a part, in any process: all that it needs to open the model and the data."""

    run: str
    out: str
    choice: Choice
    overrides: Sequence[str]
    trust_code: bool = False
    plan: Mapping[str, Any] = field(default_factory=dict)

    def open(self, threads: int | None = None) -> tuple[Embedder, dict[str, Any]]:
        """Opens model and data; `threads` applies unless the experiment sets its own number."""
        model, config, checkpoint = open_run(self.run, self.overrides, self.trust_code, threads)
        return open_embedder(model, weights_sha256(checkpoint), config, self.out, self.choice)

    @cached_property  # a process keeps it from part to part
    def _embedder(self) -> Embedder:
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))  # Ray's: the CPUs of a task
        embedder, own_plan = self.open(threads)
        if differ := differences(self.plan, own_plan):
            raise RetrievalError(
                f"a task would embed something different: {'; '.join(differ)}; if the run is still "
                "training, pass the folder of a checkpoint"
            )
        return embedder

    def __call__(self, number: int) -> int:
        """Embeds a part, and returns how many rows it has."""
        return sum(self._embedder.run([number]))


def embed_on(
    executor: Executor,
    run: str | Path,
    out: str | Path,
    choice: Choice | None = None,
    overrides: Sequence[str] = (),
    progress: bool = True,
    overwrite: bool = False,
    trust_code: bool = False,
) -> Embeddings:
    """Embeds a data set as `embed` does, each missing part as an item of an executor.

    Every process that works for it sees the run, the data set and `out` at the same paths. Raises
    what `embed` raises, and a ShardError, which names the part, where processes died on it.
    """
    if world_size() > 1:
        raise RetrievalError(
            f"{world_size()} processes were started, but embedding in tasks needs only one, "
            "because the tasks of a cluster do the work; remove `accelerate launch`, or --address"
        )
    job = _Job(str(run), str(out), choice or Choice(), overrides, trust_code)
    embedder, plan = job.open()

    def embed_parts(missing: list[int]) -> Iterator[int]:
        parts = [_Part(number) for number in missing]
        with closing(executor.map(replace(job, plan=plan), parts)) as results:
            for _, rows in results:
                yield rows

    return write(embedder, plan, str(run), embed_parts, progress, overwrite)


class _Part(int):
    """The number of a part, which messages call so."""

    def __str__(self) -> str:
        return f"part {int(self)}"
