"""What `benchmarks.scaling` counts is what is found by hand, and its tables are whole."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import OBJECTIVES, PARTS, PEERS, main
from benchmarks.scaling_bytes import KINDS, Case, count
from benchmarks.scaling_turns import Contestant, Gate, race, together
from heron.losses.named_terms import Terms


@pytest.mark.parametrize("world", [2, 3])
def test_counted_bytes_are_those_found_by_hand(world: int, tmp_path: Path) -> None:
    """By hand: a share of 19 rows is 10 of 2 views of 8 floats, or 7 on three processes.

    Gathered are, by one collective, the projections of 2 views, labels and paths, then by one each
    the sums of 2 views, the slopes by them and by the largest losses of 3 levels, and the moments
    of 3 batch norms of each view; the gradients are one bucket. Nothing is scattered.
    """
    terms = Terms.model_validate(OBJECTIVES["hierarchical"][0])
    case = Case(terms, 19, 0, 16, (4, 6), 8)
    rows = {2: 10, 3: 7}[world]
    vectors, told = rows * 2 * 8 * 4, rows * 4 * (2 + 2 + 3)
    labels, moments = rows * (40 * 4 + 3 * 8), 4 * 2 * (9 + 13 + 17)
    expected = {
        "gathered": (world - 1) * (vectors + told + labels + moments),
        "scattered": 0,
        "statistics": 4 * 2 * 2 * (4 + 6 + 8),
        "gradients": 4 * weights(case),
    }
    calls = {"gathered": 1 + 3 + 6, "scattered": 0, "statistics": 6, "gradients": 1}
    assert together(count, (case,), world, tmp_path / "meet") == [(expected, calls)] * world


def weights(case: Case) -> int:
    _, model = case.build()
    return sum(parameter.numel() for parameter in model.parameters())


def test_of_narrower_vectors_nothing_more_is_sent(tmp_path: Path) -> None:
    """But the slopes by the sums of 2 views, for each width that a term compares."""
    terms = Terms.model_validate({"nt_xent": {}, "weighted_unsupervised": {}})
    (whole, calls), _ = together(count, (Case(terms, 0, 9, 16, (4, 6), 8),), 2, tmp_path / "one")
    assert calls["gathered"] == 1 + 2 + 6
    case = Case(terms, 0, 9, 16, (4, 6), 8, matryoshka=(3, 8))
    expected = whole | {"gathered": whole["gathered"] + 2 * 5 * 2 * 4}
    more = calls | {"gathered": 1 + 2 * 2 + 6}
    assert together(count, (case,), 2, tmp_path / "two") == [(expected, more)] * 2


def test_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--small", "--json", str(tmp_path / "found.json")])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == PARTS
    names = [row[0] for row in rows]
    assert [name for name in names if name in found["scaling"]["rates"]] == [
        "one", "apart", "weak", "strong",
    ]  # fmt: skip

    counted = [row for row in rows if row[0] in OBJECTIVES]
    assert [row[2] for row in counted] == [*KINDS] * len(OBJECTIVES)
    # Terms that find their rows' whole gradient scatter nothing.
    assert {row[2] for row in counted if row[3] == "0" or row[4] == "0"} <= {"scattered"}
    for told in found["bytes"].values():
        assert told == [told[0]] * 2

    assert {"pretrain", "bare", "input", "ours", *PEERS} <= set(names)
    for part in ("overhead", "simclr"):  # the same batches, weights and loss
        losses = [x for name, x in found[part]["first_losses"].items() if name != "input"]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
    present = found["simclr"]["rates"]
    assert {"ours", "bare"} <= set(present)
    missing = found["simclr"]["missing"].values()
    assert all("ModuleNotFoundError" in fault for fault in missing)


def count_up(gate: Gate, step: float) -> None:
    while True:
        gate(step)


def stop(gate: Gate, *_: Any) -> None:
    raise RuntimeError("no luck")


def test_who_fails_is_named_and_others_go_on(tmp_path: Path) -> None:
    contestants = {"well": Contestant(count_up, (0.5,), 10), "ill": Contestant(stop, (), 10)}
    found = race(contestants, tmp_path, rounds=2, seconds=0.01)
    assert found.missing == {"ill": "RuntimeError: no luck"}
    assert found.losses == {"well": 0.5}
    assert len(found.rates["well"]) == 2 and list(found.rates) == ["well"]
