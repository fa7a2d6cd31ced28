"""Networks of transformers and timm as encoders: features, what is learnt, and what is refused."""

import dataclasses
import inspect
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING

from heron.base.errors import ConfigError
from heron.base.extras import MissingPackage, require
from heron.experiment.options import Optim
from heron.losses.unsupervised import Cmc
from heron.models.encoders import build_encoder
from heron.models.heterogeneous import Heterogeneous
from heron.models.networks import of_folder, with_pretrained_configs, without_weights
from heron.models.options import ModelConfig
from heron.models.strangers import NETWORKS
from heron.training.optim import build_optimizer
from heron.training.strategy import set_rate

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
BERT = {"model_type": "bert", "hidden_size": 16, "max_position_embeddings": 12, **SMALL}
VIT = {"model_type": "vit", "hidden_size": 8, "patch_size": 4, **SMALL}
PICTURE, TEXT = [8, 8, 3], [10, 50]


def made(shape: list[int], **options: Any) -> Any:
    torch.manual_seed(0)
    model = ModelConfig.model_validate({"encoder": {"kind": "transformers", **options}})
    return build_encoder(model.encoder, shape, salt=0)[0]


def ids(*lengths: int) -> Tensor:
    rows = torch.full((len(lengths), TEXT[0]), -1, dtype=torch.int32)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = torch.arange(length) + 1
    return rows


def learnt(encoder: nn.Module) -> set[str]:
    return {name for name, p in encoder.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_padding_changes_nothing(pooling: str) -> None:
    encoder = made(TEXT, config=BERT, pooling=pooling).double()
    keys = torch.arange(2)
    both, one = encoder(ids(3, 9), keys), encoder(ids(3)[:, :3], keys[:1])
    assert both.shape == (2, 16)
    torch.testing.assert_close(both[:1], one)
    if pooling == "mean":
        hidden = encoder.network(input_ids=ids(3)[:, :3].long()).last_hidden_state
        torch.testing.assert_close(one, hidden.mean(1))


def test_dropout_is_off_and_what_nothing_depends_on_is_not_learnt() -> None:
    text, picture = made(TEXT, config=BERT), made(PICTURE, config=VIT)
    for encoder, x in ((text, ids(4, 5)), (picture, torch.rand(2, 3, 8, 8))):
        encoder.train()
        features = encoder(x, torch.arange(2))
        assert torch.equal(features, encoder(x, torch.arange(2)))
        features.sum().backward()
        assert {n for n, p in encoder.named_parameters() if p.grad is not None} == learnt(encoder)
    assert not any("pooler" in name for name in learnt(text))
    assert any("query" in name for name in learnt(text))


def test_no_rows_have_no_features_and_a_gradient_of_zero() -> None:
    for encoder, x in (
        (made(TEXT, config=BERT), ids(4)),
        (made(PICTURE, config=VIT), torch.rand(2, 3, 8, 8)),
    ):
        features = encoder(x[:0], torch.arange(0))
        assert features.shape[0] == 0 and features.shape[1] in (8, 16)
        features.sum().backward()
        gradients = [p.grad for p in encoder.parameters() if p.requires_grad]
        assert all(slope is not None and not slope.any() for slope in gradients)


def test_lora_learns_low_ranks_alone_and_a_frozen_network_nothing() -> None:
    lora = made(TEXT, config=BERT, lora={"rank": 2, "targets": ["query"]})
    assert {name.split(".")[-3] for name in learnt(lora)} == {"lora_A", "lora_B"}
    frozen = made(TEXT, config=BERT, freeze=True)
    assert not learnt(frozen)
    assert not frozen.train().network.training
    with pytest.raises(ConfigError, match=r"model\.encoder\.lora: .*set targets to the last parts"):
        made(TEXT, config=BERT, lora={"targets": ["nothing"]})


def test_rates_fall_with_depth() -> None:
    encoder = made(TEXT, config=BERT, layer_decay=0.5)
    head = nn.Linear(16, 2)
    optimizer = build_optimizer(
        Optim(kind="adamw", lr=1.0), [*encoder.parameters(), *head.parameters()]
    )
    set_rate(optimizer, 0.8)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    named = dict(encoder.named_parameters())
    by_depth = [
        rates[id(p)]
        for start in ("embeddings.word", "encoder.layer.0.", "encoder.layer.1.")
        for name, p in named.items()
        if name.startswith(f"network.{start}") and p.requires_grad
    ]
    assert sorted(set(by_depth)) == [0.2, 0.4, 0.8]
    assert rates[id(named["network.embeddings.word_embeddings.weight"])] == 0.2
    assert rates[id(head.weight)] == 0.8


def test_weights_of_a_folder(tmp_path: Path) -> None:
    first = made(TEXT, config=BERT)
    first.network.save_pretrained(tmp_path)
    torch.manual_seed(5)
    model = ModelConfig.model_validate(
        {"encoder": {"kind": "transformers", "weights": str(tmp_path)}}
    )
    again, width = build_encoder(model.encoder, TEXT, salt=0)
    assert width == 16
    torch.testing.assert_close(again(ids(4), torch.arange(1)), first(ids(4), torch.arange(1)))
    found: Any = without_weights(with_pretrained_configs(model)).encoder
    assert found.weights is None and found.config["hidden_size"] == 16
    build_encoder(found, TEXT, salt=0)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "auto_map": {}}))
    with pytest.raises(ConfigError, match="the network has its own code; use one"):
        build_encoder(model.encoder, TEXT, salt=0)
    with pytest.raises(ConfigError, match="nowhere, which has no config.json; use a folder"):
        made(TEXT, weights="nowhere")


