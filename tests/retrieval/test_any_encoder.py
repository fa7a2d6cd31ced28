"""The report on negatives by any encoder of timm or transformers, without training."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from heron.base import extras
from heron.base.errors import ConfigError, RetrievalError
from heron.cli.arguments import UsageError
from heron.cli.main import main
from heron.cli.reports import negatives
from heron.retrieval.embedding_model import open_encoder
from heron.retrieval.embeddings import Embeddings
from heron.shards.build import build
from heron.sources import make_source
from heron.training.backbone import published
from tests.models.test_networks import timm

__all__ = ["timm"]  # a fixture
ROWS = 60
VIT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.uint8]]:
    """Pictures of three classes of different brightness in two views, and a view of numbers."""
    folder = tmp_path_factory.mktemp("pictures")
    draw, classes = np.random.default_rng(0), np.arange(ROWS) % 3
    left = (draw.integers(0, 60, (ROWS, 16, 16, 3)) + 70 * classes[:, None, None, None]).astype(
        np.uint8
    )
    arrays: dict[str, Any] = {
        "left": left, "right": left[:, ::-1].copy(), "labels": classes,
        "numbers": draw.normal(size=(ROWS, 4)).astype(np.float32),
    }  # fmt: skip
    np.savez(folder / "rows.npz", **arrays)
    build(make_source("arrays", {"npz": folder / "rows.npz"}), folder / "data", progress=False)
    return folder / "data", left


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision transformer of random weights, as `save_pretrained` writes it."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vit")
    config = ViTConfig(**VIT, intermediate_size=32, image_size=16)
    ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def rate_of(vectors: NDArray[Any], targets: NDArray[Any], k: int) -> float:
    """The share of the k nearest by cosine that have the class of a row."""
    unit = vectors.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    nearest = np.argsort(-(unit @ unit.T - 2 * np.eye(len(unit))), axis=1)[:, :k]
    return float((targets[nearest] == targets[:, None]).mean())


def reported(folder: Path, k: int) -> float:
    rates = json.loads((folder / "negatives.json").read_text())["false_negatives"]
    return float(rates["same"]["near"]["value"][rates["k"].index(k)])


@pytest.mark.parametrize("prefix", ["hf:", ""])
def test_a_folder_of_transformers(
    pictures: tuple[Path, NDArray[np.uint8]], vit: Path, tmp_path: Path, prefix: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from transformers import ViTModel

    data, left = pictures
    out = tmp_path / "report"
    asked = ["--encoder", f"{prefix}{vit}", "--data", data, "--view", "left", "--out", out]
    assert main([str(word) for word in ("negatives", *asked, "--anchors", 0, "--k", 5)]) == 0
    shown = capsys.readouterr()
    assert f"report: {out}/report.html" in shown.out
    weights = open_encoder(str(vit), str(data), "left")[1]
    assert weights == Embeddings.open(f"{out}-embeddings").manifest.checkpoint  # so it can go on
    following = f"heron index {out}-embeddings --out indexes/report"
    assert following in shown.out + shown.err
    found = Embeddings.open(tmp_path / "report-embeddings")
    assert found.views == ["left"] and found.manifest.run == f"{prefix}{vit}"
    network = ViTModel.from_pretrained(vit, add_pooling_layer=False)  # in evaluation mode
    x = torch.from_numpy(left[found.samples.rows]).permute(0, 3, 1, 2).float() / 255
    with torch.inference_mode():
        expected = network((x - 0.5) / 0.5).last_hidden_state.mean(1).numpy()
    vectors = np.concatenate([block for _, block in found.blocks("hidden")])
    np.testing.assert_allclose(vectors, expected, atol=1e-4)
    assert reported(out, 5) == pytest.approx(rate_of(expected, found.samples.rows % 3, 5), abs=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_timm(
    timm: ModuleType, pictures: tuple[Path, NDArray[np.uint8]], tmp_path: Path
) -> None:
    small = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4}
    made: Any = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=8, **small)
    save_file(made.state_dict(), tmp_path / "model.safetensors")
    tree: dict[str, Any] = {"architecture": "vit_tiny_patch16_224", "model_args": small}
    tree["pretrained_cfg"] = {"input_size": [3, 8, 8]}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    data, left = pictures
    out = tmp_path / "report"
    negatives(encoder=str(tmp_path), data=str(data), view=("right",), out=out, anchors=0, k=5)
    found = Embeddings.open(tmp_path / "report-embeddings")
    assert len(found) == ROWS and found.layer("hidden").dim == 16
    vectors = np.concatenate([block for _, block in found.blocks("hidden")])
    assert reported(out, 5) == pytest.approx(rate_of(vectors, found.samples.rows % 3, 5), abs=1e-3)
    with pytest.raises(
        ConfigError, match="timm:no_such: timm publishes no safetensors of it; use one of"
    ):
        published("timm:no_such", "--encoder")


def test_an_encoder_of_texts(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    bert = BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=80,
    )  # fmt: skip
    BertModel(bert, add_pooling_layer=False).save_pretrained(tmp_path / "bert")
    vocabulary = {"[UNK]": 0, "red": 1, "blue": 2, "thing": 3}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "bert" / "tokenizer.json"))
    words = [f"{'red' if n % 2 else 'blue'} thing {n}" for n in range(40)]
    table = pa.table({"words": words, "kind": [n % 2 for n in range(40)]})
    pq.write_table(table, tmp_path / "table.parquet")
    options = {"data": [tmp_path / "table.parquet"], "text": ["words"], "label": ["kind"]}
    source = make_source("parquet", options)
    build(source, tmp_path / "data", progress=False)
    out = tmp_path / "report"
    negatives(encoder=f"hf:{tmp_path / 'bert'}", data=str(tmp_path / "data"), out=out, k=3)
    assert (out / "report.html").is_file()


def test_what_is_refused(
    pictures: tuple[Path, NDArray[np.uint8]], vit: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    data = str(pictures[0])
    either = "pass either a folder of embeddings, or --encoder and --data"
    for arguments, message in (
        ({}, either),
        ({"encoder": "x", "embeddings": Path("e")}, either),
        ({"encoder": str(vit)}, "--encoder needs --data, takes one --view at most, and no --index"),
    ):
        with pytest.raises(UsageError, match=message):
            negatives(out=tmp_path / "r", **arguments)
    with pytest.raises(RetrievalError, match="2 of them fit; use --view left or "):
        open_encoder(str(vit), data)
    with pytest.raises(
        RetrievalError,
        match="needs a view of kind image, .*'numbers' is not one; use --view left or --view ri",
    ):
        open_encoder(str(vit), data, "numbers")
    with pytest.raises(ConfigError, match="nowhere, which has no config.json; use a folder with"):
        open_encoder("nowhere", data)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has neither transformers' model_type nor timm's archi"):
        open_encoder(str(tmp_path), data)
    tree = json.loads((vit / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(tree))
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle, which is never read")
    with pytest.raises(ConfigError, match="cannot build this network .*safetensors"):
        open_encoder(str(tmp_path), data, "left")
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(
        extras.MissingPackage,
        match=r"timm:resnet18 needs .* pip install 'heron-pretrain\[vision\]'",
    ):
        open_encoder("timm:resnet18", data)
