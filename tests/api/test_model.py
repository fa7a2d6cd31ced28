"""Raw rows through a model: the numbers of `heron embed`, without the data set; each refusal."""

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import heron
from heron.base.errors import InputError
from heron.data.dataset import open_reader
from heron.retrieval.embed import embed
from heron.retrieval.embeddings import Layer
from heron.shards.build import build
from heron.sources import make_source

SCENE = Path(__file__).resolve().parents[3] / "shared" / "data" / "scene"
FRAMES = ["data.build.train=120", "data.build.test=40", "data.protocol.labelled=60"]
FRAMES += ["data.batch.labelled=20", "data.batch.unlabelled=30"]
FACES = ["data.build.train=60", "data.build.test=30", "data.protocol.labelled=40"]
FACES += ["evaluate.baselines=false", "data.batch.labelled=10", "data.batch.unlabelled=16"]
DRAFT = ["data.build.size=64", "data.views.0.size=16", "data.views.1.size=16"]
DRAFT += ["data.views.0.augment=[]", "data.views.1.augment=[]"]
CASES = {
    "scene": ("scene", []),
    "frames": ("frames", FRAMES),
    "faces": ("faces", FACES),
    "draft": ("faces", [*FACES, *DRAFT]),
}
Given = dict[str, Any]


def trained(case: str, folder: Path) -> heron.Run:
    """A run of two steps on small data in a folder."""
    name, overrides = CASES[case]
    places = [f"run.dir={folder / 'run'}", f"data.path={folder / 'data'}"]
    config = heron.load_config(name, *overrides, *places, "train.steps=2", "evaluate.map=never")
    if case == "scene":
        if not SCENE.is_dir():
            pytest.skip(f"needs Mulan's Scene in {SCENE}")
        files = [str(SCENE / f"scene-{part}.arff") for part in ("train", "test")]
        options = {"arff": files, "xml": str(SCENE / "scene.xml")}
        options |= {"view_kind": "scene", "noise": "0.01"}
        build(make_source("mulan", options), folder / "data", progress=False)
    return heron.pretrain(config)


def raw(run: heron.Run) -> Given:
    """All rows of the run's data set as the shards hold them."""
    reader = open_reader(heron.load_config(run.folder / "config.yaml").data)
    rows = np.arange(reader.starts[-1])
    return {view.name: reader.read(view.name, rows) for view in reader.manifest.views}


def embedded(run: heron.Run, layer: Any) -> NDArray[np.float32]:
    folder = run.folder.parent / "embeddings"
    found = embed(run.folder, folder, progress=False)
    return np.concatenate([block for _, block in found.blocks(layer)])


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, heron.Run]:
    return request.param, trained(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> tuple[heron.Run, Given]:
    run = trained("frames", tmp_path_factory.mktemp("frames"))
    return run, raw(run)


def test_encode_gives_what_embed_writes_and_needs_no_data_set(case: tuple[str, heron.Run]) -> None:
    name, run = case
    rows = raw(run)
    layers: list[Layer] = ["hidden", "projection"]
    written = {layer: embedded(run, layer) for layer in layers}
    assert len(written["hidden"]) > 80
    hidden = run.folder.parent / "hidden"
    (run.folder.parent / "data").rename(hidden)
    model = heron.from_pretrained(run.folder)
    for layer, wanted in written.items():
        for batch_size in (None, 33):
            found = model.encode(rows, layer, batch_size)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    tensors = {view: torch.from_numpy(values) for view, values in rows.items()}
    assert (model.encode(tensors) == model.encode(rows)).all()
    assert (model.encode({view: list(v) for view, v in rows.items()}) == model.encode(rows)).all()
    if name == "draft":  # the files are decoded at a quarter of their size, as in training
        assert rows["left"].shape[1:] == (16, 16, 3)
        files = pictures(hidden)
        np.testing.assert_allclose(model.encode(files), written["hidden"], rtol=0, atol=1e-6)
    hidden.rename(run.folder.parent / "data")


def pictures(folder: Path) -> Given:
    """The bytes of every picture in some shards, by view."""
    names = [s["file"] for split in manifest(folder)["splits"].values() for s in split]
    found: Given = {"left": [], "right": []}
    for name in names:
        with tarfile.open(folder / name) as tar:
            for member in tar:
                if (view := member.name.split(".")[1]) in found:
                    found[view].append(tar.extractfile(member).read())  # type: ignore[union-attr]
    return found


def manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())


def test_predictions_reach_the_scores_of_the_run(case: tuple[str, heron.Run]) -> None:
    name, run = case
    config = heron.load_config(run.folder / "config.yaml")
    reader, model = open_reader(config.data), heron.from_pretrained(run.folder)
    assert model.labels == reader.manifest.labels.names
    if name == "scene":
        from heron.data.protocol import assign

        test = np.sort(assign(reader, config.data.split, config.data.protocol).test)
    else:
        test = reader.split_rows("test")
    probability = model.predict({v: reader.read(v, test) for v in model.views})
    y = reader.ground_truth(test)
    assert probability.shape == y.shape
    if reader.manifest.labels.kind == "multi_label":
        threshold = float(run.scores.get("threshold", config.evaluate.threshold))
        found = heron.metrics.multi_label_scores(probability, y, threshold)
        found |= {name: run.scores[name] for name in ("threshold",) if name in run.scores}
    else:
        np.testing.assert_allclose(probability.sum(1), 1, rtol=1e-5)
        found = heron.metrics.multi_class_scores(probability, y)
    scores = {k: v for k, v in run.scores.items() if not k.startswith("validation_")}
    assert found == pytest.approx(scores, nan_ok=True)


