"""Which index N, d and a budget ask for, and what it is said to take."""

import faiss
import pytest

from heron.base.errors import RetrievalError
from heron.retrieval import index_plan
from heron.retrieval.index_plan import (
    MIN_POINTS,
    Kind,
    Plan,
    RequestedKind,
    VectorSet,
    choose_plan,
    code_bytes,
    format_bytes,
    max_code_bits,
    parse_bytes,
)

GB, MB = 10**9, 10**6
MILLION = VectorSet(count=10**6, dim=128, part_bytes=65_536 * 512, held_out=1000, euclidean=True)


def test_auto_takes_the_most_exact_that_is_fast_and_fits() -> None:
    assert choose_plan("auto", VectorSet(count=100_000, dim=128), GB).kind == "flat"
    wide, bytes_each, bits = (choose_plan("auto", MILLION, n * MB) for n in (1000, 300, 250))
    assert (wide.kind, bytes_each.kind, bits.kind) == ("ivf", "sq8", "rabitq")
    assert bits.bits == 5 and choose_plan("auto", MILLION, 242 * MB).bits == 4
    many = choose_plan("auto", MILLION.model_copy(update={"count": 10**7}), 1150 * MB)
    assert many.kind == "ivfpq" and "64 codes of 8 bits" in many.why
    assert not any(plan.mapped for plan in (wide, bytes_each, bits, many))
    assert "N d = 128,000,000" in wide.why and "5 bits a number" in bits.why
    least = choose_plan("auto", MILLION, 150 * MB)
    assert (least.kind, least.mapped) == ("ivf", True)


@pytest.mark.parametrize("budget", [180 * MB, 235 * MB, 250 * MB, 400 * MB, 800 * MB, 2 * GB])
def test_what_is_not_mapped_fits_the_budget(budget: int) -> None:
    plan = choose_plan("auto", MILLION, budget)
    assert plan.mapped or plan.index_bytes < plan.build_bytes <= budget
    assert plan.memory_bytes == budget


def test_codes_shorten_and_the_table_goes_as_the_budget_shrinks() -> None:
    many = MILLION.model_copy(update={"count": 10**7})
    plans = [choose_plan("ivfpq", many, n * MB) for n in (3000, 1200, 800, 700, 600)]
    assert [plan.subvectors for plan in plans] == [64, 64, 32, 16, 64]
    assert [plan.mapped for plan in plans] == [False, False, False, False, True]
    assert [plan.table for plan in plans[:2]] == [True, False]
    by_product = MILLION.model_copy(update={"euclidean": False})
    assert (
        choose_plan("ivfpq", MILLION, GB).table and not choose_plan("ivfpq", by_product, GB).table
    )


@pytest.mark.parametrize("kind", ["sq8", "rabitq"])
def test_a_code_is_as_long_as_faiss_has_it(kind: Kind) -> None:
    for dim, bits in ((8, 1), (12, 2), (128, 4), (130, 6)):
        plan = choose_plan(kind, VectorSet(count=1000, dim=dim), GB)
        plan = plan.model_copy(update={"bits": bits}) if kind == "rabitq" else plan
        index = faiss.index_factory(dim, plan.factory)
        assert index.code_size == code_bytes(kind, dim, bits=bits)
    few = VectorSet(count=45, dim=8, held_out=10)
    with pytest.raises(
        RetrievalError, match=f"{kind} needs 39 vectors besides 10.* there are 35; use"
    ):
        choose_plan(kind, few, GB)


def test_rabitq_takes_as_many_bits_as_fit() -> None:
    found = [choose_plan("rabitq", MILLION, n * MB) for n in (2000, 250, 242, 230)]
    assert [plan.bits for plan in found] == [6, 5, 4, 6]
    assert [plan.mapped for plan in found] == [False, False, False, True]


def test_binary_codes_are_signs() -> None:
    plan = choose_plan("binary", MILLION, 2000 * MB)
    assert (plan.kind, plan.bits) == ("rabitq", 1)
    assert plan.index_bytes < 0.3 * choose_plan("sq8", MILLION, 2000 * MB).index_bytes


