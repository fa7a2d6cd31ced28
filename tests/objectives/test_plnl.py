"""PLNL's loss, its guesses and its enhanced sets against loops, and runs that keep them."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heron.api.job import pretrain
from heron.base.errors import ConfigError
from heron.experiment.config import parse_config
from heron.losses.plnl import PlnlMemory, enhance, guess, plnl
from heron.training.tracking import read_metrics
from tests import baseline_oracles, ranks
from tests.distributed.test_strategies import choose
from tests.experiments import frames, merge
from tests.objectives.test_family import CLASSES, sets
from tests.objectives.test_terms import assert_same, draw, gradients
from tests.weekly import WEEKLY

BATCH = 7
PLNL: Callable[..., Tensor] = plnl  # which takes its views as a list here
GUESSES = torch.tensor([-1, 2, -1, 0, 1, -1, -1])


@pytest.mark.parametrize("guesses", [GUESSES, torch.full((BATCH,), -1)])
@pytest.mark.parametrize(("views", "consistency"), [(1, 1.0), (2, 0.3), (3, 1.0)])
def test_the_loss_is_its_oracle_and_its_shares_add_up(
    guesses: Tensor, views: int, consistency: float
) -> None:
    logits, ybar = [draw(BATCH, CLASSES, seed=v) for v in range(views)], sets(BATCH)
    options: Any = {"total": BATCH, "guessed": int((guesses >= 0).sum())}
    options["consistency"] = consistency
    expected = baseline_oracles.plnl(logits, ybar, guesses.tolist(), consistency)
    if views > 1:
        assert_same(PLNL(logits, ybar, guesses, **options), expected, logits)
    shares = [
        PLNL([view[part] for view in logits], ybar[part], guesses[part], **options)
        for part in (slice(0, 0), slice(0, 4), slice(4, BATCH))
    ]
    torch.testing.assert_close(torch.stack(shares).sum(), expected)


def test_the_loss_of_certain_rows_and_of_none_is_finite() -> None:
    for rows, scale in ((0, 1.0), (BATCH, 1e3)):
        logits = [(scale * draw(rows, CLASSES, seed=v).detach()).requires_grad_() for v in (0, 1)]
        loss = PLNL(
            logits, sets(BATCH)[:rows], GUESSES[:rows], total=rows, guessed=3, consistency=1.0
        )
        assert torch.isfinite(loss)
        assert all(torch.isfinite(g).all() for g in gradients(loss, logits))


def test_a_class_is_guessed_where_all_three_conditions_hold() -> None:
    def steady(*peaks: tuple[int, float]) -> Tensor:
        rows = []
        for place, top in peaks:
            row = torch.full((4,), (1 - top) / 3)
            row[place] = top
            rows.append(row)
        return torch.stack(rows)

    history = torch.stack(
        [
            steady((2, 0.995), (2, 0.995), (2, 0.995), (2, 0.9), (1, 0.999)),
            steady((2, 0.992), (2, 0.992), (2, 0.992), (2, 0.9), (1, 0.999)),
            steady((2, 0.999), (2, 0.999), (1, 0.999), (2, 0.9), (1, 0.976)),
        ]
    )
    ybar = torch.zeros(5, 4)
    ybar[:, 0], ybar[1, 2] = 1, 1
    # the second is known to be wrong, the third was another once, the fourth is not sure
    assert guess(history, ybar, 0.99).tolist() == [2, -1, -1, -1, 1]
    assert guess(history, ybar, 0.6).tolist() == [2, -1, -1, 2, 1]


@pytest.mark.parametrize("neighbours", [1, 4, 500])
@pytest.mark.parametrize("share", [0.1, 0.6, 1.0])
def test_sets_are_enhanced_as_a_loop_does(neighbours: int, share: float) -> None:
    logits, ybar = 2 * draw(23, 6).detach(), torch.zeros(23, 6, dtype=torch.float64)
    order = draw(23, 6, seed=1).detach().argsort(1)
    ybar[order < 1 + torch.arange(23)[:, None] % 5] = 1
    found = enhance(logits, ybar, neighbours, share)
    torch.testing.assert_close(found, baseline_oracles.enhanced(logits, ybar, neighbours, share))
    assert (found >= ybar).all() and (found.sum(1) < 6).all()
    assert (found > ybar).any()


def test_each_network_guesses_for_the_other() -> None:
    numbers = torch.tensor([40, 7, 9])
    ybar = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]])
    selection = PlnlMemory(numbers, ybar, epochs=3)
    rule: dict[str, Any] = {"sure": 0.99, "neighbours": 500, "taken": 0.1}
    torch.testing.assert_close(selection.history.sum(3), torch.ones(2, 3, 3))  # nothing is known
    sure = torch.zeros(3, 2, 4)
    sure[:, 0, 3], sure[0, 1, 1] = 20, 20
    for epoch in range(4):
        selection.end_epochs(epoch, guess_from=3, **rule)
        kept, guesses = selection.sets_and_guesses(numbers)
        if epoch < 3:
            assert (guesses == -1).all() and torch.equal(kept[0], ybar)
        selection.record_logits(numbers, sure)
    assert guesses.tolist() == [[1, -1, -1], [3, 3, 3]]
    assert (kept >= ybar).all() and (kept.sum(2) == 2).any()
    selection.end_epochs(3, guess_from=3, **rule)  # which is closed already
    assert selection.sets_and_guesses(numbers)[1].tolist() == [[1, -1, -1], [3, 3, 3]]


VIEW = {"stored": "view1", "augment": ["noise"]}
TERM = {"pretrain_epochs": 0, "warmup_epochs": 1, "epochs": 1, "sure": 0.4, "neighbours": 5}
CHANGES: dict[str, Any] = {
    "data": {
        "protocol": {"complementary": 2},
        "batch": {"unlabelled": 0},
        "views": [VIEW, VIEW],
        "epoch": "labelled",
    },
    "model": {"shared_encoder": True, "classify_on": "first_view"},
    "objective": {
        "cross_entropy": None,
        "weighted_unsupervised": None,
        "weighted_supervised": None,
        "plnl": TERM,
    },
    "optim": {"kind": "sgd", "lr": 0.1},
}


def trained(
    folder: str, name: str, steps: int, resume: str = "never", precision: str = "fp32"
) -> list[float]:
    """Six steps an epoch, on 60 rows."""
    train = {"steps": steps, "epochs": 5, "precision": precision}
    settings = {"train": train, "run": {"resume": resume}}
    pretrain(frames(Path(folder), name, **CHANGES, **settings))
    rows = read_metrics(Path(folder) / name / "metrics.jsonl")
    return [row["loss"] for row in rows if "loss" in row]


def weights(run: Path, kind: str) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / "latest" / f"{kind}.safetensors")


def test_two_processes_are_one_and_two_parts_are_the_whole(tmp_path: Path) -> None:
    """Stopped within an epoch; what the networks remember is in the checkpoint."""
    one = trained(str(tmp_path), "one", 15)
    for result in ranks.run(2, trained, str(tmp_path), "two", 15):
        assert result == pytest.approx(one, rel=1e-4)
    trained(str(tmp_path), "parts", 9)
    assert trained(str(tmp_path), "parts", 15, resume="auto") == one
    for kind in ("model", "memories"):
        alone, parts = (weights(tmp_path / name, kind) for name in ("one", "parts"))
        assert all(torch.equal(parts[key], value) for key, value in alone.items())
        shared = weights(tmp_path / "two", kind)
        for key, value in alone.items():
            torch.testing.assert_close(shared[key], value, rtol=1e-3, atol=1e-4, msg=key)
    kept = weights(tmp_path / "one", "memories")
    assert (kept["plnl/guesses"] >= 0).any() and int(kept["plnl/closed"]) == 2
    assert (kept["plnl/sets"].sum(2) > 2).any()
    mine = weights(tmp_path / "one", "model")
    assert not torch.equal(mine["classifier.weight"], mine["second.1.weight"])


CELLS = [("zero3", "fp32"), ("zero2", "bf16"), ("fsdp", "fp32")]
if WEEKLY:
    stages = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp")
    CELLS = list(itertools.product(stages, ("fp32", "bf16")))


def trained_under(folder: str) -> list[list[float]]:
    losses = []
    for strategy, precision in CELLS:
        choose(strategy)
        losses.append(trained(folder, f"{strategy}-{precision}", 15, precision=precision))
    return losses


def test_it_is_the_same_under_every_strategy(tmp_path: Path) -> None:
    """What the networks remember as well; bfloat16 is near until it chooses otherwise."""
    one = trained(str(tmp_path), "one", 15)
    kept = weights(tmp_path / "one", "memories")
    for (strategy, precision), losses in zip(
        CELLS, ranks.run(2, trained_under, str(tmp_path))[0], strict=True
    ):
        exact = precision == "fp32"
        if exact:
            assert losses == pytest.approx(one, rel=1e-4), strategy
        else:  # nothing is chosen in the first epoch
            assert losses[:6] == pytest.approx(one[:6], rel=2e-2), strategy
        found = weights(tmp_path / f"{strategy}-{precision}", "memories")
        assert found.keys() == kept.keys() and int(found["plnl/closed"]) == 2
        for key in ("plnl/guesses", "plnl/sets") if exact else ():
            assert torch.equal(found[key], kept[key]), (strategy, key)


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tree = frames(tmp_path, **CHANGES).model_dump()
    cases: list[dict[str, Any]] = [
        {"model": {"classify_on": "all_views"}},
        {"objective": {"ub_log": {"weight": 1.0}}},
    ]
    for changes in cases:
        with pytest.raises(
            ConfigError,
            match="plnl has two networks, .* must be true, .* this the only term, got",
        ):
            pretrain(parse_config(merge(tree, changes)))
