"""`heron init` writes an experiment for any data set, and the experiment trains."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from heron.api.job import pretrain
from heron.base.errors import ConfigError
from heron.base.shipped import find_config
from heron.cli.init import batch_of, experiment, read_facts
from heron.cli.main import main
from heron.experiment.config import load_config
from heron.models.encoders import build_encoder
from tests.sealed import seal

DRAW = np.random.default_rng(0)
STEPS = ["train.steps=2", "train.cpu_threads=1", "evaluate.map=never", "evaluate.baselines=false"]


def arrays(folder: Path, labels: Any, *more: object, **views: Any) -> Path:
    """Shards of arrays; `labels` None: they have none."""
    given = views if labels is None else views | {"labels": labels}
    np.savez(folder / "made.npz", **given)
    words = ["--npz", folder / "made.npz", "--out", folder / "data", "--quiet", *more]
    assert main(["shards", "build", "arrays", *map(str, words)]) == 0
    return folder / "data"


def vectors(folder: Path) -> Path:
    one, two = (DRAW.normal(size=(60, width)).astype(np.float32) for width in (9, 40))
    return arrays(folder, DRAW.integers(0, 2, (60, 3)).astype(np.uint8), one=one, two=two)


def classes(folder: Path) -> Path:
    one = DRAW.normal(size=(40, 6)).astype(np.float32)
    return arrays(folder, DRAW.integers(0, 3, 40), one=one)


def unlabelled(folder: Path) -> Path:
    return arrays(folder, None, one=DRAW.normal(size=(40, 6)).astype(np.float32))


def complementary(folder: Path) -> Path:
    one, two = (DRAW.normal(size=(40, 6)).astype(np.float32) for _ in range(2))
    wrong = 1 - np.eye(4, dtype=np.uint8)[DRAW.integers(0, 4, 40)]
    return arrays(folder, wrong, "--label-kind", "complementary", one=one, two=two)


def pictures(folder: Path) -> Path:
    words = ["--out", folder / "data", "--quiet", "--train", 40, "--test", 10, "--size", 32]
    assert main(["shards", "build", "faces", *map(str, words)]) == 0
    return folder / "data"


def tree(folder: Path, first: str = "train", second: str = "test") -> Path:
    """Pictures of several sizes in folders of two levels."""
    for split, rows in ((first, 6), (second, 2)):
        for name in ("animal/cat", "animal/dog", "thing/car"):
            (place := folder / "tree" / split / name).mkdir(parents=True)
            for row in range(rows):
                pixels = DRAW.integers(0, 256, (30 + row, 40, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{row}.png")
    words = ["--folder", folder / "tree", "--out", folder / "data", "--quiet"]
    words += ["--split-names", first, second]
    assert main(["shards", "build", "folder", *map(str, words)]) == 0
    return folder / "data"


def mixed(folder: Path) -> Path:
    """A picture, a caption and five readings a row."""
    words = ["tests.mixed.Mixed", "--out", folder / "data", "--quiet"]
    assert main(["shards", "build", *map(str, words)]) == 0
    return folder / "data"


@pytest.mark.parametrize(
    ("made", "terms", "views"),
    [
        (
            mixed,
            {"cross_entropy", "weighted_unsupervised", "weighted_supervised"},
            ["image", "caption", "sensors"],
        ),
        (vectors, {"bce", "weighted_unsupervised", "weighted_supervised"}, ["one", "two"]),
        (classes, {"cross_entropy"}, ["one"]),
        (unlabelled, {"nt_xent"}, ["one", "one"]),
        (complementary, {"ub_log", "mulco"}, ["one", "one"]),
        (pictures, {"bce", "weighted_unsupervised", "weighted_supervised"}, ["image", "image"]),
        (tree, {"hierarchical"}, ["image", "image"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_it_writes_trains(
    made: Any, terms: set[str], views: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    data = made(tmp_path)
    assert main(["init", str(data), "--out", "mine.yaml"]) == 0
    assert capsys.readouterr().err.endswith("next: heron pretrain mine.yaml\n")
    config = load_config("mine.yaml", STEPS)
    assert {*config.objective.terms()} == terms
    assert [view.stored for view in config.data.views] == views
    assert pretrain(config)["steps"] == 2
    lines = Path("mine.yaml").read_text().splitlines()
    assert sum(" # " in line for line in lines) >= 11  # reasons


def test_choices_go_with_the_data(tmp_path: Path) -> None:
    facts = read_facts(str(vectors(tmp_path)))
    text = yaml.safe_load(experiment("x", facts, "x"))
    assert text["model"]["encoder"]["widths"] == [32, 32]
    assert text["data"]["protocol"] == {
        "labelled": 48,
        "stratified": True,
        "test": "unlabelled",
    }
    assert text["data"]["standardise"] is True and "augment" not in text["data"]["views"][0]
    assert "epochs" not in text["train"] and "steps" not in text["train"]
    assert text["train"]["total_steps"] == 200 * (48 // 16)  # of the 48 rows that stay labelled
    assert "# 200 epochs of these rows; more rows, fewer epochs" in experiment("x", facts, "x")
    assert [batch_of(rows) for rows in (5, 100, 1000, 10**6)] == [5, 16, 64, 256]


def test_a_data_set_without_a_train_split_is_tested_on_another(tmp_path: Path) -> None:
    facts = read_facts(str(tree(tmp_path, "test", "val")))
    assert (facts.split, facts.test) == ("test", "val")


def few_labels(folder: Path, *more: object) -> Path:
    """Grey pictures of three classes, with and without a test split."""
    labels, image = np.arange(90) % 3, DRAW.integers(0, 256, (90, 16, 16)).astype(np.uint8)
    split = np.array(["train"] * 80 + ["test"] * 10)
    return arrays(folder, labels, *more, image=image, split=split)


def test_few_labels_use_the_rows_without(tmp_path: Path) -> None:
    """Of 200 labelled and 9,800 other pictures the others were left unused."""
    data = str(few_labels(tmp_path))
    (tmp_path / "all.yaml").write_text(experiment(data, read_facts(data), "all"))
    assert load_config(tmp_path / "all.yaml").data.batch.unlabelled == 0
    text = experiment(data, read_facts(data, 30, 6), "few")
    (tmp_path / "few.yaml").write_text(text)
    often = [f"run.dir={tmp_path}/r", *STEPS, "train.evaluate_every_steps=1"]
    config = load_config(tmp_path / "few.yaml", often)
    assert (config.data.protocol.labelled, config.data.protocol.validation) == (30, 0.2)
    assert {*config.objective.terms()} == {"cross_entropy", "supcon", "nt_xent", "fixmatch"}
    assert (config.data.batch.labelled, config.data.batch.unlabelled) == (24, 50)
    assert "--labelled 30, of 80 rows with a label; --validation 6: held out" in text
    assert "of 24 labelled and 50 other rows" in text
    result = pretrain(config)
    assert result["steps"] == 2 and "validation_accuracy" in result
    assert config.train.keep == "best" and result["kept_step"] in (1, 2)


@pytest.mark.parametrize("side", [4, 8, 28, 48, 96, 200])
@pytest.mark.parametrize("classes", [2, 3])
def test_pictures_of_two_classes_have_no_connected_layer(
    side: int, classes: int, tmp_path: Path
) -> None:
    """A convnet's last grid is 2 to 6 pixels wide; of two classes it is the features."""
    labels = np.arange(12) % classes
    image = DRAW.integers(0, 256, (12, side, side, 3)).astype(np.uint8)
    data = str(arrays(tmp_path, labels, image=image))
    (tmp_path / "mine.yaml").write_text(experiment(data, read_facts(data), "mine"))
    config = load_config(tmp_path / "mine.yaml")
    encoder: Any = config.model.encoder
    left = min(side, 96) >> len(encoder.channels)
    assert 1 <= left <= 6 and (left >= 2 or side == 4)
    assert (encoder.kind, encoder.widths) == (("vgg", []) if classes == 2 else ("convnet", [200]))
    _, width = build_encoder(encoder, [min(side, 96)] * 2 + [3], 0)
    assert width == (encoder.channels[-1] * min(3, left) ** 2 if classes == 2 else 200)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_smaller_of_two_pictures_can_be_halved_as_often(classes: int, tmp_path: Path) -> None:
    """Views of 64 and 8 pixels share an encoder, which halved four times."""
    views = {
        name: DRAW.integers(0, 256, (30, side, side, 3)).astype(np.uint8)
        for name, side in (("large", 64), ("small", 8))
    }
    data = str(arrays(tmp_path, np.arange(30) % classes, **views))
    (tmp_path / "mine.yaml").write_text(experiment(data, read_facts(data), "mine"))
    config = load_config(tmp_path / "mine.yaml", [f"run.dir={tmp_path}/run", *STEPS])
    assert pretrain(config)["steps"] == 2