@pytest.mark.parametrize("count", [100, 2_000, 50_000, 10**6, 10**7])
@pytest.mark.parametrize("kind", ["ivf", "ivfpq"])
def test_the_training_sample_is_what_faiss_asks_for(kind: RequestedKind, count: int) -> None:
    shape = VectorSet(count=count, dim=32, held_out=count // 10)
    if kind == "ivfpq" and count == 100:
        with pytest.raises(
            RetrievalError, match="needs 624 vectors besides 10 queries.* there are 90"
        ):
            choose_plan(kind, shape, 100 * GB)
        return
    plan = choose_plan(kind, shape, 100 * GB)
    assert 39 * plan.lists <= plan.training <= count - shape.held_out
    assert plan.training <= 256 * plan.lists or plan.training == 39 * 2**plan.bits
    assert kind == "ivf" or plan.training >= 39 * 2**plan.bits
    if count <= 10**6 and count > 40_000:
        assert plan.lists == pytest.approx(4 * count**0.5, rel=0.01)


def test_bytes_by_hand() -> None:
    """1,000 vectors of 8 values: flat is 32,000 bytes; HNSW has 64 links below, 32 / 31 above."""
    shape = VectorSet(count=1000, dim=8)
    reading = 2 * 1000 * 8 * 4 + 24 * 1000 + 48 * 2**20
    flat = choose_plan("flat", shape, GB)
    assert (flat.index_bytes, flat.build_bytes) == (32_000, 32_000 + reading)
    assert choose_plan("flat", shape, 32_000 + reading).mapped is False
    mapped = choose_plan("flat", shape, 31_999 + reading)
    assert (mapped.mapped, mapped.index_bytes, mapped.build_bytes) == (True, 0, reading)
    assert (
        choose_plan("hnsw", shape, GB).index_bytes == 32_000 + 12_000 + 260_130
    )  # 4 x 65.0323 x 1,000
    ivf = choose_plan("ivf", shape, GB)
    assert (ivf.lists, ivf.training) == (25, 1000)  # 1,000 // 39, fewer than 4 sqrt(1,000)
    assert ivf.index_bytes == 1000 * (32 + 8) + 25 * (32 + 128)


def test_what_cannot_be_is_refused() -> None:
    small = VectorSet(count=1000, dim=8)
    with pytest.raises(
        RetrievalError, match="kind must be one of flat, ivf, sq8, rabitq, .*, got 'tree'"
    ):
        choose_plan("tree", small, GB)  # type: ignore[arg-type]
    with pytest.raises(RetrievalError, match=r"budget of 1 MB .* at least 50\.4 MB; use more"):
        choose_plan("auto", small, MB)
    with pytest.raises(
        RetrievalError, match="hnsw over 1,000,000 .* more --memory, or --kind ivfpq"
    ):
        choose_plan("hnsw", MILLION, 900 * MB)
    assert choose_plan("hnsw", MILLION, 2 * GB).kind == "hnsw"
    assert choose_plan("ivfpq", MILLION, 900 * MB).kind == "ivfpq"
    with pytest.raises(
        RetrievalError, match="ivf needs 39 vectors besides 10 queries.* there are 20"
    ):
        choose_plan("ivf", VectorSet(count=30, dim=8, held_out=10), GB)


def test_without_a_budget_half_of_free_memory_is_taken() -> None:
    plan: Plan = choose_plan("auto", VectorSet(count=100, dim=4))
    assert 64 * MB < plan.memory_bytes < 2**46


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2GB", 2 * GB), ("500 MB", 500 * MB), ("1.5GiB", 3 * 2**29), ("7kB", 7000), ("12", 12)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_a_size_that_is_none() -> None:
    for text in ("2XB", "GB", "-1GB", "1e9"):
        with pytest.raises(ValueError, match="is not a size; use a number and a unit"):
            parse_bytes(text)
    assert [format_bytes(n) for n in (2.5e9, 61_240_000, 999)] == ["2.5 GB", "61.2 MB", "0.999 kB"]


def test_codes_are_as_long_as_can_be_learnt() -> None:
    assert max_code_bits(MIN_POINTS * 256) == 8
    assert max_code_bits(MIN_POINTS * 256 - 1) == 7
    assert max_code_bits(0) == 0


def test_the_budget_keeps_to_the_limit_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = index_plan.free_bytes()
    assert choose_plan("ivf", MILLION).memory_bytes == pytest.approx(machine / 2, rel=0.5)
    monkeypatch.setattr(index_plan, "cgroup_free", lambda: [700 * MB, 600 * MB], raising=False)
    assert index_plan.free_bytes() == 600 * MB
    assert choose_plan("auto", MILLION).memory_bytes == 300 * MB