def test_a_model_says_what_goes_in_and_out(frames: tuple[heron.Run, Given]) -> None:
    model = frames[0].model()
    assert repr(model).startswith("Model(views: view1 [273], view2 [112]; layers: hidden [")
    assert list(model.layers) == ["hidden", "projection", "weight"]
    assert model.config.data.standardise
    model.network.train()
    one = model.encode({k: v[:3] for k, v in frames[1].items()}, "weight")
    assert model.network.training and one.shape == (3, model.layers["weight"])
    assert model.encode({k: v[:0] for k, v in frames[1].items()}).shape[0] == 0


def with_value(rows: Given, value: float) -> Given:
    changed = rows["view1"].copy()
    changed[[37, 40], 5] = value
    return rows | {"view1": changed}


def test_rows_that_do_not_fit(frames: tuple[heron.Run, Given]) -> None:
    run, rows = frames
    model, one, two = run.model(), rows["view1"], rows["view2"]
    raw_rows = "raw as in the shards that the model was trained on"
    broken: list[tuple[Any, str]] = [
        (one, "rows are of one view, but the model sees view1, view2; say which one it is: "
         "{'view1': ...}, or pass more of them"),
        ({}, "no view is given; pass one or more of view1, view2"),
        (rows | {"view3": one}, "no view named 'view3'; pass one or more of view1, view2"),
        (rows | {"view1": one[:, 1:]}, "view 'view1' must be numbers [rows, 273], "
         f"{raw_rows}; the model standardises them itself; it is float32 [160, 272]"),
        (rows | {"view1": one[0]}, "standardises them itself; it is float32 [273]"),
        (rows | {"view1": one.astype(str)}, "; it is <U32 [160, 273]"),
        (rows | {"view1": torch.ones(160, 273, dtype=torch.bool)}, "; it is bool ["),
        (rows | {"view1": [one[0], one[1][:9]]}, "it is not an array ("),
        (rows | {"view1": torch.from_numpy(one).to_sparse()},
         "; it is a tensor of layout torch.sparse_coo"),
        (rows | {"view1": [torch.from_numpy(x).to_sparse() for x in one]},
         "(it is a tensor of layout torch.sparse_coo; pass x.to_dense()"),
        (rows | {"view2": two[:9]}, "the same number of rows, got 160 of 'view1', 9 of 'view2'"),
        (with_value(rows, np.nan), "view 'view1': 2 rows are not finite in float32, "
         "starting with row 37 in column 5; fix or drop these rows"),
    ]  # fmt: skip
    for given, told in broken:
        with pytest.raises(InputError) as caught:
            model.encode(given, batch_size=16)
        assert told in str(caught.value)
    with pytest.raises(InputError, match="no layer 'logits', only hidden, projection, weight$"):
        model.encode(rows, "logits")  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match="layer 'hidden' of 160 rows has NaN or infinite values, first in row"
    ):
        with torch.no_grad():
            next(model.network.parameters()).fill_(np.nan)
        model.encode(rows)


def test_layers_that_are_frozen_stay_so(frames: tuple[heron.Run, Given]) -> None:
    run, given = frames
    model = heron.from_pretrained(run.folder)
    first = next(module for module in model.network.modules() if module is not model.network)
    model.network.train()
    first.eval()
    model.encode(given)
    assert model.network.training and not first.training
    with pytest.raises(InputError, match="batch_size must be at least 1, or None, got 0"):
        model.encode(given, batch_size=0)


def test_pictures_that_do_not_fit(tmp_path: Path) -> None:
    model = trained("faces", tmp_path).model()
    size = model.signature.view("left").shape
    fine = np.zeros((4, *size), np.uint8)
    holds = "view 'left' must be uint8 [rows, 32 × 32 × 3] with channels last and values 0 to 255"
    broken: list[tuple[Any, str]] = [
        (fine.astype(np.float32), "it is float32 [4, 32, 32, 3]"),
        (fine.transpose(0, 3, 1, 2), "it is uint8 [4, 3, 32, 32]"),
        (fine[0], "it is uint8 [32, 32, 3]"),
        ([fine[0], fine[0, :9]], "row 1 must be 32 × 32 × 3, got 9 × 32 × 3"),
        ([fine[0], fine[0] / 255.0], "row 1 is float64 [32, 32, 3]"),
        ([fine[0], b"GIF89a"], "row 1 "),
    ]
    for given, told in broken:
        with pytest.raises(InputError) as caught:
            model.encode({"left": given, "right": fine[: len(given)]})
        assert holds in str(caught.value) and told in str(caught.value)


def test_no_classifier_no_prediction(tmp_path: Path) -> None:
    places = [f"run.dir={tmp_path / 'run'}", f"data.path={tmp_path / 'data'}", "train.steps=1"]
    config = heron.load_config("frames", *FRAMES, *places, method="simclr")
    model = heron.pretrain(config).model()
    with pytest.raises(
        InputError, match="has no classifier, because its objective is .*; add a term"
    ):
        model.predict({})