def test_one_table_is_told_of_a_forest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = classes(tmp_path), tmp_path / "mine.yaml"
    capsys.readouterr()
    assert main(["init", str(data), "--labelled", "12", "--out", str(out)]) == 0
    assert "a forest may do better: the report of the run compares" in capsys.readouterr().out
    text = out.read_text()
    assert load_config(out).evaluate.baselines == "scikit-learn"
    assert "# one table: a second view of it would add nothing" in text
    assert "of 12 labelled and 28 other rows, which training does not use" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--labelled", "0"],
            "--labelled must be 3 (a row of each class) to 80, got 0: 80",
        ),
        (["--labelled", "81"], "to 80, got 81: 80 rows of DATA have a label; change or remove it"),
        (["--labelled", "30", "--validation", "28"], "must be at most 27, got 28: 3 or more of 30"),
        (["--validation", "78"], "of 80 labelled rows must be left to train on; lower it, or"),
    ],
)
def test_a_number_of_labels_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    data, out = str(few_labels(tmp_path)), tmp_path / "mine.yaml"
    capsys.readouterr()
    assert main(["init", data, *words, "--out", str(out)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert told.replace("DATA", data) in line and not out.exists()


def test_without_a_test_split_some_rows_are_left_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(vectors(tmp_path))
    assert read_facts(data, 59).labelled == 59
    with pytest.raises(ConfigError, match="to 59, got 60: 60 .* must be left to test on"):
        read_facts(data, 60)
    facts = read_facts(data, validation=8)
    assert (facts.labelled, facts.validation, facts.unlabelled) == (40, 8, 12)
    with pytest.raises(ConfigError, match="has no labelled rows; remove --labelled and --valid"):
        read_facts(str(arrays(tmp_path, None, "--overwrite", one=np.ones((9, 6)) * 1.5)), 5)


@pytest.mark.parametrize("known", [1, 2])
def test_too_few_labels_to_train_and_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], known: int
) -> None:
    """Of one it wrote an experiment that does not load, of two one that cannot be trained."""
    labels = np.where(np.arange(40) < known, np.arange(40), -1)
    data = arrays(tmp_path, labels, one=DRAW.normal(size=(40, 6)).astype(np.float32))
    assert main(["init", str(data), "--out", str(tmp_path / "made.yaml")]) == 1
    assert (
        f"{data}: {known} of 40 rows of split 'all' have a label, but training and testing need 3"
    ) in capsys.readouterr().err
    assert not (tmp_path / "made.yaml").exists()


