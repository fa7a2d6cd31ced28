"""A pretrained backbone of `init --backbone` or `negatives --encoder`, as an encoder's section."""

from pathlib import Path
from typing import Any, NamedTuple

from heron.base.errors import ConfigError
from heron.base.extras import require
from heron.models.networks import HUB, read_json, weights_folder
from heron.models.options import Tuning
from heron.models.strangers import timm_options

TIMM = "timm:"
OPTION = "--backbone"
HOW: dict[Tuning, tuple[dict[str, Any], float, str]] = {  # options, learning rate, and why
    "frozen": ({"freeze": True}, 0.002, "its weights are frozen, and heads on it are trained"),
    "lora": ({"lora": {"rank": 8}}, 0.001, "low-rank updates of its layers are trained"),
    "full": ({"layer_decay": 0.75}, 0.0001, "all weights are trained, lower layers more slowly"),
}


class Backbone(NamedTuple):
    """An encoder with pretrained weights.

    Attributes:
        kind: the kind of the views that it sees, `image` or `text`.
        encoder: its section of `model.encoders`.
        tokenizer: the path of its tokenizer, for texts; None for pictures.
        side: pixels of a side of the pictures that it was trained on, if its files say so.
        lr: a learning rate for the way of training.
        why: the way of training, in words.
    """

    kind: str
    encoder: dict[str, Any]
    tokenizer: str | None
    side: int | None
    lr: float
    why: str


def read_backbone(words: str, tuning: Tuning, option: str = OPTION) -> Backbone:
    """Reads the files of a backbone.

    Args:
        words: a folder with `config.json` and safetensors files, of transformers or of timm;
            `hf://ORG/NAME`, which is fetched; or `timm:NAME=FILE.safetensors`.
        tuning: what is trained of it.
        option: what errors call it.

    Raises:
        ConfigError: the files are missing, cannot be read, or say too little.
    """
    options, lr, why = HOW[tuning]
    if words.startswith(TIMM):
        name, _, file = words.removeprefix(TIMM).partition("=")
        if not name or not Path(file).is_file():
            raise ConfigError(
                f"{option} {words}: a timm model needs a file of its weights. On a machine with "
                "internet access, write it with `safetensors.torch.save_file(timm.create_model("
                f"'{name or 'resnet50'}', pretrained=True).state_dict(), 'weights.safetensors')`, "
                f"then pass {option} {TIMM}{name or 'resnet50'}=weights.safetensors"
            )
        return Backbone("image", _timm(name, file, options), None, None, lr, why)
    folder = weights_folder(words, option)
    tree = read_json(folder / "config.json", option)
    architecture = tree.get("architecture")
    if isinstance(architecture, str):  # as timm's hub writes it
        file = str(folder / "model.safetensors")
        arguments = tree.get("model_args") or {}
        remedy = "if you trust it, add it to the encoder's options in your experiment"
        timm_options(architecture, arguments, option, remedy)
        if arguments:
            options = {"options": arguments} | options
        trained = tree.get("pretrained_cfg")
        sizes = trained.get("input_size") if isinstance(trained, dict) else None
        side = _number(sizes[-1]) if isinstance(sizes, list) and sizes else None
        return Backbone("image", _timm(architecture, file, options), None, side, lr, why)
    if not isinstance(tree.get("model_type"), str):
        raise ConfigError(
            f"{option} {words}: its config.json has neither transformers' model_type nor timm's "
            f"architecture; pass the folder of such a model, or {HUB}ORG/NAME"
        )
    encoder = {"kind": "transformers", "weights": words} | options
    if "vocab_size" not in tree:
        return Backbone("image", encoder, None, _number(tree.get("image_size")), lr, why)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise ConfigError(
            f"{option} {words}: a text model needs the tokenizer that it was trained with, but "
            f"{tokenizer} does not exist; save it there with "
            "`transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)`"
        )
    return Backbone("text", encoder, str(tokenizer), None, lr, why)


def _timm(name: str, weights: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "timm", "name": name, "weights": weights} | options


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 < value <= 4096 else None


def published(words: str, option: str) -> str:
    """Returns where `timm:NAME` and `hf:PATH` lie, for `read_backbone`; other words as they are.

    Raises a ConfigError if timm publishes no such weights, MissingPackage without timm.
    """
    kind, _, name = words.partition(":")
    if kind == "hf" and not words.startswith(HUB):
        return name if Path(name).exists() else f"{HUB}{name}"
    if kind != "timm" or "=" in name:
        return words
    timm: Any = require("timm", f"{option} {words}")
    described = timm.is_model(name) and timm.get_pretrained_cfg(name)
    if not described or not described.hf_hub_id:
        raise ConfigError(
            f"{option} {words}: timm publishes no safetensors of it; use one of "
            "timm.list_pretrained(), or a folder with config.json and model.safetensors"
        )
    return f"{HUB}{described.hf_hub_id}"
