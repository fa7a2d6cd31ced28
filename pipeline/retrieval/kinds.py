"""Kinds of index: what each one takes, and which one N, d and a memory budget ask for."""

import math
import re
from pathlib import Path
from typing import Literal, get_args

from heron.pipeline.config.errors import RetrievalError
from heron.shards.manifest import Record

Kind = Literal["flat", "ivf", "ivfpq", "hnsw"]
Asked = Literal["flat", "ivf", "ivfpq", "hnsw", "auto"]
Metric = Literal["cosine", "inner_product", "euclidean"]
KINDS: tuple[Kind, ...] = get_args(Kind)
METRICS: tuple[Metric, ...] = get_args(Metric)

# FAISS warns below 39 points a centroid and leaves out what is above 256 (faiss/Clustering.h).
# k-means costs points x centroids, and beyond 64 takes several times as long as adding does.
LEAST_POINTS, POINTS = 39, 64
SCAN_VALUES = 2**24  # N d up to which `auto` compares with all: some milliseconds a query
LINKS = 32  # of HNSW, a vector and level; twice as many on the lowest
BITS = 8  # of a subvector's code
BLOCK = 16_384  # vectors handled at a time
WORKSPACE = 48 * 2**20  # FAISS's tables of distances, 4,096 x 1,024 of them a thread, and slack
PQ_SAMPLE = POINTS * 2**BITS  # vectors that the codes are learnt from


class Plan(Record):
    """What an index is made of, and the bytes that this takes.

    Attributes:
        kind: of index.
        lists: of an inverted file, into which k-means puts the vectors.
        subvectors: that product quantisation codes a vector as.
        bits: of the code of each.
        links: of HNSW.
        training: vectors that k-means learns from.
        table: whether FAISS keeps the products of all centroids and codes, for speed.
        index_bytes: predicted, of the index when it is open.
        build_bytes: predicted, at most while it is built, the mapped embeddings included.
        memory_bytes: the budget.
        mapped: whether the index outgrows the budget, and is mapped from its file.
        why: this kind.
    """

    kind: Kind
    lists: int = 0
    subvectors: int = 0
    bits: int = 0
    links: int = 0
    training: int = 0
    table: bool = False
    index_bytes: int
    build_bytes: int
    memory_bytes: int
    mapped: bool = False
    why: str


class Shape(Record):
    """What a plan is made for.

    Attributes:
        count: vectors, N.
        dim: d.
        part_bytes: of the largest file of embeddings, which is mapped while it is read.
        held_out: vectors that are queries, and not to be trained on.
        euclidean: whether codes are compared by distance, for which FAISS can keep a table.
    """

    count: int
    dim: int
    part_bytes: int = 0
    held_out: int = 0
    euclidean: bool = False

    @property
    def reading(self) -> int:
        """Bytes to go through the embeddings: a file, a block, numbers, the order of the keys."""
        block = min(BLOCK, self.count) * self.dim * 4
        return self.part_bytes + 2 * block + 24 * self.count + WORKSPACE


def choose(asked: Asked, shape: Shape, memory_bytes: int | None = None) -> Plan:
    """The plan for a kind, or for the most exact kind that fits a budget.

    `auto` takes `flat` while comparing with all takes milliseconds (N d <= 2^24), else `ivf`,
    else `ivfpq` with as many subvectors as fit, else `ivf` mapped from its file. It never takes
    `hnsw`, which takes longest to build and must be asked for.

    Args:
        asked: a kind, or `auto`.
        shape: of the vectors.
        memory_bytes: the budget; None: half of what the machine has free.

    Raises:
        RetrievalError: there is no such kind, too few vectors for it, or too little memory.
    """
    budget = free_bytes() // 2 if memory_bytes is None else memory_bytes
    count, dim = shape.count, shape.dim
    if budget < shape.reading:
        raise RetrievalError(
            f"a budget of {in_bytes(budget)} is too little to read {count:,} vectors of {dim} "
            f"dimensions: expected at least {in_bytes(shape.reading)}; give more --memory, or "
            "embed with fewer --part-rows"
        )
    if asked == "flat":
        return _flat(shape, budget, "asked for")
    if asked == "hnsw":
        return _hnsw(shape, budget)
    if asked == "ivf":
        return _ivf(shape, budget, "asked for")
    if asked == "ivfpq":
        return _ivfpq(shape, budget, "asked for")
    if asked != "auto":
        raise RetrievalError(f"unknown kind '{asked}'; expected {', '.join(KINDS)} or auto")
    scanned = f"N d = {count * dim:,}"
    if count * dim <= SCAN_VALUES or most_bits(count - shape.held_out) < BITS:
        return _flat(shape, budget, f"{scanned}: exact search takes milliseconds")
    plan = _ivf(shape, budget, f"{scanned} is too much to compare with all; the vectors fit")
    if not plan.mapped:
        return plan
    coded = _ivfpq(shape, budget, f"{scanned} is too much to compare with all, the vectors to hold")
    if not coded.mapped:
        return coded
    why = f"{scanned} is too much to compare with all, and even codes are too much to hold"
    return plan.model_copy(update={"why": why})


def _flat(shape: Shape, budget: int, why: str) -> Plan:
    size = 4 * shape.count * shape.dim
    mapped = size + shape.reading > budget
    return Plan(
        kind="flat",
        index_bytes=0 if mapped else size,
        build_bytes=shape.reading + (0 if mapped else size),
        memory_bytes=budget,
        mapped=mapped,
        why=why,
    )