@pytest.mark.parametrize(
    ("shape", "options", "told"),
    [
        (TEXT, {"config": {"model_type": "brt"}}, "cannot build this network .*brt"),
        (TEXT, {"config": {**BERT, "vocab_size": 20}}, "vocab_size must be at least 50, got 20"),
        ([20, 50], {"config": BERT}, "max_position_embeddings must be at least 20, got 12"),
        ([7], {"config": BERT}, "takes text or pictures, but the view is a vector; use another"),
    ],
)
def test_what_does_not_fit_is_refused(shape: list[int], options: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        made(shape, **options)
    for kind in ("mlp", "cnn"):
        with pytest.raises(ConfigError, match=f"'{kind}', but the view is text of 10 tokens"):
            build_encoder(
                ModelConfig.model_validate({"encoder": {"kind": kind}}).encoder, TEXT, salt=0
            )


def test_views_of_three_kinds() -> None:
    options = {
        "encoder": {"kind": "mlp", "widths": [6]},
        "encoders": {
            "image": {"kind": "transformers", "config": VIT, "pooling": "first"},
            "caption": {"kind": "transformers", "config": BERT},
        },
        "projection_width": 4,
    }
    names = ["image", "caption", "sensors"]
    config = ModelConfig.model_validate(options)
    model = Heterogeneous(config, [PICTURE, TEXT, [7]], 3, {"cmc": Cmc()}, names)
    assert (model.widths, model.classified_width) == ([8, 16, 6], 30)
    out = model([torch.rand(2, 3, 8, 8), ids(4, 5), torch.rand(2, 7)], torch.arange(2), [2])
    assert out["hidden"][0].shape == (2, 30)
    assert [z.shape for z in out["projections"]] == [(2, 4)] * 3
    with pytest.raises(ConfigError, match=r"shared_projector needs .* got \[8, 16, 6\]"):
        shared = ModelConfig.model_validate({**options, "shared_projector": True})
        Heterogeneous(shared, [PICTURE, TEXT, [7]], 3, {"cmc": Cmc()}, names)


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """timm, as `pip install --no-deps` installs it, so without torchvision.

    It lies apart: `accelerate launch` imports one that it finds, and fails without torchvision.
    """
    monkeypatch.syspath_prepend(Path(sys.prefix) / "vision")
    if find_spec("timm") is None:
        pytest.skip("needs timm: pip install --no-deps --target .venv/vision timm")
    return require("timm", "a test")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "options", "learns"),
    [
        ("tf_efficientnet_lite0", {}, {"conv_stem", "conv_pw", "conv_pwl", "conv_head"}),
        ("resnet18", {"channels": [8, 8, 8, 8]}, {"conv1", "conv2", "0"}),
        ("vit_tiny_patch16_224", {"depth": 1, "patch_size": 4}, {"qkv", "proj", "fc1", "fc2"}),
    ],
)
def test_lora_of_a_network_of_timm(
    timm: ModuleType, name: str, options: dict[str, Any], learns: set[str]
) -> None:
    """Of convolutions where it has no linear layers; those in groups stay as they are."""
    section = {"kind": "timm", "name": name, "options": options, "lora": {"rank": 2}}
    encoder, width = build_encoder(
        ModelConfig.model_validate({"encoder": section}).encoder, [32, 32, 3], 0
    )
    assert {name.split(".")[-4] for name in learnt(encoder)} == learns
    assert encoder(torch.rand(2, 3, 32, 32), torch.arange(2)).shape == (2, width)
    kept = {name: x.clone() for name, x in encoder.named_buffers()}
    encoder.train()(torch.rand(2, 3, 32, 32), torch.arange(2))
    assert all(torch.equal(kept[name], x) for name, x in encoder.named_buffers())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "options"), [("skresnet18", {}), ("resnet18", {"output_stride": 8})]
)
def test_lora_leaves_out_convolutions_that_peft_cannot_take(
    timm: ModuleType, name: str, options: dict[str, Any]
) -> None:
    """A block named as another's convolution, and those that are dilated."""
    section = {"kind": "timm", "name": name, "options": options}
    built = {}
    for key, more in {"alone": {}, "lora": {"lora": {"rank": 2}}}.items():
        torch.manual_seed(0)
        config = ModelConfig.model_validate({"encoder": section | more}).encoder
        built[key], _ = build_encoder(config, [32, 32, 3], 0)
    x, rows = torch.rand(2, 3, 32, 32), torch.arange(2)
    torch.testing.assert_close(*(one.eval()(x, rows) for one in built.values()))
    assert learnt(built["lora"])


