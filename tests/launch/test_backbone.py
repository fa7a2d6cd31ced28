"""`heron init --backbone`: an experiment around pretrained weights, which trains."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from heron.api.job import pretrain
from heron.base.errors import ConfigError
from heron.cli.main import main
from heron.experiment.config import load_config
from heron.training.backbone import read_backbone
from heron.training.pretrained import locate
from tests.launch.test_init import STEPS, classes, pictures

TINY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    """A small network of pictures, with random weights, as transformers saves one."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(**TINY, intermediate_size=32, image_size=32, patch_size=16)
    ViTModel(config).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def learnt(run: Path, before: Path) -> set[bool]:
    """Whether tensors of the backbone have changed: {True} all, {False} none."""
    from transformers import ViTModel

    last = load_file(locate(run) / "model.safetensors")
    last = {key.replace("base_layer.", ""): value for key, value in last.items()}
    pairs = [
        (value, next(x for key, x in last.items() if key.endswith(f".{name}")))
        for name, value in ViTModel.from_pretrained(before).state_dict().items()
        if not name.startswith("pooler")  # which no feature comes from
    ]
    assert len(pairs) > 20
    return {not torch.equal(a, b) for a, b in pairs}


@pytest.mark.parametrize("tune", ["frozen", "lora", "full"])
def test_what_is_written_trains_what_it_says(vit: Path, tmp_path: Path, tune: str) -> None:
    data, out = str(pictures(tmp_path)), tmp_path / "mine.yaml"
    assert main(["init", data, "--backbone", str(vit), "--tune", tune, "--out", str(out)]) == 0
    tree = yaml.safe_load(out.read_text())
    assert tree["model"]["encoder"]["weights"] == str(vit)
    assert all(view["size"] == 32 for view in tree["data"]["views"])
    assert tree["optim"]["lr"] == {"frozen": 0.002, "lora": 0.001, "full": 0.0001}[tune]
    run = tmp_path / "run"
    pretrain(load_config(str(out), [f"run.dir={run}", *STEPS, "optim.warmup_epochs=0"]))
    assert learnt(run, vit) == {tune == "full"}


def test_a_backbone_of_another_kind_is_refused(
    vit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["init", str(classes(tmp_path)), "--backbone", str(vit), "--out", str(tmp_path / "x")]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "for views of kind image, but this data set has views of kind vector; remove" in said
    assert main([*words[:2], *words[4:]]) == 0  # as it says: --backbone removed


def config(folder: Path, **tree: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


def test_folders_of_timm_and_of_texts(tmp_path: Path) -> None:
    trained = {"input_size": [3, 224, 224]}
    folder = config(tmp_path / "timm", architecture="resnet18", pretrained_cfg=trained)
    found = read_backbone(str(folder), "full")
    assert (found.kind, found.side) == ("image", 224)
    wanted = {"kind": "timm", "name": "resnet18", "weights": str(folder / "model.safetensors")}
    assert found.encoder == wanted | {"layer_decay": 0.75}
    texts = config(tmp_path / "bert", model_type="bert", vocab_size=100)
    with pytest.raises(ConfigError, match="needs the tokenizer that it was trained with"):
        read_backbone(str(texts), "frozen")
    (texts / "tokenizer.json").write_text("{}")
    found = read_backbone(str(texts), "frozen")
    assert (found.kind, found.tokenizer) == ("text", str(texts / "tokenizer.json"))
    save_file({"x": torch.zeros(1)}, tmp_path / "weights.safetensors")
    found = read_backbone(f"timm:resnet50={tmp_path / 'weights.safetensors'}", "lora")
    assert found.encoder["name"] == "resnet50" and found.encoder["lora"] == {"rank": 8}


@pytest.mark.parametrize("words", ["timm:resnet50", "timm:", "timm:resnet50=nowhere.safetensors"])
def test_a_model_of_timm_without_weights_says_how_to_write_some(words: str) -> None:
    with pytest.raises(ConfigError, match=r"pass --backbone timm:resnet50=weights\.safetensors"):
        read_backbone(words, "frozen")


def test_a_folder_that_says_nothing_is_refused(tmp_path: Path) -> None:
    folder = config(tmp_path / "none", hidden_size=3)
    with pytest.raises(ConfigError, match="neither transformers' model_type nor timm's"):
        read_backbone(str(folder), "frozen")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_backbone(str(tmp_path), "frozen")
