"""Models of methods with parts of their own, and of texts, compute the same as one file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heron
from heron.api.job import pretrain
from heron.base.errors import InputError
from heron.losses.mib import Bottlenecks
from heron.models.heterogeneous import Encoded, Features
from tests.api.test_travel import computed
from tests.mixed import mixed
from tests.reference_runs import data, experiment


def assert_same(
    model: heron.Model, rows: dict[str, Any], given: dict[str, Any], path: Path
) -> dict[str, Any]:
    """A file computes the model's logits, of two numbers of rows; returns what it says."""
    model.export(path, "onnx" if path.suffix == ".onnx" else "torch", "logits")
    facts: dict[str, Any] = {}
    for count in (1, 9):
        some = {name: values[:count] for name, values in rows.items()}
        wanted = model.logits(some)
        facts, found = computed(path, {name: values[:count] for name, values in given.items()})
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        assert facts["width"] == wanted.shape[1]
    return facts


# What the network has besides encoders, a linear classifier and projectors: a second network, a
# classifier of task groups, a code of labels.
@pytest.mark.parametrize("method", ["plnl", "deepmtmv", "c2ae"])
def test_a_method_is_exported(method: str, tmp_path: Path) -> None:
    data(tmp_path)
    pretrain(experiment(tmp_path, method, method, steps=2))
    model = heron.from_pretrained(tmp_path / method)
    draw = np.random.default_rng(0)
    rows = {name: draw.normal(size=(9, 12)).astype(np.float32) for name in model.views}
    assert_same(model, rows, rows, tmp_path / "x.pt2")


def test_texts_are_token_ids(tmp_path: Path) -> None:
    terms: dict[str, Any] = {"clip": {}, "cross_entropy": {}}
    pretrain(mixed(tmp_path, train={"steps": 2}, objective=terms))
    model = heron.from_pretrained(tmp_path / "run")
    draw = np.random.default_rng(0)
    texts = ["red", "a small green square", "", *(["blue and large" * 9] * 6)]
    (decoder,) = [one.decoder() for one in model.signature.inputs if one.text is not None]
    assert decoder is not None
    ids = np.empty((9, *decoder.shape), np.int32)
    for text, row in zip(texts, ids, strict=True):
        decoder.decode(text.encode(), row)
    rows: dict[str, Any] = {
        "image": draw.integers(0, 256, (9, 16, 16, 3), np.uint8),
        "sensors": draw.normal(size=(9, 5)).astype(np.float32),
    }
    given = {**rows, "caption": ids}
    for name in ("x.pt2", "x.onnx"):
        facts = assert_same(model, {**rows, "caption": texts}, given, tmp_path / name)
        assert facts["tokenizers"] == {"caption": "bytes"}
        assert facts["views"]["caption"] == list(decoder.shape)


def test_formats_and_parts_that_a_layer_does_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data(tmp_path)
    pretrain(experiment(tmp_path, "mib", "mib", steps=1))
    model = heron.from_pretrained(tmp_path / "mib")
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    add = Bottlenecks.add_features

    def untraceable(self: Bottlenecks, encoded: Encoded) -> Features:
        return add(self, encoded) if float(encoded.hidden[0].sum()) < 1e9 else {}

    monkeypatch.setattr(Bottlenecks, "add_features", untraceable)
    with pytest.raises(InputError, match="format must be 'torch' or 'onnx', got 'ONNX'"):
        model.export(tmp_path / "x.onnx", "ONNX")  # type: ignore[arg-type]
    model.export(tmp_path / "x.pt2", layer="projection")
    assert model.network._parts == ["bottlenecks"]
    assert all(torch.equal(value, before[n]) for n, value in model.network.state_dict().items())