def test_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = unlabelled(tmp_path)
    (out := tmp_path / "there.yaml").touch()
    assert main(["init", str(data), "--out", str(out)]) == 1
    assert f"{out} already exists; name a new file with --out" in capsys.readouterr().err
    few = arrays(tmp_path, None, "--overwrite", one=np.ones((3, 6), np.float32))
    assert main(["init", str(few), "--out", str(tmp_path / "few.yaml")]) == 1
    assert "split 'all' must have 4 or more rows, got 3" in capsys.readouterr().err
    wrong = np.eye(4, dtype=np.uint8)[DRAW.integers(0, 4, 40)]
    one = np.ones((40, 6), np.float32)
    told = "--label-kind", "complementary"
    vague = arrays(tmp_path, wrong, *told, "--overwrite", one=one)
    assert main(["init", str(vague), "--out", str(tmp_path / "vague.yaml")]) == 1
    assert (
        "leave several classes, so none can be tested; add a split 'test'"
        in capsys.readouterr().err
    )
    assert main(["init", str(tmp_path / "none")]) == 1
    assert "no such file; pass a folder that" in capsys.readouterr().err


def test_the_name_of_a_data_set_brings_no_keys(tmp_path: Path) -> None:
    data = vectors(tmp_path)
    name = "x\n  webdataset: {samples_per_epoch: 9, labelled: 'pipe:touch it'}\n  #"
    seal(data / "manifest.json", dataset=name)
    assert main(["init", str(data), "--out", str(tmp_path / "made.yaml")]) == 0
    text = (tmp_path / "made.yaml").read_text()
    assert "webdataset" not in yaml.safe_load(text)["data"] and "x\\n  webdataset" in text


@pytest.mark.parametrize("labelled", [48, 30, 12])
def test_another_number_of_labels_keeps_the_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], labelled: int
) -> None:
    """In epochs, 12 labels in place of 48 made a quarter of the steps, without a word."""
    data = str(vectors(tmp_path))
    (tmp_path / "mine.yaml").write_text(experiment(data, read_facts(data), "x"))
    words = [f"data.protocol.labelled={labelled}", "data.batch.labelled=4", f"run.dir={tmp_path}/r"]
    config = load_config(tmp_path / "mine.yaml", words)
    per_epoch = labelled // 4
    assert config.train.length(per_epoch) == (600, 600 / per_epoch)
    config = load_config(tmp_path / "mine.yaml", [*words, "train.total_steps=20", *STEPS[1:]])
    result = pretrain(config)
    assert (result["steps"], result["epochs"]) == (20, 20 / per_epoch)
    assert f"20 steps = {20 / per_epoch:g} epochs x {per_epoch}\n" in capsys.readouterr().out


def test_a_run_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="total_steps are both null; set one of them, such"):
        load_config(find_config("faces"), ["train.epochs=null"])
    config = load_config(find_config("faces"), ["train.epochs=null", "train.total_steps=7"])
    assert config.train.length(2) == (7, 3.5)
    config = load_config(find_config("faces"), ["train.epochs=3", "train.steps=7"])
    assert (config.train.length(2), config.train.length(4)) == ((6, 3), (7, 3))
    both = ["train.epochs=3", "train.total_steps=7"]
    with pytest.raises(ConfigError, match="are both set; set epochs: null for a run of 7 steps"):
        load_config(find_config("faces"), both)
    faces = load_config(find_config("faces"), [both[1]])  # the one replaces the other
    assert (faces.train.epochs, faces.train.total_steps) == (None, 7)
    with pytest.raises(ConfigError, match="steps is 9, after the end of the run at total_steps, 7"):
        load_config(find_config("faces"), ["train.epochs=null", both[1], "train.steps=9"])
