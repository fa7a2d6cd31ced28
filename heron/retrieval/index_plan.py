"""Kinds of index: the memory that each needs, and which one suits N, d and a memory budget."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import ByteSize, Field, TypeAdapter, ValidationError, model_validator

from heron.base.artefact import Count, Record
from heron.base.cores import cgroup_free
from heron.base.errors import RetrievalError

Kind = Literal["flat", "ivf", "sq8", "rabitq", "ivfpq", "hnsw"]
RequestedKind = Literal["flat", "ivf", "sq8", "rabitq", "binary", "ivfpq", "hnsw", "auto"]
MapKind = Literal["pca", "umap", "none"]  # how a map is drawn: see `map`
Metric = Literal["cosine", "inner_product", "euclidean"]
Compared = Literal["inner_product", "euclidean"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LISTED: tuple[Kind, ...] = "ivf", "sq8", "rabitq", "ivfpq"  # inverted files
CODED: tuple[Kind, ...] = "sq8", "rabitq", "ivfpq"  # store codes, not vectors
METRICS: tuple[Metric, ...] = get_args(Metric)

# Points per centroid. FAISS warns below 39 and ignores those above 256 (faiss/Clustering.h);
# k-means costs points x centroids, and beyond 64 takes several times as long as adding does.
MIN_POINTS, MAX_POINTS = 39, 64
SCAN_VALUES = 2**24  # N d up to which `auto` searches exactly: some milliseconds per query
LINKS = 32  # of HNSW, per vector and level; twice as many on the lowest
BITS = 8  # of a subvector's code
# Bits per dimension of RaBitQ. With 7, codes are as long as those of `sq8`; `auto` takes at least
# 4, as with fewer the codes of `ivfpq` find more in as many bytes.
MAX_RABITQ_BITS, MIN_RABITQ_BITS = 6, 4
BLOCK = 16_384  # vectors handled at a time
WORKSPACE = 48 * 2**20  # FAISS's tables of distances, 4,096 x 1,024 per thread, and slack
MAX_TABLE = 2**31  # bytes: FAISS keeps no larger table
Number = Annotated[int, Field(ge=0, le=2**31 - 1)]  # that FAISS can hold
PQ_SAMPLE = MAX_POINTS * 2**BITS  # vectors that codes are trained on


class Plan(Record):
    """The parameters of an index, and the bytes that it takes."""

    kind: Kind
    lists: Number = 0  # of an inverted file: the clusters of k-means
    subvectors: Number = 0  # per vector, in product quantisation
    bits: int = Field(default=0, ge=0, le=BITS)  # per subvector; of RaBitQ, per dimension
    links: Number = 0  # of HNSW
    training: Count = 0  # vectors that k-means is trained on
    table: bool = False  # whether FAISS keeps the products of centroids and codes, for speed
    index_bytes: Count  # predicted, of the open index
    build_bytes: Count  # predicted peak while it is built, mapped embeddings included
    memory_bytes: Count  # the budget
    mapped: bool = False  # whether the index exceeds the budget and is memory-mapped
    why: str  # why this kind was chosen

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        quantised, listed = self.kind == "ivfpq", self.kind in LISTED
        needed = {
            "lists": listed,
            "training": listed,
            "subvectors": quantised,
            "bits": quantised or self.kind == "rabitq",
            "links": self.kind == "hnsw",
        }
        for name, is_needed in needed.items():
            if (getattr(self, name) > 0) != is_needed:
                words = "must be above 0" if is_needed else "must be 0"
                got = getattr(self, name)
                raise ValueError(f"{name} of kind {self.kind} {words}, got {got}")
        if (self.table and not quantised) or (self.mapped and self.links):
            raise ValueError(f"kind {self.kind} has a table or is mapped, which it cannot be")
        if self.table and self.table_bytes >= MAX_TABLE:
            raise ValueError(f"the table must be less than 2 GiB, got {self.table_bytes:,} bytes")
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
        """FAISS's name of the parameter that trades time for recall; "" if search is exact."""
        return {"flat": "", "hnsw": "efSearch"}.get(self.kind, "nprobe")


def code_bytes(kind: Kind, dim: int, subvectors: int = 0, bits: int = 0) -> int:
    """Returns the bytes that a list stores per vector: the vector itself, or its code."""
    if kind == "rabitq":  # signs, the other bits, and FAISS's 2 or 5 floats per vector
        return math.ceil(dim / 8) + math.ceil(dim * (bits - 1) / 8) + (20 if bits > 1 else 8)
    return {"sq8": dim, "ivfpq": math.ceil(subvectors * bits / 8)}.get(kind, 4 * dim)


