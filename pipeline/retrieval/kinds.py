"""Kinds of index: what each one takes, and which one N, d and a memory budget ask for."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import ByteSize, Field, TypeAdapter, ValidationError, model_validator

from heron.pipeline.config.errors import RetrievalError
from heron.shards.artefact import Count, Record

Kind = Literal["flat", "ivf", "sq8", "rabitq", "ivfpq", "hnsw"]
Asked = Literal["flat", "ivf", "sq8", "rabitq", "binary", "ivfpq", "hnsw", "auto"]
MapKind = Literal["pca", "umap", "none"]  # how a map is drawn: see `map`
Metric = Literal["cosine", "inner_product", "euclidean"]
Compared = Literal["inner_product", "euclidean"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LISTED: tuple[Kind, ...] = "ivf", "sq8", "rabitq", "ivfpq"  # inverted files
CODED: tuple[Kind, ...] = "sq8", "rabitq", "ivfpq"  # of codes, not of vectors
METRICS: tuple[Metric, ...] = get_args(Metric)

# FAISS warns below 39 points a centroid and leaves out what is above 256 (faiss/Clustering.h).
# k-means costs points x centroids, and beyond 64 takes several times as long as adding does.
LEAST_POINTS, POINTS = 39, 64
SCAN_VALUES = 2**24  # N d up to which `auto` compares with all: some milliseconds a query
LINKS = 32  # of HNSW, a vector and level; twice as many on the lowest
BITS = 8  # of a subvector's code
# Of a number by RaBitQ: with 7, codes are as long as those of `sq8`. `auto` takes 4 at least: with
# fewer, the codes of `ivfpq` find more in as many bytes.
MOST_RABITQ, LEAST_RABITQ = 6, 4
BLOCK = 16_384  # vectors handled at a time
WORKSPACE = 48 * 2**20  # FAISS's tables of distances, 4,096 x 1,024 of them a thread, and slack
MOST_TABLE = 2**31  # bytes: FAISS keeps no larger one
Number = Annotated[int, Field(ge=0, le=2**31 - 1)]  # that FAISS can hold
PQ_SAMPLE = POINTS * 2**BITS  # vectors that codes are learnt from


class Plan(Record):
    """What an index is made of, and the bytes that this takes."""

    kind: Kind
    lists: Number = 0  # of an inverted file, into which k-means puts the vectors
    subvectors: Number = 0  # that product quantisation codes a vector as
    bits: int = Field(0, ge=0, le=BITS)  # of the code of each; of each number by RaBitQ
    links: Number = 0  # of HNSW
    training: Count = 0  # vectors that k-means learns from
    table: bool = False  # whether FAISS keeps the products of centroids and codes, for speed
    index_bytes: Count  # predicted, of the index when it is open
    build_bytes: Count  # predicted, at most while it is built, the mapped embeddings included
    memory_bytes: Count  # the budget
    mapped: bool = False  # from its file, as the index outgrows the budget
    why: str  # this kind

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        codes, lists = self.kind == "ivfpq", self.kind in LISTED
        bits = codes or self.kind == "rabitq"
        there = {"lists": lists, "training": lists, "subvectors": codes, "bits": bits}
        for name, wanted in (there | {"links": self.kind == "hnsw"}).items():
            if (getattr(self, name) > 0) != wanted:
                raise ValueError(f"{name} of {self.kind}: {getattr(self, name)}")
        if (self.table and not codes) or (self.mapped and self.links):
            raise ValueError(f"{self.kind} has a table, or is mapped")
        if self.table and self.table_bytes >= MOST_TABLE:
            raise ValueError(f"a table of {self.table_bytes:,} bytes; expected less than 2 GiB")
        return self

    @property
    def table_bytes(self) -> int:
        """Bytes of the products of centroids and codes, which FAISS keeps with `table`."""
        return 4 * self.lists * self.subvectors << self.bits

    @property
    def factory(self) -> str:
        """The kind as `faiss.index_factory` writes it."""
        return {
            "flat": "Flat",
            "hnsw": f"HNSW{self.links},Flat",
            "ivf": f"IVF{self.lists},Flat",
            "sq8": f"IVF{self.lists},SQ8",
            "rabitq": f"IVF{self.lists},RaBitQ{self.bits}",
            "ivfpq": f"IVF{self.lists},PQ{self.subvectors}x{self.bits}np",  # np: not polysemous
        }[self.kind]

    @property
    def setting(self) -> str:
        """What of a search trades time for recall, by FAISS's name; none of an exact one."""
        return {"flat": "", "hnsw": "efSearch"}.get(self.kind, "nprobe")


