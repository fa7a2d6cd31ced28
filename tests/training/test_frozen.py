"""Rows embedded once by a frozen encoder: the numbers of the run, and what is kept of them."""

import errno
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import heron
from heron.api.job import pretrain
from heron.base.errors import ConfigError, DiskFull, Stopped
from heron.cli.main import main
from heron.data import views
from heron.data.dataset import open_reader
from heron.data.random_keys import rng_keys
from heron.data.views import Embedded
from heron.experiment.config import Config, dump_config, load_config, parse_config
from heron.training import frozen
from heron.training.pretrained import locate
from heron.training.tracking import read_metrics, read_result
from tests.experiments import merge
from tests.launch import runs
from tests.launch.test_backbone import TINY
from tests.launch.test_init import pictures
from tests.training import small_parts

SAME = {"crop": {"area": [1.0, 1.0], "flip": 0.0}}  # an augmentation that changes nothing
CROP = {"crop": {"area": [0.3, 0.9], "flip": 0.5}}
WIDTH = 16  # of the network's features


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(views, "PART_ROWS", small_parts.ROWS)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures of faces and a small network of pictures, of random weights."""
    from transformers import ViTConfig, ViTModel

    folder = tmp_path_factory.mktemp("frozen")
    pictures(folder)
    torch.manual_seed(0)
    config = ViTConfig(**TINY, intermediate_size=32, image_size=32, patch_size=16)
    ViTModel(config).save_pretrained(folder / "vit")
    return folder


def experiment(given: Path, to: Path, augment: Any = CROP, **changes: Any) -> Config:
    view = {"stored": "image", "augment": [augment]}
    encoder = {"kind": "transformers", "weights": str(given / "vit"), "freeze": True}
    base: dict[str, Any] = {
        "run": {"dir": str(to)},
        "data": {
            "path": str(given / "data"),
            "protocol": {"labelled": 20, "test": "test"},
            "batch": {"labelled": 8, "unlabelled": 10},
            "views": [view, view],
        },
        "model": {"encoder": encoder, "shared_encoder": True, "shared_projector": True}
        | {"classify_on": "first_view", "projection_width": 8},
        "objective": {"bce": {}, "weighted_unsupervised": {"weight": 0.5, "tau": 0.3}},
        "optim": {"kind": "adamw", "lr": 0.01},
        "train": {"total_steps": 6, "cpu_threads": 1, "frozen_views": 2},
        "evaluate": {"map": "never"},
        "tracking": [],
    }
    return parse_config(merge(base, changes))


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def kept(cache: Path) -> dict[str, bytes]:
    """What is kept, by the names of its files."""
    files = sorted(cache.glob("frozen-*/*"))
    assert all(x.suffix == ".npy" and not x.name.startswith(".") for x in files), files
    return {str(x.relative_to(cache)): x.read_bytes() for x in files}


def made_at(cache: Path) -> dict[str, int]:
    return {str(x.relative_to(cache)): x.stat().st_mtime_ns for x in cache.glob("frozen-*/*.npy")}


def test_where_augmentation_changes_nothing_the_run_is_that_of_every_step(
    given: Path, tmp_path: Path
) -> None:
    """The network embeds the same pictures at every step, or once."""
    found = {}
    for number in (0, 2):
        run, train = tmp_path / f"run-{number}", {"frozen_views": number, "evaluate_every_steps": 2}
        pretrain(experiment(given, run, SAME, train=train))
        found[number] = losses(run), read_result(run / "result.json")["auc_macro"]
    assert len(found[2][0]) == 6
    np.testing.assert_allclose(found[2][0], found[0][0], rtol=2e-5)
    assert found[2][1] == pytest.approx(found[0][1], abs=1e-6)


def test_what_is_kept_is_what_the_whole_model_makes_of_each_picture(
    given: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = experiment(given, tmp_path / "run")
    pretrain(config)
    said = capsys.readouterr().out
    assert "embedding 2 augmented views of 40 rows of 'image' once, by the frozen ViTModel" in said
    assert "2 augmented views of 40 rows of 'image' embedded once by ViTModel in" in said
    assert said.count("later runs read them") == 2
    raw = open_reader(config.data).read("image", np.arange(40, 50))  # the test rows
    hidden = heron.from_pretrained(tmp_path / "run").encode(raw)
    plain = np.concatenate([np.load(path) for path in files_of(cache, 3)])
    np.testing.assert_allclose(plain, hidden[:, :WIDTH], rtol=1e-4, atol=1e-5)
    first, second = (np.load(path) for path in files_of(cache, 20)[:2])
    assert first.shape == second.shape == (4, WIDTH)
    assert not np.isclose(first, second).all(1).any()  # each variant is augmented by itself
    run = pretrain(experiment(given, tmp_path / "again"))
    said = capsys.readouterr().out
    assert "2 augmented views of 40 rows of 'image' are kept from an earlier run" in said
    assert "embedd" not in said.partition("again:")[0]
    assert run["auc_macro"] == read_result(tmp_path / "run" / "result.json")["auc_macro"]


def files_of(cache: Path, count: int) -> list[Path]:
    """The files of the folder that has so many of them."""
    folders = [sorted(folder.glob("*.npy")) for folder in cache.glob("frozen-*")]
    return next(files for files in folders if len(files) == count)


def test_views_of_one_encoder_read_different_variants(given: Path, tmp_path: Path) -> None:
    config = experiment(given, tmp_path / "run", train={"frozen_views": 3})
    folder = tmp_path / "kept"
    folder.mkdir()
    rows = np.array([3, 5, 8, 9, 11])
    table = views.Embedded(folder, rows, 3, 2)
    for part, own in enumerate(table.parts):
        for variant in range(3):
            np.save(table.file(part, variant), np.stack([own, 0 * own + variant], 1) + 0.0)
    asked = np.tile(rows[::-1], 200)
    keys = rng_keys(config.seed, np.repeat(np.arange(200), 5), asked)
    one, two, three, again = (replace(table, place=place).read(asked, keys) for place in range(4))
    assert (one[:, 0] == asked).all() and (again == one).all()
    drawn = np.stack([one, two, three])[:, :, 1]
    assert (np.sort(drawn, 0) == np.arange(3.0)[:, None]).all()  # each variant once
    counts = np.array([[(x == variant).sum() for variant in range(3)] for x in drawn])
    assert (abs(counts - 1000 / 3) < 5 * (1000 * 2 / 9) ** 0.5).all()
    np.testing.assert_array_equal(table.read(asked)[:, 1], 0)  # without keys the first


def test_two_processes_a_stop_and_a_kill_change_no_bit(
    given: Path, tmp_path: Path, cache: Path
) -> None:
    """The features, and the weights of a resumed run; two processes round sums differently."""
    for name in ("one", "stopped"):
        pretrain(experiment(given, tmp_path / name, train={"steps": 3 if name != "one" else None}))
    expected = kept(cache)
    pretrain(experiment(given, tmp_path / "stopped", run={"resume": "auto"}))
    assert kept(cache) == expected
    one = load_file(locate(tmp_path / "one") / "model.safetensors")
    resumed = load_file(locate(tmp_path / "stopped") / "model.safetensors")
    assert all(torch.equal(resumed[name], x) for name, x in one.items())
    for strategy in ("ddp", "fsdp"):
        shutil.rmtree(cache)
        path = tmp_path / f"{strategy}.yaml"
        path.write_text(dump_config(experiment(given, tmp_path / strategy)))
        if strategy == "ddp":  # killed while it embeds, and started again
            pair = runs.start_pair(path, runs.free_port(), small_parts.main)
            while len([*cache.glob("frozen-*/*.npy")]) < 6:
                assert all(process.poll() is None for process in pair)
                time.sleep(0.01)
            for process in pair:
                process.kill()
                runs.finish(process, 30)
            early = made_at(cache)
            assert 6 <= len(early) < len(expected)
        runs.run_pair(path, small_parts.main, strategy)
        assert kept(cache) == expected
        if strategy == "ddp":
            assert early.items() <= made_at(cache).items()  # what was there is not made again
        np.testing.assert_allclose(losses(tmp_path / strategy), losses(tmp_path / "one"), rtol=1e-4)


def test_only_what_is_missing_is_embedded(given: Path, tmp_path: Path, cache: Path) -> None:
    """More variants, another seed, a file cut short."""
    pretrain(experiment(given, tmp_path / "a"))
    first, bits = made_at(cache), kept(cache)
    assert len(first) == 2 * 10 + 3
    pretrain(experiment(given, tmp_path / "b", train={"frozen_views": 3}))
    second = made_at(cache)
    assert first.items() <= second.items() and len(second) == 3 * 10 + 3
    pretrain(experiment(given, tmp_path / "c", seed=1))
    third = made_at(cache)
    assert second.items() <= third.items() and len(third) == 5 * 10 + 3  # those that are scored
    cut = cache / next(iter(bits))
    cut.write_bytes(cut.read_bytes()[:-1])
    pretrain(experiment(given, tmp_path / "d"))
    assert kept(cache).items() >= bits.items()


def test_a_full_disk_is_named_and_leaves_no_half(
    given: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, save = experiment(given, tmp_path / "run"), np.save
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(DiskFull, match="need 5.1 kB, and 1.0 kB are free; .* HERON_CACHE"):
            pretrain(config)

    def full(stream: Any, x: Any) -> None:
        save(stream, x)
        if len([*cache.glob("frozen-*/*.npy")]) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(np, "save", full)
        with pytest.raises(DiskFull, match=r"the disk is full; free some space"):
            pretrain(config)
    assert len(kept(cache)) == 5
    pretrain(config)
    assert len(kept(cache)) == 23


def test_a_signal_stops_it_and_what_is_embedded_stays(
    given: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kick(*arguments: Any) -> Any:
        if len([*cache.glob("frozen-*/*.npy")]) == 6:
            signal.raise_signal(signal.SIGTERM)
        return small_parts.encode(*arguments)

    monkeypatch.setattr(frozen.FrozenEncoders, "_encode", kick)
    with pytest.raises(Stopped, match="a signal came; what is embedded so far is kept in .*cache"):
        pretrain(experiment(given, tmp_path / "run"))
    assert len(kept(cache)) == 8  # with the part that was being embedded


def test_rows_that_cannot_be_read_are_skipped_from_the_cache_too(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(given / "data", tmp_path / "data")
    tar = next((tmp_path / "data").glob("train-*.tar"))
    whole = tar.read_bytes()
    tar.write_bytes(whole.replace(b"\xff\xd8\xff", b"\0\0\0", 1))  # the first picture
    data = {"path": str(tmp_path / "data"), "on_error": "skip", "max_bad_fraction": 0.5}
    data |= {"verify": False}
    told, weights = [], []
    for name in ("first", "second"):
        pretrain(experiment(given, tmp_path / name, data=data))
        told.append(capsys.readouterr().out.count("skipped row 0: "))
        weights.append(load_file(locate(tmp_path / name) / "model.safetensors"))
    assert told == [1, 1]
    assert all(torch.equal(weights[1][key], x) for key, x in weights[0].items())


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"model": {"encoder": {"freeze": False}}},
            "train.frozen_views is 2, but no encoder is frozen: set freeze: true in the section of "
            "a pretrained one, or train.frozen_views: 0",
        ),
        (
            {"objective": {"input_weighted_unsupervised": {}}},
            "train.frozen_views is 2, but objective.input_weighted_unsupervised reads the inputs "
            "themselves, not features that were embedded once; set it to 0",
        ),
        (
            {"data": {"webdataset": {"labelled": ["a.tar"], "samples_per_epoch": 9}}},
            "train.frozen_views is 2, but data.webdataset streams samples without an index: "
            "features are kept by row number; remove it",
        ),
    ],
    ids=["not frozen", "inputs", "no index"],
)
def test_what_cannot_be_embedded_once_is_refused(
    given: Path, tmp_path: Path, changes: Any, fault: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        pretrain(experiment(given, tmp_path / "run", **changes))
    assert fault in str(caught.value)


def test_what_init_writes_has_it_where_the_backbone_is_frozen(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for tune, expected in (("frozen", 4), ("lora", 0), ("full", 0)):
        out = str(tmp_path / f"{tune}.yaml")
        words = ["init", str(given / "data"), "--backbone", str(given / "vit"), "--tune", tune]
        assert main([*words, "--out", out]) == 0
        assert load_config(out).train.frozen_views == expected
    short = ["train.steps=2", "evaluate.map=never", "evaluate.baselines=false"]
    frozen = str(tmp_path / "frozen.yaml")
    assert main(["pretrain", frozen, f"run.dir={tmp_path}/run", *short]) == 0
    assert "4 augmented views of 40 rows of 'image' embedded once" in capsys.readouterr().out
    words = ["predict", f"{tmp_path}/run", "--data", str(given / "data"), "--out"]
    assert main([*words, f"{tmp_path}/rows.csv"]) == 0  # from pictures


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is mapped holds a descriptor, of which a process has 1,024."""
    monkeypatch.setattr(views, "PART_ROWS", 2)
    monkeypatch.setattr(views, "MOST_MAPPED", 3)
    kept = Embedded(tmp_path, np.arange(100, 140), variants=2, width=1)
    for part, rows in enumerate(kept.parts):
        for variant in range(2):
            np.save(kept.file(part, variant), rows[:, None].astype("f4"))
    before = len(os.listdir("/proc/self/fd"))
    shuffled = np.random.default_rng(0).permutation(kept.rows)
    for rows in np.split(shuffled, 8):
        np.testing.assert_array_equal(kept.read(rows, rows)[:, 0], rows)
    assert len(os.listdir("/proc/self/fd")) - before <= 3
