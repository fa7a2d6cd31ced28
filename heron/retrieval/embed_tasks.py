"""Embeds a data set in the tasks of an executor, such as a Ray cluster: a part of the rows each.

The files are those of `heron.retrieval.embed`, and either goes on where the other stopped.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from heron.config.errors import RetrievalError
from heron.distributed.agreement import differences
from heron.distributed.collectives import world_size
from heron.retrieval.embed import Choice, Embedder, finish, open_embedder, start_folder
from heron.retrieval.embedding_model import open_run
from heron.retrieval.embeddings import Embeddings
from heron.shards.atomic import locked
from heron.shards.workers import Executor
from heron.training.pretrained import weights_sha256


@dataclass(frozen=True)
class _Job:
    """What to embed: all that a task needs to open the model and the data for itself."""

    run: str
    out: str
    choice: Choice
    overrides: tuple[str, ...]
    trust_code: bool = False

    def open(self, threads: int | None = None) -> tuple[Embedder, dict[str, Any]]:
        """Opens model and data, with so many threads unless the experiment has its own number."""
        model, config, checkpoint = open_run(self.run, self.overrides, self.trust_code, threads)
        return open_embedder(model, weights_sha256(checkpoint), config, self.out, self.choice)


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
    choice = choice or Choice()
    choice = replace(choice, layers=None if choice.layers is None else tuple(choice.layers))
    job = _Job(str(run), str(out), choice, tuple(overrides), trust_code)
    embedder, plan = job.open()

    def run_parts(missing: list[int]) -> Iterator[int]:
        parts = [_Part(number) for number in missing]
        with closing(executor.map(partial(_embed_part, job, plan), parts)) as results:
            for _, rows in results:
                yield rows

    with locked(embedder.out, embedder.out.lock):
        start_folder(embedder, plan, overwrite)
        embedder.run_missing(run_parts, progress)
        finish(embedder, plan, str(run), [{n: embedder.record(n) for n in embedder.part_numbers}])
    return Embeddings.open(out, verify=False)  # it has just been written


class _Part(int):
    """The number of a part, which messages call so."""

    def __str__(self) -> str:
        return f"part {int(self)}"


@lru_cache(1)
def _opened(job: _Job) -> tuple[Embedder, dict[str, Any]]:
    """Returns the job's model and data, open; a process keeps them from part to part."""
    return job.open(int(os.environ.get("OMP_NUM_THREADS", "1")))  # Ray's: the CPUs of a task


def _embed_part(job: _Job, plan: dict[str, Any], number: int) -> int:
    """Embeds a part, and returns how many rows it has."""
    embedder, own_plan = _opened(job)
    if differ := differences(plan, own_plan):
        raise RetrievalError(
            f"a task would embed something different: {'; '.join(differ)}; if the run is still "
            "training, pass the folder of a checkpoint"
        )
    return sum(embedder.run([number]))