def code_bytes(kind: Kind, dim: int, subvectors: int = 0, bits: int = 0) -> int:
    """Returns the bytes of a vector in a list: of the vector, or of its code."""
    if kind == "rabitq":  # signs, the other bits, and FAISS's factors of the vector: 2 or 5 floats
        return math.ceil(dim / 8) + math.ceil(dim * (bits - 1) / 8) + (20 if bits > 1 else 8)
    return {"sq8": dim, "ivfpq": math.ceil(subvectors * bits / 8)}.get(kind, 4 * dim)


class VectorSet(Record):
    """The vectors that a plan is made for."""

    count: int  # N
    dim: int  # d
    part_bytes: int = 0  # of the largest file of embeddings, which is mapped while it is read
    held_out: int = 0  # vectors that are queries, and not to be trained on
    euclidean: bool = False  # codes are compared by distance, for which FAISS can keep a table

    @property
    def reading(self) -> int:
        """Bytes to go through the embeddings: a file, a block, numbers, the order of the keys."""
        block = min(BLOCK, self.count) * self.dim * 4
        return self.part_bytes + 2 * block + 24 * self.count + WORKSPACE

    @property
    def trainable(self) -> int:
        """How many vectors may be trained on."""
        return self.count - self.held_out


def compared_by(metric: Metric, kind: Kind) -> Compared:
    """Returns what FAISS computes for a metric: see `IndexManifest`."""
    codes = metric == "cosine" and kind in CODED
    return "euclidean" if codes or metric == "euclidean" else "inner_product"


def choose(asked: Asked, vectors: VectorSet, memory_bytes: int | None = None) -> Plan:
    """Returns the plan for a kind, or for the most exact kind that fits a budget.

    `auto` takes `flat` while comparing with all takes milliseconds (N d <= 2^24), else `ivf`,
    else `sq8`, else `rabitq` of 6 to 4 bits, else `ivfpq` with as many subvectors as fit, else
    `ivf` mapped from its file. It never takes `hnsw`, which takes longest to build and must be
    asked for. The budget is by default half of the memory that the machine has free.

    Raises:
        RetrievalError: there is no such kind, too few vectors for it, or too little memory.
    """
    budget = free_bytes() // 2 if memory_bytes is None else memory_bytes
    count, dim = vectors.count, vectors.dim
    if budget < vectors.reading:
        raise RetrievalError(
            f"a budget of {in_bytes(budget)} is too little to read {count:,} vectors of {dim} "
            f"dimensions: expected at least {in_bytes(vectors.reading)}; give more --memory, or "
            "embed with fewer --part-rows"
        )
    if asked in PLANNERS:
        return PLANNERS[asked](vectors, budget, "asked for")
    if asked != "auto":
        raise RetrievalError(f"unknown kind '{asked}'; expected {', '.join(PLANNERS)} or auto")
    scanned = f"N d = {count * dim:,}"
    if count * dim <= SCAN_VALUES or most_bits(vectors.trainable) < BITS:
        return _flat(vectors, budget, f"{scanned}: exact search takes milliseconds")
    scanned += " is too much to compare with all"
    plan = _inverted_file("ivf", vectors, budget, f"{scanned}; the vectors fit")
    if not plan.mapped:
        return plan
    for kind in CODED:  # the most exact first
        coded = PLANNERS[kind](vectors, budget, f"{scanned}, the vectors to hold")
        if not coded.mapped and (kind != "rabitq" or coded.bits >= LEAST_RABITQ):
            return coded
    return plan.model_copy(update={"why": f"{scanned}, and even codes are too much to hold"})


def _flat(vectors: VectorSet, budget: int, why: str) -> Plan:
    size = 4 * vectors.count * vectors.dim
    mapped = size + vectors.reading > budget
    resident = 0 if mapped else size
    known: dict[str, Any] = {"kind": "flat", "memory_bytes": budget, "mapped": mapped, "why": why}
    return Plan(index_bytes=resident, build_bytes=vectors.reading + resident, **known)


def _hnsw(vectors: VectorSet, budget: int, why: str) -> Plan:
    links = 2 * LINKS + LINKS / (LINKS - 1)  # the lowest level, and those above: a geometric sum
    size = math.ceil(vectors.count * (4 * vectors.dim + 4 * links + 12))
    need = 2 * size + vectors.reading  # growing arrays are copied
    if need > budget:
        raise RetrievalError(
            f"hnsw over {vectors.count:,} vectors of {vectors.dim} dimensions needs "
            f"{in_bytes(need)} to build; found a budget of {in_bytes(budget)}; give more --memory, "
            "or --kind ivfpq"
        )
    known: dict[str, Any] = {"kind": "hnsw", "links": LINKS, "memory_bytes": budget, "why": why}
    return Plan(index_bytes=size, build_bytes=need, **known)


def _rabitq(vectors: VectorSet, budget: int, why: str, most: int = MOST_RABITQ) -> Plan:
    """Plans as many bits a number as fit, and at most so many."""
    plans = [
        _inverted_file("rabitq", vectors, budget, f"{why}; {bits} bits a number", bits=bits)
        for bits in range(most, 0, -1)
    ]
    return next((plan for plan in plans if not plan.mapped), plans[0])


