"""Views of text: bytes to token ids, and a run with a picture, a text and a vector."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.attention import SDPBackend, sdpa_kernel

import heron
from heron.api.job import pretrain
from heron.base.errors import CheckpointError, ConfigError, InputError, RetrievalError, ShardError
from heron.cli.main import main
from heron.data.dataset import open_reader
from heron.data.decoders import TextDecoder
from heron.data.input_rows import InputView
from heron.losses.objective import build_losses
from heron.models.heterogeneous import Heterogeneous
from heron.retrieval.query import Retriever
from heron.shards.manifest import View
from heron.shards.texts import words_of, write_tokenizers
from heron.training.throughput import model_flops, step_flops
from heron.training.tracking import read_metrics
from tests import ranks
from tests.mixed import captions, mixed, picture

OBJECTIVES: dict[str, dict[str, Any]] = {
    "clip": {},
    "siglip": {"objective": {"clip": None, "siglip": {}}},
    "herocon": {
        "objective": {
            "clip": None,
            "cross_entropy": {},
            "weighted_unsupervised": {"weight": 0.5},
            "weighted_supervised": {"weight": 0.5},
        },
    },
}


def decode(decoder: TextDecoder, text: bytes) -> list[int]:
    out = np.full(decoder.shape, 99, np.int32)
    decoder.decode(text, out)
    return [int(token) for token in out]


def test_bytes_are_tokens() -> None:
    decoder = TextDecoder(6)
    assert decode(decoder, b"ab") == [0, 98, 99, -1, -1, -1]
    assert decode(decoder, "é!!!!!".encode()) == [0, 196, 170, 34, 34, 34]
    assert decode(decoder, b"") == [0, -1, -1, -1, -1, -1]
    assert decoder.vocabulary == 257
    with pytest.raises(ValueError, match="must be UTF-8, got b'\\\\xff\\\\xfe'"):
        decode(decoder, b"\xff\xfe")


def test_a_tokenizer_of_the_library(tmp_path: Path) -> None:
    texts = ["a red square", "a blue square", "red and blue"] * 3
    t, u = write_tokenizers(tmp_path, {"t": words_of(texts), "u": words_of(texts[::-1])})
    decoder = TextDecoder(5, (tmp_path / t).read_text())
    words = json.loads(decoder.tokenizer)["model"]["vocab"]
    known = [words[word] for word in ("[CLS]", "red", "square", "[SEP]")]
    assert decode(decoder, b"Red square") == [*known, -1]
    assert decode(pickle.loads(pickle.dumps(decoder)), b"red square a blue red")[-1] == 1
    assert (tmp_path / u).read_bytes() == (tmp_path / t).read_bytes()


def test_a_vocabulary_with_gaps_has_room_for_its_last_id() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    decoder = TextDecoder(2, words.to_str())
    assert decode(decoder, b"a b") == [0, 7]
    assert decoder.vocabulary == 8


def losses(folder: str, name: str, changes: dict[str, Any]) -> list[float]:
    config = mixed(Path(folder), name, train={"precision": "fp64"}, **changes)
    pretrain(config)
    rows = list(read_metrics(Path(folder) / name / "metrics.jsonl"))
    steps = [
        value for row in rows if "loss" in row for value in (row["loss"], row["gradient_norm"])
    ]
    assert len(steps) == 8
    return [*steps, *(v for row in rows for k, v in row.items() if "recall@" in k)]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_processes_are_one(name: str, tmp_path: Path) -> None:
    (one,) = ranks.run(1, losses, str(tmp_path), "one", OBJECTIVES[name])
    two = ranks.run(2, losses, str(tmp_path), "two", OBJECTIVES[name])
    if name == "siglip":  # its bias follows the global batch: at -10 the first loss is 11.15
        assert abs(one[0] - 11.15) > 1
    torch.testing.assert_close(torch.tensor(two[0]), torch.tensor(one), rtol=1e-8, atol=1e-8)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt what its words mean."""
    folder = tmp_path_factory.mktemp("mixed")
    tokenizer = folder / "mixed" / "caption.tokenizer.json"
    views = mixed(folder).model_dump(mode="json")["data"]["views"]
    views[1]["tokenizer"] = str(tokenizer)
    build = mixed(folder, train={"steps": 1})
    open_data(build)
    result = pretrain(mixed(folder, data={"views": views}, train={"epochs": 60, "steps": 240}))
    assert result["recall@10_caption_image"] > 0.6  # chance is .42
    return folder