def _hnsw(shape: Shape, budget: int) -> Plan:
    links = 2 * LINKS + LINKS / (LINKS - 1)  # the lowest level, and those above: a geometric sum
    size = math.ceil(shape.count * (4 * shape.dim + 4 * links + 12))
    need = 2 * size + shape.reading  # growing arrays are copied
    if need > budget:
        raise RetrievalError(
            f"hnsw over {shape.count:,} vectors of {shape.dim} dimensions needs {in_bytes(need)} "
            f"to build; found a budget of {in_bytes(budget)}; give more --memory, or --kind ivfpq"
        )
    return Plan(
        kind="hnsw",
        links=LINKS,
        index_bytes=size,
        build_bytes=need,
        memory_bytes=budget,
        why="asked for",
    )


def _ivf(shape: Shape, budget: int, why: str) -> Plan:
    if (trained := shape.count - shape.held_out) < LEAST_POINTS:
        raise RetrievalError(
            f"ivf needs {LEAST_POINTS} vectors besides {shape.held_out} queries, to train on; "
            f"found {trained}; take --kind flat"
        )
    return _lists(_bare("ivf", budget, why), shape)


def _ivfpq(shape: Shape, budget: int, why: str) -> Plan:
    """As many subvectors as fit, from one for two dimensions to one for eight.

    One a dimension would find a little more, and take FAISS twice as long to learn. A mapped
    index has the longest codes: there they need not fit.
    """
    bits = min(BITS, most_bits(shape.count - shape.held_out))
    if bits < 4:
        raise RetrievalError(
            f"ivfpq needs {LEAST_POINTS * 2**4} vectors besides {shape.held_out} queries, to learn "
            f"16 codes from; found {shape.count - shape.held_out}; take --kind flat"
        )
    dim = shape.dim
    plans = [
        _lists(_bare("ivfpq", budget, f"{why}; {m} codes of {bits} bits a vector", m, bits), shape)
        for m in range(max(1, dim // 2), 0, -1)
        if dim % m == 0 and (m * 8 >= dim or m == 1)
    ]
    return next((plan for plan in plans if not plan.mapped), plans[0])


def _bare(kind: Kind, budget: int, why: str, subvectors: int = 0, bits: int = 0) -> Plan:
    """A plan of an inverted file without its numbers."""
    return Plan(
        kind=kind,
        subvectors=subvectors,
        bits=bits,
        index_bytes=0,
        build_bytes=0,
        memory_bytes=budget,
        why=why,
    )


def _lists(plan: Plan, shape: Shape) -> Plan:
    """Lists, training sample and bytes of an inverted file.

    The number of lists is FAISS's advice for up to a million vectors, 4 sqrt(N) (its wiki,
    Guidelines to choose an index), and at most one for 39 vectors to train on.
    """
    count, dim, budget = shape.count, shape.dim, plan.memory_bytes
    trained = count - shape.held_out
    lists = max(1, min(round(4 * math.sqrt(count)), trained // LEAST_POINTS))
    coded = plan.kind == "ivfpq"
    code = math.ceil(plan.subvectors * plan.bits / 8) if coded else 4 * dim
    fixed = lists * (4 * dim + 128)  # centroids, and what a list costs when it is empty
    if coded:
        fixed += 4 * dim * 2**plan.bits
    size = count * (code + 8) + fixed
    # Training: the sample, and k-means' two copies of the centroids; the codes' own sample, twice.
    learning = fixed + 3 * lists * 4 * dim + (2 * min(count, PQ_SAMPLE) * 4 * dim if coded else 0)
    room = budget - shape.reading - learning
    points = min(POINTS, max(LEAST_POINTS, room // (lists * (4 * dim + 16))))
    training = min(trained, max(points * lists, LEAST_POINTS * 2**plan.bits if coded else 0))
    learning += training * (4 * dim + 16)
    mapped = size + shape.reading > budget or learning + shape.reading > budget
    held = fixed if mapped else size
    table = 4 * lists * plan.subvectors * 2**plan.bits
    fits = coded and shape.euclidean and shape.reading + held + table <= budget and table < 2**31
    held += table if fits else 0
    return plan.model_copy(
        update={
            "lists": lists,
            "training": training,
            "table": fits,
            "index_bytes": held,
            "build_bytes": shape.reading + max(learning, held),
            "mapped": mapped,
        }
    )


def most_bits(count: int) -> int:
    """The longest code, in bits, that so many vectors can teach: 39 a centroid."""
    return int(math.log2(max(1, count / LEAST_POINTS)))


def free_bytes() -> int:
    """Memory that the machine can give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RetrievalError("/proc/meminfo has no MemAvailable; give --memory, such as 2GB")


def in_bytes(count: float) -> str:
    """A number of bytes in words: `1.25 GB`."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if count >= u), (1e3, "kB"))
    return f"{count / unit:.3g} {name}"


def bytes_of(text: str) -> int:
    """The number of bytes that a text names: `2GB`, `500 MB`, `1.5GiB`.

    Raises:
        ValueError: it names none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?) *(?:([kMGT])(i?)B|B?)", text.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"'{text}' is no size; expected a number and a unit, such as 500MB, 2GB")
    number, prefix, binary = found.groups()
    power = " kmgt".index((prefix or " ").lower())
    return int(float(number) * (1024 if binary else 1000) ** power)
