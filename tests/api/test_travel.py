"""Models that are saved, sent and exported compute what the run's model computes."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import yaml

import heron
from heron.api.export import METADATA, ExportError, RawLayer
from heron.base.artefact import MANIFEST, fingerprint
from heron.base.errors import CheckpointError, InputError
from heron.base.extras import MissingPackage
from heron.cli.main import main
from heron.retrieval.embedding_model import ExportLayer
from tests.api.test_model import raw, trained

FILES = {"README.md", "config.yaml", "manifest.json", "model.json", "model.safetensors"}
Case = tuple[str, heron.Run, dict[str, Any]]


@pytest.fixture(scope="module", params=["frames", "faces", "draft"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A run, and its rows as the reader gives them."""
    run = trained(request.param, tmp_path_factory.mktemp(request.param))
    return request.param, run, raw(run)


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> tuple[heron.Run, dict[str, Any]]:
    run = trained("frames", tmp_path_factory.mktemp("frames"))
    return run, raw(run)


def test_a_saved_model_is_the_run_s_to_the_last_bit(case: Case, tmp_path: Path) -> None:
    _, run, rows = case
    wanted, folder = run.model(), tmp_path / "saved"
    wanted.save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} == FILES
    moved = tmp_path / "elsewhere"
    folder.rename(moved)
    found = heron.from_pretrained(moved)
    assert found.labels == wanted.labels and found.layers == wanted.layers
    for layer in found.layers:
        assert (found.encode(rows, layer) == wanted.encode(rows, layer)).all()
    assert (found.predict(rows) == wanted.predict(rows)).all()
    again = tmp_path / "again"  # what is known of the run goes with it
    found.save_pretrained(again)
    assert (again / MANIFEST).read_text() == (moved / MANIFEST).read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "elsewhere"]


def test_the_card_tells_of_the_run_and_not_of_the_machine(case: Case, tmp_path: Path) -> None:
    _, run, _ = case
    folder = tmp_path / "saved"
    run.model().save_pretrained(folder)
    texts = {name: (folder / name).read_text() for name in FILES - {"model.safetensors"}}
    for name, text in texts.items():
        assert str(run.folder.parent) not in text, name
    card = texts["README.md"]
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "heron" and "license" not in header
    assert {"heron", *heron.load_config(run.folder / "config.yaml").objective.terms()} <= {
        *header["tags"]
    }
    score = next(k for k, v in run.scores.items() if isinstance(v, float) and np.isfinite(v))
    assert f"| {score} | {run.scores[score]:.4g} |" in card
    data = json.loads((run.folder.parent / "data" / "manifest.json").read_text())["fingerprint"]
    assert data in card and f"heron {heron.__version__}" in card
    assert 'heron.from_pretrained("saved")' in card
    for view in run.model().views:
        assert f'"{view}": {view}' in card


def test_scores_are_those_of_the_last_weights_alone(
    frames: tuple[heron.Run, Any], tmp_path: Path
) -> None:
    model = frames[0].model()
    with torch.no_grad():
        next(model.network.parameters()).add_(1)
    model.save_pretrained(tmp_path / "tuned")
    card = (tmp_path / "tuned" / "README.md").read_text()
    assert "## Scores" not in card and "fingerprint" not in card


