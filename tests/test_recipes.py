"""The benchmark of what `heron init` writes: equal runs, and differences paired by seed."""

from pathlib import Path

from benchmarks.recipe_sets import SETS, build_set
from benchmarks.recipes import METHODS, configs, lines


def test_the_plain_network_differs_in_the_losses_alone(tmp_path: Path) -> None:
    data = build_set("digits-halves", tmp_path, tmp_path)
    made = configs(data, 100, 3, 7, tmp_path)
    ours, plain = made["init"], made["plain"]
    assert {*plain.objective.terms()} < {*ours.objective.terms()}
    assert ours.data.batch.unlabelled == 192 and plain.data.batch.unlabelled == 0
    assert ours.train.total_steps == plain.train.total_steps == 7 and ours.seed == plain.seed == 3
    assert ours.model == plain.model and ours.data.protocol == plain.data.protocol
    assert ours.data.views == plain.data.views and ours.data.protocol.seed == 3


def test_one_table_is_the_plain_network(tmp_path: Path) -> None:
    made = configs(build_set("wine", tmp_path, tmp_path), None, 0, 7, tmp_path)
    assert made["init"].objective == made["plain"].objective


def test_differences_are_paired() -> None:
    kept = {
        f"wine-{seed}": dict(
            zip(METHODS, (0.9 + seed / 10, 0.8 + seed / 10, 0.5, 1, 1), strict=True)
        )
        for seed in range(2)
    }
    (row,) = lines(kept, ["wine", "iris"])
    assert row[:7] == ["wine", "4 in 5", "0.950", "0.850", "0.500", "1.000", "1.000"]
    assert row[7].startswith("+0.1000 (+0.1000") and row[9].startswith("-0.0500 (-0.6853")
    assert {*SETS} > {"mnist", "digits-pictures"}