def open_data(config: Any) -> None:
    from heron.data.dataset import build_data

    build_data(config.data, progress=False)


def test_a_text_finds_pictures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["embed", str(run / "run"), "--out", str(run / "e"), "--split", "test", "--quiet"],
        ["index", str(run / "e"), "--out", str(run / "i"), "--layer", "projection", "--quiet"],
        ["index", str(run / "e"), "--out", str(run / "h"), "--quiet"],
    ):
        assert main(words) == 0
    retriever = Retriever.open(run / "i")
    assert retriever.takes_text
    right = 0
    for colour in ("red", "green", "blue"):
        found = retriever.by_text(f"a large {colour} square", 4)
        right += [hit.labels for hit in found.hits].count([colour])
    assert right >= 8  # of 12; by chance 4
    capsys.readouterr()
    assert main(["query", str(run / "i"), "--text", "a small red square", "--k", "3"]) == 0
    assert "query   a small red square" in capsys.readouterr().out
    number = [text.endswith("blue square") for text in captions(range(24))].index(True)
    found = retriever.by_file({"image": picture(number)}, 6, across=True)
    assert [hit.labels for hit in found.hits].count(["blue"]) >= 3
    for folder in ("h", "i"):
        found = Retriever.open(run / folder).by_file({"image": picture(number)}, 6)
        assert found.hits[0].score == pytest.approx(1, abs=1e-4)
    caption = {"caption": b"a small red square"}
    found = Retriever.open(run / "h").by_file(caption, 4)
    assert [hit.labels for hit in found.hits].count(["red"]) >= 2
    assert found.query.compares.startswith("caption with the same view of each sample; image, se")
    with pytest.raises(RetrievalError, match="index is of layer 'hidden', but a text is compared"):
        Retriever.open(run / "h").by_text("red", 3)
    assert not Retriever.open(run / "h").takes_text


def test_a_model_takes_strings(run: Path) -> None:
    model = heron.from_pretrained(run / "run")
    embedded = heron.from_pretrained(run / "run")
    reader = open_reader(embedded.config.data)
    rows = reader.split_rows("test")[:5]
    given: dict[str, Any] = {
        "image": reader.read("image", rows),
        "caption": captions(range(5)),
        "sensors": reader.read("sensors", rows),
    }
    z = model.encode(given, layer="projection")
    assert z.shape == (5, 24)
    (run / "mixed" / "caption.tokenizer.json").rename(run / "away.json")
    try:
        again = heron.from_pretrained(run / "run").encode(given, layer="projection")
    finally:
        (run / "away.json").rename(run / "mixed" / "caption.tokenizer.json")
    np.testing.assert_array_equal(again, z)
    with pytest.raises(
        InputError, match="view 'caption' must be a list of texts, .*; one row is int"
    ):
        model.encode(given | {"caption": [3] * 5})


def test_resume_refuses_another_tokenizer(run: Path) -> None:
    views = mixed(run).model_dump(mode="json")["data"]["views"]
    views[1]["tokenizer"] = str(run / "other.tokenizer.json")
    changes: dict[str, Any] = {"data": {"views": views}, "train": {"steps": 2}}
    write_tokenizers(run, {"other": words_of(["a red square"] * 3)})
    pretrain(mixed(run, "resumed", **changes))
    write_tokenizers(run, {"other": words_of(["blue and large"] * 3)})
    more = changes | {"train": {"steps": 3}, "run": {"resume": "auto"}}
    from heron.data import decoders

    decoders._tokenizer_text.cache_clear()
    with pytest.raises(
        CheckpointError, match="with another tokenizer of the texts of 'caption'; restore"
    ):
        pretrain(mixed(run, "resumed", **more))