def test_what_was_altered_is_refused(frames: tuple[heron.Run, Any], tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    frames[0].model().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")  # the card is the user's
    heron.from_pretrained(folder)
    for name in ("model.safetensors", "config.yaml", "model.json"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(kept[:-9] + bytes([kept[-9] ^ 1]) + kept[-8:])
        with pytest.raises(CheckpointError) as caught:
            heron.from_pretrained(folder)
        assert f"{folder / name} was altered: its sha256 is " in str(caught.value)
        assert "download it again, or save it again with heron save" in str(caught.value)
        (folder / name).write_bytes(kept)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / "evil.bin").write_bytes(b"")
    for change, told in (
        ({"data": ""}, "its fingerprint is"),
        ({"files": manifest["files"] | {"../x": manifest["files"]["model.json"]}}, "files.../x"),
        ({"files": manifest["files"] | {"evil.bin": dict(bytes=0, sha256="0" * 64)}}, "must list "),
    ):
        tree = manifest | change
        if "files" in change:
            tree["fingerprint"] = fingerprint(tree)
        (folder / MANIFEST).write_text(json.dumps(tree))
        with pytest.raises(CheckpointError) as caught:
            heron.from_pretrained(folder)
        assert told in str(caught.value)


def test_a_folder_that_holds_something_is_left(
    frames: tuple[heron.Run, Any], tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(CheckpointError, match="already exists; choose another --out, or add"):
        frames[0].model().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


class FakeHub(ModuleType):
    """huggingface_hub with a folder for the hub."""

    def __init__(self, root: Path) -> None:
        super().__init__("huggingface_hub")
        self.root, self.private = root, dict[str, Any]()
        self.asked: list[Any] = []

    def HfApi(self) -> "FakeHub":
        return self

    def create_repo(self, name: str, private: bool | None, exist_ok: bool) -> None:
        self.private.setdefault(name, private)
        (self.root / name).mkdir(parents=True, exist_ok=exist_ok)

    def file_exists(self, name: str, file: str, revision: str | None) -> bool:
        return (self.root / name / file).exists()

    def upload_folder(self, repo_id: str, folder_path: Path, **more: Any) -> None:
        left = shutil.ignore_patterns(*(more["ignore_patterns"] or []))
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True, ignore=left)

    def snapshot_download(self, name: str, revision: str | None, allow_patterns: list[str]) -> str:
        self.asked.append((name, revision, sorted(allow_patterns)))
        if not (self.root / name).exists():
            raise OSError("404 Client Error\n\nRepository Not Found")
        folder = self.root / "cache" / f"{len(self.asked)}"
        folder.mkdir(parents=True)
        for file in allow_patterns:
            if (self.root / name / file).exists():
                shutil.copy(self.root / name / file, folder / file)
        return str(folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    made = FakeHub(tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)
    return made


def test_a_model_goes_by_the_hub(
    frames: tuple[heron.Run, dict[str, Any]], hub: FakeHub, tmp_path: Path
) -> None:
    run, rows = frames
    model = run.model()
    model.push_to_hub("lab/frames", private=True)
    assert hub.private == {"lab/frames": True}
    there = hub.root / "lab" / "frames"
    card = (there / "README.md").read_text()
    assert 'heron.from_pretrained("hf://lab/frames")' in card and "# lab/frames" in card
    (there / "evil.pkl").write_bytes(b"")
    found = heron.from_pretrained("hf://lab/frames@v1.0")
    wanted = ["config.yaml", "manifest.json", "model.json", "model.safetensors"]
    assert hub.asked == [("lab/frames", "v1.0", wanted)]
    assert (found.encode(rows) == model.encode(rows)).all()
    (there / "README.md").write_text("mine")
    assert main(["save", str(run.folder), "--push", "hf://lab/frames"]) == 0
    assert (there / "README.md").read_text() == "mine"  # a card that is there stays
    data = bytearray((there / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (there / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="model.safetensors was altered"):
        heron.from_pretrained("hf://lab/frames")
    (there / MANIFEST).unlink()
    with pytest.raises(
        CheckpointError, match="has no manifest.json, so it is not a model that Heron"
    ):
        heron.from_pretrained("hf://lab/frames")
    assert main(["save", str(run.folder), "--push", "lab/frames"]) == 0
    assert (heron.from_pretrained("hf://lab/frames").encode(rows) == model.encode(rows)).all()
    with pytest.raises(CheckpointError) as caught:
        heron.from_pretrained("hf://lab/none")
    assert "hf://lab/none: 404 Client Error Repository Not Found; it must be" in str(caught.value)
    for name in ("lab", "../x", "lab/../x", "lab/x@", "lab/x/y"):
        with pytest.raises(
            CheckpointError, match="does not name a model on the Hub; use hf://org/"
        ):
            heron.from_pretrained(f"hf://{name}")
        with pytest.raises(CheckpointError, match="does not name a model on the Hub"):
            model.push_to_hub(name)


def test_without_its_package_the_hub_is_an_extra(
    frames: tuple[heron.Run, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackage) as caught:
        heron.from_pretrained("hf://lab/frames")
    assert "hf://lab/frames needs the package huggingface_hub, which is not" in str(caught.value)
    assert "pip install 'heron-pretrain[remote]'" in str(caught.value)
    with pytest.raises(MissingPackage, match="heron-pretrain.remote"):
        frames[0].model().push_to_hub("lab/frames")


def computed(path: Path, rows: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What an exported file says of itself, and what it gives of rows."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (prop,) = onnx.load(path).metadata_props
        return json.loads(prop.value), session.run(None, rows)[0]
    extra = {METADATA: ""}
    module = torch.export.load(path, extra_files=extra).module()
    given = {name: torch.from_numpy(values) for name, values in rows.items()}
    return json.loads(extra[METADATA]), module(given).detach().numpy()


@pytest.mark.parametrize("format", ["torch", "onnx"])
def test_an_export_computes_what_the_model_does(case: Case, format: str, tmp_path: Path) -> None:
    name, run, rows = case
    model, suffix = run.model(), {"torch": "pt2", "onnx": "onnx"}[format]
    layers: list[ExportLayer] = ["hidden", "projection", "logits"]
    for layer in layers if name == "frames" else layers[::2]:
        path = tmp_path / f"{layer}.{suffix}"
        words = ["export", run.folder, "--format", format, "--out", path, "--layer", layer]
        assert main([str(word) for word in words]) == 0
        for count in (1, 23):
            some = {view: values[:count] for view, values in rows.items() if view in model.views}
            facts, found = computed(path, some)
            wanted = model.logits(some) if layer == "logits" else model.encode(some, layer)
            assert found.shape == wanted.shape and found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        assert facts["layer"] == layer and facts["heron"] == heron.__version__
        assert facts["views"] == {view: list(rows[view].shape[1:]) for view in model.views}
        assert facts["labels"] == model.labels and facts["width"] == wanted.shape[1]
    if format == "torch":
        assert not [path for path in tmp_path.iterdir() if path.suffix != f".{suffix}"]


def test_a_model_of_bfloat16_is_exported_in_float32(
    frames: tuple[heron.Run, dict[str, Any]], tmp_path: Path
) -> None:
    run, rows = frames
    model = run.model()
    wanted = model.encode(rows)
    model.network.precision = "bf16"
    model.export(tmp_path / "x.onnx", "onnx")
    assert model.network.precision == "bf16"
    np.testing.assert_allclose(computed(tmp_path / "x.onnx", rows)[1], wanted, 1e-5, 1e-5)


def test_an_export_that_differs_leaves_nothing(
    frames: tuple[heron.Run, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = frames[0].model(), tmp_path / "x.pt2"
    with pytest.raises(InputError, match="no layer 'weight', only hidden, projection, logits$"):
        model.export(path, layer="weight")  # type: ignore[arg-type]
    computes = RawLayer.forward
    monkeypatch.setattr(RawLayer, "forward", lambda self, views: computes(self, views) + 1e-3)
    with pytest.raises(ExportError) as caught:
        model.export(path)
    assert (
        "layer 'hidden' differs by 1.0e-03 after its export to torch, in 7 random rows, and the"
        in (str(caught.value))
    )

    def untraceable(self: RawLayer, views: dict[str, torch.Tensor]) -> torch.Tensor:
        return computes(self, views) * float(next(iter(views.values())).sum().item() > 0)

    monkeypatch.setattr(RawLayer, "forward", untraceable)
    with pytest.raises(
        ExportError, match="cannot export layer 'hidden' to torch: .*; torch.export must"
    ):
        model.export(path)
    monkeypatch.setattr(RawLayer, "forward", computes)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingPackage, match="an export to ONNX needs the package onnxruntime"):
        model.export(path, "onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_verb_that_is_asked_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["save", "runs/none"]) == 2
    assert "nothing to do; pass --out, --push, or both" in capsys.readouterr().err
