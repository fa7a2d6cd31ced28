"""What `benchmarks.scaling` counts is what its formula says, and its tables are whole."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import OBJECTIVES, PARTS, PEERS, main
from benchmarks.scaling_bytes import KINDS, Case, count, predict
from benchmarks.scaling_turns import Contestant, Gate, race, together
from heron.config.terms import Terms


@pytest.mark.parametrize("world", [2, 3])
def test_counted_bytes_are_the_predicted(world: int, tmp_path: Path) -> None:
    """By hand: a share of 19 rows is 10 of 2 views of 8 floats, or 7 on three processes.

    Gathered are, by one collective, the projections of 2 views, labels and paths, then by one each
    the sums of 2 views, the slopes by them and by the largest losses of 3 levels, and the moments
    of 3 batch norms, of both views at once; the gradients are one bucket. Nothing is scattered.
    """
    terms = Terms.model_validate(OBJECTIVES["hierarchical"][0])
    case = Case(terms, 19, 0, 16, (4, 6), 8)
    predicted, calls = predict(case, world)
    expected = {kind: n for kind, (n, _) in predicted.items()}
    assert calls == {
        "gathered": 1 + 3 + 3, "passed": 0, "scattered": 0, "statistics": 3, "gradients": 1,
    }  # fmt: skip
    rows = {2: 10, 3: 7}[world]
    assert expected["scattered"] == 0
    vectors, told = rows * 2 * 8 * 4, rows * 4 * (2 + 2 + 3)
    labels, moments = rows * (40 * 4 + 3 * 8), 4 * 2 * (9 + 13 + 17)
    assert expected["gathered"] == (world - 1) * (vectors + told + labels + moments)
    assert together(count, (case,), world, tmp_path / "meet") == [(expected, calls)] * world


def test_codes_and_bottlenecks_are_counted(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"codes": {"c2ae": {}}, "bottlenecks": {"bce": {}, "mib": {}}}
    for name, terms in asked.items():
        case = Case(Terms.model_validate(terms), 5, 8, 16, (4, 6), 8)
        predicted, calls = predict(case, 2)
        expected = {kind: n for kind, (n, _) in predicted.items()}
        assert together(count, (case,), 2, tmp_path / name) == [(expected, calls)] * 2


@pytest.mark.parametrize("by_ring", [False, True])
def test_each_width_is_counted(by_ring: bool, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"nt_xent": {}, "weighted_unsupervised": {}}
    case = Case(Terms.model_validate(asked), 0, 9, 16, (4, 6), 8, by_ring, matryoshka=(3, 8))
    predicted, calls = predict(case, 2)
    expected = {kind: n for kind, (n, _) in predicted.items()}
    assert together(count, (case,), 2, tmp_path / "meet") == [(expected, calls)] * 2


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
    assert all(row[3] == row[4] and row[6] == row[7] for row in counted)
    nothing = [row[2] for row in counted if row[3] == "0" or row[6] == "0"]
    # Terms that find their rows' whole gradient scatter nothing, and no ring is asked for.
    assert set(nothing) <= {"scattered", "passed"}
    for told in found["bytes"].values():
        predicted, calls = told["predicted"]
        expected = {kind: n for kind, (n, _) in predicted.items()}
        assert told["counted"] == [[expected, calls]] * 2

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