@pytest.mark.filterwarnings("ignore")
def test_networks_of_timm(timm: ModuleType, tmp_path: Path) -> None:
    small = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4}
    options = {"kind": "timm", "name": "vit_tiny_patch16_224", "options": small}
    torch.manual_seed(0)
    vit: Any
    vit, width = build_encoder(ModelConfig.model_validate({"encoder": options}).encoder, PICTURE, 0)
    x = torch.rand(2, 3, 8, 8)
    features = vit(x, torch.arange(2))
    assert features.shape == (2, width) == (2, 16)
    wanted = vit.network((x - 0.5) / 0.5)  # of timm's pretrained_cfg
    torch.testing.assert_close(features, wanted)
    save_file(vit.network.state_dict(), tmp_path / "vit.safetensors")
    loaded = {**options, "weights": str(tmp_path / "vit.safetensors")}
    again, _ = build_encoder(ModelConfig.model_validate({"encoder": loaded}).encoder, PICTURE, 0)
    torch.testing.assert_close(again(x, torch.arange(2)), features)
    other = {**loaded, "options": {**small, "depth": 3}}
    with pytest.raises(
        ConfigError, match=r"vit\.safetensors has weights of another network: blocks\.2"
    ):
        build_encoder(ModelConfig.model_validate({"encoder": other}).encoder, PICTURE, 0)
    with pytest.raises(ConfigError, match="remove drop_rate, because its masks"):
        dropping = {**options, "options": {"drop_rate": 0.1}}
        build_encoder(ModelConfig.model_validate({"encoder": dropping}).encoder, PICTURE, 0)
    with pytest.raises(ConfigError, match="is 'timm', which takes pictures"):
        build_encoder(ModelConfig.model_validate({"encoder": options}).encoder, TEXT, 0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"attn_implementation": "flash_attention_2"}, "FlashAttention2 has been toggled on"),
        ({"hidden_act": 3}, "'hidden_act' expected str, got int"),
        ({"num_attention_heads": 0}, "modulo by zero"),
        ({"torch_dtype": "nope"}, "has no attribute 'nope'"),
        ({"model_type": "t5"}, "exactly one of input_ids or inputs_embeds"),
        ({"return_dict": False}, "'tuple' object has no attribute 'last_hidden_state'"),
    ],
)
def test_what_transformers_raises_names_the_key(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.encoder: transformers cannot .*{told}.*; its"):
        made(TEXT, config=BERT | change)


def test_a_package_that_does_not_fit_another_names_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "peft.py").write_text("raise RuntimeError('operator does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    with pytest.raises(
        MissingPackage,
        match=r"lora needs .* peft, which cannot be imported \(operator does not exist\); install",
    ):
        made(TEXT, config=BERT, lora={"rank": 2})


