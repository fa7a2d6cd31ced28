"""The best weights of a run against those of a run that saved all, and the end by patience."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heron.api.job import pretrain
from heron.base.errors import CheckpointError, ConfigError, Stopped, TrainingError
from heron.training.baselines import plain
from heron.training.checkpoint import CheckpointManifest, load
from heron.training.pretrained import from_pretrained
from heron.training.tracking import read_metrics
from heron.training.trainer import Trainer
from tests import ranks
from tests.distributed.test_strategies import cell

STEPS = 8
LENGTH: dict[str, Any] = {"steps": STEPS, "evaluate_every_steps": 1}
BEST: dict[str, Any] = LENGTH | {"keep": "best"}
OPTIM = {"kind": "adamw", "lr": 0.05, "warmup_epochs": 0}
RUNS = "unheard", "heard"
DATA = {"protocol": {"labelled": 60, "test": "test", "validation": 0.3}}


def run(folder: Path, name: str, strategy: str = "ddp", **more: Any) -> dict[str, Any]:
    train = BEST | more.pop("train", {})
    options: dict[str, Any] = {"optim": OPTIM, "data": DATA, "train": train} | more
    return pretrain(
        cell(folder, name, strategy, "fp32", "whole", run={"resume": "auto"}, **options)
    )


def tensors(folder: Path, step: int, file: str = "model") -> dict[str, Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / f"{file}.safetensors")


def validated(folder: Path, score: str = "accuracy") -> list[float]:
    """The score after each step, as the log of a run has it."""
    rows = read_metrics(folder / "metrics.jsonl")
    found = {r["step"] + 1: r[f"validation/{score}"] for r in rows if f"validation/{score}" in r}
    return [found[step] for step in range(1, STEPS + 1)]


def best_step(scores: list[float]) -> int:
    """The last of the highest."""
    return max(step for step, score in enumerate(scores, 1) if score == max(scores))


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[n]) for n, x in one.items())


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that keeps the last weights, and a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("best")
    every = LENGTH | {"keep": "last", "save_every_steps": 1, "keep_checkpoints": STEPS}
    ranks.run(1, partial(run, train=every), folder, "last")
    return folder / "last"


@pytest.fixture(scope="module")
def best(last: Path) -> Path:
    (result,) = ranks.run(1, run, last.parent, "best")
    scores = validated(last)
    assert max(scores) > scores[-1], "the best is the last: these tests would tell nothing"
    assert result["kept_step"] == best_step(scores)
    return last.parent / "best"


def test_it_is_the_last_of_the_highest_scores(last: Path, best: Path) -> None:
    scores = validated(last)
    assert validated(best)[:-1] == scores[:-1]  # in the end the best is scored once more
    step = best_step(scores)
    assert equal(tensors(best, STEPS), tensors(last, step))
    assert equal(tensors(best, STEPS, "weights"), tensors(last, STEPS))
    assert equal(dict(from_pretrained(best).state_dict()), tensors(last, step))


def test_the_result_is_that_of_the_best(last: Path, best: Path) -> None:
    by_auc = partial(run, train={"keep_by": "auc_macro"})
    (result,) = ranks.run(1, by_auc, last.parent, "scored")
    scores = validated(last, "auc_macro")
    step = best_step(scores)
    assert result["kept_step"] == step and result["validation_auc_macro"] == max(scores)
    rows = read_metrics(best / "metrics.jsonl")
    assert rows[-2]["validation/accuracy"] == max(validated(last))
    assert rows[-1].keys() >= {"test/accuracy"}


def test_patience_ends_a_run(last: Path) -> None:
    scores = validated(last)
    expected = next(  # the first without a higher score in the two before it and itself
        n for n in range(3, STEPS) if max(scores[: n - 2]) >= max(scores[n - 2 : n])
    )
    patient = partial(run, train={"patience": 2})
    (result,) = ranks.run(1, patient, last.parent, "patient")
    assert result["steps"] == expected < STEPS
    assert result["kept_step"] == best_step(scores[:expected])
    assert equal(tensors(last.parent / "patient", expected), tensors(last, result["kept_step"]))
    began = (last.parent / "patient" / "run.json").read_bytes()
    ranks.run(1, patient, last.parent, "patient")
    assert (last.parent / "patient" / "run.json").read_bytes() == began  # nothing was to do


def other(folder: Path, strategies: list[str]) -> list[int]:
    return [run(folder, strategy, strategy)["kept_step"] for strategy in strategies]


def legs(folder: Path, name: str, ends: list[int], strategies: list[str], **train: Any) -> None:
    for steps, strategy in zip(ends, strategies, strict=True):
        run(folder, name, strategy, train={"steps": steps, **train})


def test_any_strategy_and_any_cut_keeps_that_of_one_process(last: Path, best: Path) -> None:
    folder, strategies = best.parent, ["ddp", "fsdp", "zero2"]
    steps = ranks.run(2, other, folder, strategies)
    ranks.run(2, legs, folder, "legs", [2, 5], ["fsdp", "ddp"])
    ranks.run(1, legs, folder, "legs", [STEPS], ["ddp"])
    assert {step for found in steps for step in found} == {best_step(validated(last))}
    for name in [*strategies, "legs"]:
        for file in ("model", "weights"):
            found, expected = tensors(folder / name, STEPS, file), tensors(best, STEPS, file)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(
                    found[key], value, rtol=1e-3, atol=1e-4, msg=f"{name} {file} {key}"
                )


@pytest.mark.parametrize("average", [None, 0.5], ids=["weights", "their average"])
def test_a_run_that_was_stopped_has_the_same_bits(last: Path, average: float | None) -> None:
    """With an average, it is the best of the averages, and both are saved."""
    whole, cut = f"whole-{average}", f"cut-{average}"
    ranks.run(1, partial(run, train={"ema": average}), last.parent, whole)
    parts = partial(legs, ema=average)
    ranks.run(1, parts, last.parent, cut, [1, 3, 6, STEPS], ["ddp"] * 4)
    files = ["model", "weights", "optimizer", *(["average"] if average else [])]
    for file in files:
        one, other = (
            last.parent / name / "checkpoints" / "latest" / f"{file}.safetensors"
            for name in (whole, cut)
        )
        assert one.read_bytes() == other.read_bytes(), file


def test_where_a_run_is_stopped_is_no_evaluation_of_the_whole_run(last: Path) -> None:
    """The whole run is evaluated after 3 and 6 of its 11 steps, and at its end."""
    seldom: dict[str, Any] = {"epochs": 1, "evaluate_every_steps": 3}
    whole = partial(run, train={"steps": None, **seldom})
    (result,) = ranks.run(1, whole, last.parent, "seldom")
    rows = read_metrics(last.parent / "seldom" / "metrics.jsonl")
    scores = {r["step"] + 1: r["validation/accuracy"] for r in rows if "validation/accuracy" in r}
    assert [*scores] == [3, 6, 9, 11] and result["kept_step"] in scores
    parts = partial(legs, **seldom)
    ranks.run(1, parts, last.parent, "stopped", [2, 4, 8, 11], ["ddp"] * 4)
    for name in ("model", "weights"):
        one, other = (tensors(last.parent / run, 11, name) for run in ("seldom", "stopped"))
        assert equal(one, other), name


def refused(folder: Path, strategy: str, name: str, **more: Any) -> str:
    try:
        run(folder, name, strategy, **more)
    except (TrainingError, CheckpointError, ConfigError) as error:
        return str(error)
    return "it ran"


def test_what_is_refused(best: Path) -> None:
    folder = best.parent
    for said in ranks.run(2, refused, folder, "zero3", "zero3"):
        assert "train.keep=best keep weights, but under ZeRO 3" in said
    unknown = partial(refused, train={"keep_by": "f2"})
    (said,) = ranks.run(1, unknown, folder, "ddp", "unknown")
    assert said.startswith("train.keep_by is f2, but the validation rows have only accuracy, ")
    assert not any("loss" in row for row in read_metrics(folder / "unknown" / "metrics.jsonl"))
    (said,) = ranks.run(1, partial(refused, train={"patience": 3}), folder, "ddp", "best")
    assert "made with another configuration: train.patience is null, not 3" in said
    for train, words in (
        ({"keep": "last", "patience": 3}, "patience is set, but keep is last; set keep: best"),
        ({"evaluate_every_steps": None}, "keep is best, but the run is evaluated only at its end"),
    ):
        (said,) = ranks.run(1, partial(refused, train=train), folder, "ddp", "faulty")
        assert words in said
    rows = {"protocol": {"labelled": 60, "test": "test", "validation": 0}}
    (said,) = ranks.run(1, partial(refused, data=rows), folder, "ddp", "faulty")
    assert "train.keep is best, but data.protocol.validation is 0" in said


def signalled(folder: Path, name: str, at: int, ends: list[int], **train: Any) -> None:
    """Legs, in the first of which a signal is heard in step `at`."""
    after, heard = Trainer.after_step, list[int]()

    def hear(self: Trainer, step: int) -> None:
        self.record_pending()
        self.stop |= step == at and not heard
        heard.extend([step] if self.stop else [])
        after(self, step)

    Trainer.after_step = hear  # type: ignore[method-assign]
    for steps in ends:
        try:
            run(folder, name, train={"steps": steps, **train})
        except Stopped:
            run(folder, name, train={"steps": steps, **train})
    assert heard


@pytest.mark.parametrize("at", [6, 9, 11])
def test_a_signal_in_a_step_that_is_evaluated(last: Path, at: int) -> None:
    """In the last step, too, the model that is saved is the one that is scored."""
    seldom: dict[str, Any] = {"epochs": 1, "evaluate_every_steps": 3}
    ranks.run(1, partial(run, train={"steps": None, **seldom}), last.parent, f"unheard-{at}")
    ranks.run(1, partial(signalled, **seldom), last.parent, f"heard-{at}", at, [11])
    for name in ("model", "weights", "optimizer"):
        one, other = (tensors(last.parent / f"{run}-{at}", 11, name) for run in RUNS)
        assert equal(one, other), name
    one, other = (
        json.loads((last.parent / f"{run}-{at}" / "result.json").read_text()) for run in RUNS
    )
    assert one["kept_step"] == other["kept_step"] and one["accuracy"] == other["accuracy"]


def test_the_plain_network_has_no_recall_to_be_kept_by(tmp_path: Path) -> None:
    train = BEST | {"keep_by": "recall@10_view1_view2"}
    config = cell(
        tmp_path, "run", "ddp", "fp32", "whole",
        data=DATA, train=train, evaluate={"cross_view": True},
    )  # fmt: skip
    other = plain(config)
    assert other and (other.train.keep, other.train.keep_by) == ("best", None)


def test_a_checkpoint_whose_own_weights_are_gone_is_refused(best: Path) -> None:
    folder = best.parent / "gone"
    ranks.run(1, legs, best.parent, "gone", [3], ["ddp"])
    (folder / "checkpoints" / "latest" / "weights.safetensors").unlink()
    state = folder / "checkpoints" / "latest" / "state.json"
    manifest = CheckpointManifest.read(state)
    assert manifest.best
    del manifest.files["weights.safetensors"]
    manifest.write(state)
    with pytest.raises(CheckpointError, match=r"has the best weights, but no weights\.safet"):
        load(state.parent)