@pytest.mark.parametrize(
    ("view", "told"),
    [
        ({"tokenizer": "nowhere.json"}, "cannot read tokenizer nowhere.json of 'caption'"),
        ({"tokenizer": __file__}, "cannot read tokenizer .*use a tokenizer.json, or bytes"),
        ({"size": 8}, "size is .8, 8., but 'caption' has texts; remove it"),
        ({"augment": ["noise"]}, "'noise' does not work on text view 'caption'"),
    ],
)
def test_what_a_text_cannot_be(run: Path, view: dict[str, Any], told: str) -> None:
    config = mixed(run).model_dump(mode="json")["data"]
    views = [*config["views"][:1], {"stored": "caption", **view}]
    with pytest.raises(ConfigError, match=told):
        open_reader(mixed(run, data={"views": views}).data)


def test_a_step_is_counted_and_inputs_are_not_compared(tmp_path: Path) -> None:
    config, shapes = mixed(tmp_path), [(16, 16, 3), (24, 257), (5,)]
    model = Heterogeneous(
        config.model, shapes, 3, build_losses(config.objective), config.data.view_names
    ).eval()
    inputs = [torch.rand(4, 3, 16, 16), torch.ones(4, 24, dtype=torch.int32), torch.rand(4, 5)]
    with sdpa_kernel(SDPBackend.MATH):  # kernels of CPUs are not counted
        real = step_flops(lambda: model.embed(inputs, torch.arange(4), [4]))
    assert model_flops(model, shapes, 4) == real > 0
    hcl: dict[str, Any] = {"clip": None, "input_weighted_unsupervised": {}}
    other = mixed(tmp_path, objective=hcl)
    with pytest.raises(ConfigError, match="input_weighted_unsupervised compares the inputs them"):
        Heterogeneous(other.model, shapes, 3, build_losses(other.objective), other.data.view_names)


def test_a_view_of_text_has_no_fixed_shape() -> None:
    with pytest.raises(ValueError, match=r"texts must have shape \(-1,\), got \(5,\)"):
        View(name="t", kind="text", shape=(5,), dtype="uint8")


def test_a_text_that_is_no_utf8(run: Path, tmp_path: Path) -> None:
    reader = open_reader(mixed(run).data)
    opened = reader._open_shard(0)
    at = int(opened.index.offsets[2, 1])
    shard = run / "mixed" / "train-000000.tar"
    data = bytearray(shard.read_bytes())
    kept, data[at] = bytes(data), 0xFF
    shard.write_bytes(data)
    try:
        with pytest.raises(ShardError, match="sample train0002: view 'caption' must be UTF-8"):
            reader.read("caption", np.array([2]))
        skipping = open_reader(mixed(run, data={"on_error": "skip"}).data)
        rows = np.array([1, 2])
        out = np.full((2, *skipping.decoders["caption"].shape), 10**9, np.int32)
        skipping.fill({"caption": out}, rows)  # which is scored with the others, by an embedding
        assert list(skipping.lost) == [2] and not out[1].any() and out[0].max() < 10**9
        skipping.fill({"caption": out}, rows[::-1].copy())
        assert not out[0].any() and out[1].any()
    finally:
        shard.write_bytes(kept)


@pytest.mark.parametrize("rows", ["a red square", np.array("a red square"), None])
def test_one_text_is_no_list_of_texts(rows: Any) -> None:
    view = View(name="caption", kind="text", shape=(-1,), dtype="uint8")
    told = "view 'caption' must be a list of texts"
    with pytest.raises(InputError, match=told):
        InputView(view, TextDecoder(8), rows)