def opened(folder: Path, encoder: dict[str, Any], shape: list[int], **written: Any) -> Any:
    """The network and what opens it: saved as Heron writes it, with `written` in its options."""
    torch.manual_seed(0)
    model = ModelConfig.model_validate({"encoder": encoder})
    network, _ = build_encoder(model.encoder, shape, salt=0)
    again = of_folder(ModelConfig.model_validate({"encoder": encoder | written}), False)
    other, _ = build_encoder(again.encoder, shape, salt=0)
    other.load_state_dict(network.state_dict())
    return network.eval(), other.eval()


@pytest.mark.parametrize(
    "config",
    [
        BERT | {"architectures": ["BertModel"], "id2label": {"0": "a b/c"}, "_name_or_path": "o/n"},
        BERT | {"is_decoder": True},
        BERT | {"attn_implementation": "eager", "torch_dtype": "float32"},
        {"model_type": "distilbert", "dim": 16, "n_heads": 2, "n_layers": 1, "hidden_dim": 8,
         "max_position_embeddings": 12},
        {"model_type": "distilbert", "hidden_size": 16, "num_attention_heads": 2,
         "num_hidden_layers": 1, "hidden_dim": 8, "max_position_embeddings": 12},
        {"model_type": "llama", "hidden_size": 16, "rope_theta": 5.0, "num_key_value_heads": 2,
         **SMALL},
        {"model_type": "modernbert", "hidden_size": 16, "global_rope_theta": 5.0, **SMALL},
        {"model_type": "llama", "hidden_size": 16, "rope_scaling": {"rope_type": "linear",
         "factor": 3.0}, "num_key_value_heads": 2, **SMALL},
    ],
)  # fmt: skip
def test_what_a_folder_says_of_its_layers_counts(config: dict[str, Any], tmp_path: Path) -> None:
    network, again = opened(tmp_path, {"kind": "transformers", "config": config}, TEXT)
    keys = torch.arange(2)
    assert torch.equal(network(ids(4, 9), keys), again(ids(4, 9), keys))


@pytest.mark.parametrize("kind", sorted(NETWORKS))
def test_networks_that_a_folder_may_have_load_no_other(kind: str) -> None:
    section = CONFIG_MAPPING[kind]
    named = {field.name for field in dataclasses.fields(section)}
    assert not {name for name in named if "backbone" in name}
    classes = MODEL_MAPPING[section]
    module = sys.modules[(classes[0] if isinstance(classes, tuple) else classes).__module__]
    code = "\n".join(x for x in inspect.getsource(module).splitlines() if ">>>" not in x)
    for word in ("import timm", "load_backbone", "lazy_load_kernel", "get_kernel(", "AutoModel."):
        assert word not in code


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "efficientnet_b0"])
def test_a_fine_tuned_network_of_timm_opens_without_its_first_weights(
    timm: ModuleType, tmp_path: Path, name: str
) -> None:
    options = (
        {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4} if "vit" in name else {}
    )
    encoder = {"kind": "timm", "name": name, "options": options}
    lora = {"lora": {"rank": 2, "targets": ["qkv"]}} if options else {}
    network, again = opened(
        tmp_path, encoder | lora, [32, 32, 3], options=options | {"pretrained": True}
    )
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(network(x, torch.arange(2)), again(x, torch.arange(2)))


def test_a_published_network_that_is_not_on_the_list_needs_to_be_written_out(
    tmp_path: Path,
) -> None:
    mamba = {"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 1, "state_size": 2}
    made(TEXT, config=mamba).network.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match="'mamba', which is not built, .*copy its config.json into"
    ):
        made(TEXT, weights=str(tmp_path))
    published = json.loads((tmp_path / "config.json").read_text())
    made(TEXT, weights=str(tmp_path), config=published)  # as the error says