class VectorSet(Record):
    """The vectors that a plan is made for."""

    count: int  # N
    dim: int  # d
    part_bytes: int = 0  # of the largest file of embeddings, which is mapped while it is read
    held_out: int = 0  # vectors used as queries, and so not for training
    euclidean: bool = False  # codes are compared by distance, for which FAISS can keep a table

    @property
    def reading_bytes(self) -> int:
        """Bytes needed to read the embeddings: a file, two blocks, numbers, the key order."""
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


def choose_plan(
    requested: RequestedKind, vectors: VectorSet, memory_bytes: int | None = None
) -> Plan:
    """Returns the plan for a kind, or for the most exact kind that fits a budget.

    `auto` takes `flat` while exact search takes milliseconds (N d <= 2^24), else `ivf`, else `sq8`,
    else `rabitq` of 6 to 4 bits, else `ivfpq` with as many subvectors as fit, else `ivf` mapped
    from its file; never `hnsw`, which is slowest to build. The budget defaults to half of the free
    memory. Raises a RetrievalError for an unknown kind, or too few vectors or too little memory for
    it.
    """
    budget = free_bytes() // 2 if memory_bytes is None else memory_bytes
    count, dim = vectors.count, vectors.dim
    if budget < vectors.reading_bytes:
        raise RetrievalError(
            f"a budget of {format_bytes(budget)} is too little to read {count:,} vectors of {dim} "
            f"dimensions, which takes at least {format_bytes(vectors.reading_bytes)}; use more "
            "--memory, or embed with fewer --part-rows"
        )
    if requested in PLANNERS:
        return PLANNERS[requested](vectors, budget, "requested")
    if requested != "auto":
        raise RetrievalError(
            f"kind must be one of {', '.join(PLANNERS)} or auto, got '{requested}'"
        )
    reason = f"N d = {count * dim:,}"
    if count * dim <= SCAN_VALUES or max_code_bits(vectors.trainable) < BITS:
        return _flat(vectors, budget, f"{reason}: exact search takes milliseconds")
    reason += " is too much for exact search"
    plan = _inverted_file("ivf", vectors, budget, f"{reason}; the vectors fit in memory")
    if not plan.mapped:
        return plan
    for kind in CODED:  # most exact first
        why = f"{reason}; the vectors do not fit in memory"
        plan_of_codes = PLANNERS[kind](vectors, budget, why)
        if not plan_of_codes.mapped and (kind != "rabitq" or plan_of_codes.bits >= MIN_RABITQ_BITS):
            return plan_of_codes
    return plan.model_copy(update={"why": f"{reason}; even codes do not fit in memory"})


def _flat(vectors: VectorSet, budget: int, why: str) -> Plan:
    size = 4 * vectors.count * vectors.dim
    mapped = size + vectors.reading_bytes > budget
    resident = 0 if mapped else size
    return Plan(
        kind="flat",
        index_bytes=resident,
        build_bytes=vectors.reading_bytes + resident,
        memory_bytes=budget,
        mapped=mapped,
        why=why,
    )


def _hnsw(vectors: VectorSet, budget: int, why: str) -> Plan:
    links = 2 * LINKS + LINKS / (LINKS - 1)  # the lowest level, plus a geometric sum of the rest
    size = math.ceil(vectors.count * (4 * vectors.dim + 4 * links + 12))
    build_bytes = 2 * size + vectors.reading_bytes  # growing arrays are copied
    if build_bytes > budget:
        raise RetrievalError(
            f"hnsw over {vectors.count:,} vectors of {vectors.dim} dimensions needs "
            f"{format_bytes(build_bytes)} to build, but the budget is {format_bytes(budget)}; use "
            "more --memory, or --kind ivfpq"
        )
    return Plan(
        kind="hnsw",
        links=LINKS,
        index_bytes=size,
        build_bytes=build_bytes,
        memory_bytes=budget,
        why=why,
    )


def _rabitq(vectors: VectorSet, budget: int, why: str, max_bits: int = MAX_RABITQ_BITS) -> Plan:
    """Plans as many bits per dimension as fit, up to `max_bits`."""
    plans = [
        _inverted_file("rabitq", vectors, budget, f"{why}; {bits} bits a number", bits=bits)
        for bits in range(max_bits, 0, -1)
    ]
    return next((plan for plan in plans if not plan.mapped), plans[0])