def _ivfpq(vectors: VectorSet, budget: int, why: str) -> Plan:
    """Plans as many subvectors as fit, from one for two dimensions to one for eight."""
    bits, dim = min(BITS, most_bits(vectors.trainable)), vectors.dim
    if bits < 4:
        raise RetrievalError(
            f"ivfpq needs {LEAST_POINTS * 2**4} vectors besides {vectors.held_out} queries, to "
            f"learn 16 codes from; found {vectors.trainable}; take --kind flat"
        )
    # One a dimension would find a little more, and take FAISS twice as long to learn. A mapped
    # index has the longest codes: there they need not fit.
    plans = [
        _inverted_file(
            "ivfpq", vectors, budget, f"{why}; {m} codes of {bits} bits a vector", m, bits
        )
        for m in range(max(1, dim // 2), 0, -1)
        if dim % m == 0 and (m * 8 >= dim or m == 1)
    ]
    return next((plan for plan in plans if not plan.mapped), plans[0])


def _inverted_file(
    kind: Kind, vectors: VectorSet, budget: int, why: str, subvectors: int = 0, bits: int = 0
) -> Plan:
    """Plans an inverted file of vectors, or of their codes: lists, training sample and bytes."""
    if vectors.trainable < LEAST_POINTS:
        raise RetrievalError(
            f"{kind} needs {LEAST_POINTS} vectors besides {vectors.held_out} queries, to train on; "
            f"found {vectors.trainable}; take --kind flat"
        )
    count, dim, reading = vectors.count, vectors.dim, vectors.reading
    # FAISS's advice for up to a million vectors (its wiki, Guidelines to choose an index), and at
    # most a list for 39 vectors to train on.
    lists = max(1, min(round(4 * math.sqrt(count)), vectors.trainable // LEAST_POINTS))
    fixed = lists * (4 * dim + 128)  # centroids, and what a list costs when it is empty
    learning = 3 * lists * 4 * dim  # k-means has two copies of the centroids
    code, least_training = code_bytes(kind, dim, subvectors, bits), 0
    if kind in CODED:
        learning += 2 * min(count, PQ_SAMPLE) * 4 * dim  # the codes' own sample, twice
    if kind == "rabitq":
        fixed += 4 * dim * dim  # the rotation
        reading += 4 * dim * min(count, BLOCK)  # and what it makes of a block
    if subvectors:
        fixed += 4 * dim * 2**bits
        least_training = LEAST_POINTS * 2**bits
    learning += fixed
    spare = budget - reading - learning
    points = min(POINTS, max(LEAST_POINTS, spare // (lists * (4 * dim + 16))))
    training = min(vectors.trainable, max(points * lists, least_training))
    learning += training * (4 * dim + 16)
    size = count * (code + 8) + fixed
    mapped = max(size, learning) + reading > budget
    resident = fixed if mapped else size
    table_bytes = 4 * lists * subvectors * 2**bits
    fits = reading + resident + table_bytes <= budget and table_bytes < MOST_TABLE
    table = bool(subvectors) and vectors.euclidean and fits
    resident += table_bytes if table else 0
    return Plan(
        kind=kind,
        lists=lists,
        subvectors=subvectors,
        bits=bits,
        training=training,
        table=table,
        index_bytes=resident,
        build_bytes=reading + max(learning, resident),
        memory_bytes=budget,
        mapped=mapped,
        why=why,
    )


PLANNERS: dict[Asked, Callable[[VectorSet, int, str], Plan]] = {
    "flat": _flat,
    "ivf": partial(_inverted_file, "ivf"),
    "sq8": lambda vectors, budget, why: _inverted_file(
        "sq8", vectors, budget, f"{why}; a byte a number"
    ),
    "rabitq": _rabitq,
    "binary": partial(_rabitq, most=1),  # the signs, after a random rotation
    "ivfpq": _ivfpq,
    "hnsw": _hnsw,
}


def most_bits(count: int) -> int:
    """Returns the longest code, in bits, that so many vectors can teach: 39 a centroid."""
    return int(math.log2(max(1, count / LEAST_POINTS)))


def free_bytes() -> int:
    """Returns the memory that the machine can give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RetrievalError("/proc/meminfo has no MemAvailable; give --memory, such as 2GB")


def in_bytes(count: float) -> str:
    """Returns a number of bytes in words: `1.25 GB`."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if count >= u), (1e3, "kB"))
    return f"{count / unit:.3g} {name}"


def bytes_of(text: str) -> int:
    """Returns the number of bytes that a text names (`2GB`, `1.5GiB`); ValueError if it is none."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text.strip()))
    except ValidationError:
        raise ValueError(
            f"'{text}' is no size; expected a number and a unit, such as 500MB, 2GB"
        ) from None