def _ivfpq(vectors: VectorSet, budget: int, why: str) -> Plan:
    """Plans as many subvectors as fit, from one for two dimensions to one for eight."""
    bits, dim = min(BITS, max_code_bits(vectors.trainable)), vectors.dim
    if bits < 4:
        raise RetrievalError(
            f"ivfpq needs {MIN_POINTS * 2**4} vectors besides {vectors.held_out} queries to learn "
            f"16 codes from, but there are {vectors.trainable}; use --kind flat"
        )
    # One per dimension would find a little more, and take FAISS twice as long to train. If no plan
    # fits, the index is mapped and has the longest codes, since they need not fit.
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
    if vectors.trainable < MIN_POINTS:
        raise RetrievalError(
            f"{kind} needs {MIN_POINTS} vectors besides {vectors.held_out} queries to train on, "
            f"but there are {vectors.trainable}; use --kind flat"
        )
    count, dim, reading_bytes = vectors.count, vectors.dim, vectors.reading_bytes
    # FAISS's advice for up to a million vectors (its wiki, Guidelines to choose an index), with at
    # least 39 training vectors per list.
    lists = max(1, min(round(4 * math.sqrt(count)), vectors.trainable // MIN_POINTS))
    fixed_bytes = lists * (4 * dim + 128)  # centroids and empty lists
    training_bytes = 3 * lists * 4 * dim  # centroids, and k-means's two copies
    bytes_per_code, least_training = code_bytes(kind, dim, subvectors, bits), 0
    if kind in CODED:
        training_bytes += 2 * min(count, PQ_SAMPLE) * 4 * dim  # the sample for codes, twice
    if kind == "rabitq":
        fixed_bytes += 4 * dim * dim  # the rotation
        reading_bytes += 4 * dim * min(count, BLOCK)  # and a rotated block
    if subvectors:
        fixed_bytes += 4 * dim * 2**bits
        least_training = MIN_POINTS * 2**bits
    training_bytes += fixed_bytes
    spare = budget - reading_bytes - training_bytes
    points = min(MAX_POINTS, max(MIN_POINTS, spare // (lists * (4 * dim + 16))))
    training = min(vectors.trainable, max(points * lists, least_training))
    training_bytes += training * (4 * dim + 16)
    size = count * (bytes_per_code + 8) + fixed_bytes
    mapped = max(size, training_bytes) + reading_bytes > budget
    resident = fixed_bytes if mapped else size
    table_bytes = 4 * lists * subvectors * 2**bits
    fits = reading_bytes + resident + table_bytes <= budget and table_bytes < MAX_TABLE
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
        build_bytes=reading_bytes + max(training_bytes, resident),
        memory_bytes=budget,
        mapped=mapped,
        why=why,
    )


PLANNERS: dict[RequestedKind, Callable[[VectorSet, int, str], Plan]] = {
    "flat": _flat,
    "ivf": partial(_inverted_file, "ivf"),
    "sq8": lambda vectors, budget, why: _inverted_file(
        "sq8", vectors, budget, f"{why}; a byte a number"
    ),
    "rabitq": _rabitq,
    "binary": partial(_rabitq, max_bits=1),  # the signs after a random rotation
    "ivfpq": _ivfpq,
    "hnsw": _hnsw,
}


def max_code_bits(count: int) -> int:
    """Returns the longest code, in bits, that `count` vectors can train: 39 per centroid."""
    return int(math.log2(max(1, count / MIN_POINTS)))


def free_bytes() -> int:
    """Returns the bytes of memory that are free without swapping, within a container's limits."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, *cgroup_free())
    raise RetrievalError("/proc/meminfo has no MemAvailable; give --memory, such as 2GB")


def format_bytes(count: float) -> str:
    """Formats a number of bytes, such as `1.25 GB`."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if count >= u), (1e3, "kB"))
    return f"{count / unit:.3g} {name}"


def parse_bytes(text: str) -> int:
    """Parses a number of bytes, such as `2GB` or `1.5GiB`; raises a ValueError if it is none."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text.strip()))
    except ValidationError:
        raise ValueError(
            f"'{text}' is not a size; use a number and a unit, such as 500MB or 2GB"
        ) from None
