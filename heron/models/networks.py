"""Networks of transformers and timm as encoders of one view."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from heron.base.errors import ConfigError, HeronError
from heron.base.extras import in_a_line, require
from heron.models import strangers
from heron.models.options import Lora, ModelConfig, Network, Timm, Transformer

HALF = [0.5, 0.5, 0.5]  # the default mean and standard deviation of pictures
MAX_JSON_BYTES = 2**20  # of a JSON file beside weights
HUB = "hf://"
AS_CONFIG = "if you trust it, copy its config.json into the encoder's config in your experiment"
HUB_FILES = ["config.json", "preprocessor_config.json", "tokenizer.json", "*.safetensors*"]


class NetworkEncoder(nn.Module):
    """A `network` of another library, without dropout, so that it draws nothing at random."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        options: Network,
        mean: Sequence[float] = HALF,
        std: Sequence[float] = HALF,
    ) -> None:
        """Wraps a network; `mean` and `std` are of the channels of pictures in [0, 1]."""
        super().__init__()
        self.network, self.options = network, options
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1))

    def forward(self, x: Tensor, rng_keys: Tensor) -> Tensor:
        """Returns features [rows, width] of token ids [rows, tokens] or of pictures.

        Features that it made earlier, floats [rows, width], are returned as they are.
        """
        if x.dim() == 2 and x.is_floating_point():
            return x
        if x.dim() == 4:
            return self.pooled(self.network((x - self.mean) / self.std))
        return self.of_tokens(x)

    def pooled(self, out: Any) -> Tensor:
        """Returns features of pictures from the network's output."""
        features: Tensor = out
        return features

    def of_tokens(self, ids: Tensor) -> Tensor:
        """Returns features of token ids."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> "NetworkEncoder":
        """Sets the mode; what is frozen stays in evaluation mode: with `lora` the batch norms."""
        super().train(mode)
        if self.options.freeze:
            self.network.eval()
        for module in self.network.modules() if self.options.lora else ():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self


class TransformerEncoder(NetworkEncoder):
    """A model of transformers."""

    options: Transformer

    def forward(self, x: Tensor, rng_keys: Tensor) -> Tensor:
        """See `NetworkEncoder`; attention cannot reshape 0 rows, so it gets 1, which is dropped."""
        if x.is_meta or x.shape[0] or not hasattr(self.network.config, "num_attention_heads"):
            return super().forward(x, rng_keys)
        return super().forward(x.new_zeros(1, *x.shape[1:]), rng_keys)[:0]

    def pooled(self, out: Any) -> Tensor:
        """Returns the mean over positions, or the first of them."""
        hidden: Tensor = out.last_hidden_state
        if hidden.dim() == 4:  # [rows, channels, height, width]
            return hidden.mean((2, 3))
        return hidden[:, 0] if self.options.pooling == "first" else hidden.mean(1)

    def of_tokens(self, ids: Tensor) -> Tensor:
        """Returns features of token ids, -1 where there is none."""
        is_token = ids >= 0
        mask = None  # on the meta device, where transformers could not read its values
        if not ids.is_meta:
            if not torch.compiler.is_compiling():  # compiled graphs have static shapes
                longest = max(1, int(is_token.sum(1).max())) if len(ids) else 1
                ids, is_token = ids[:, :longest], is_token[:, :longest]  # padding is at the end
            mask = is_token.long()
        out = self.network(input_ids=ids.long().clamp(min=0), attention_mask=mask)
        hidden: Tensor = out.last_hidden_state
        if self.options.pooling == "first":
            return hidden[:, 0]
        weight = is_token[:, :, None].to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)


def build_network(
    options: Transformer | Timm, shape: Sequence[int], key: str
) -> tuple[nn.Module, int]:
    """Returns a network as an encoder, and the width of its features.

    `shape` is of one sample: [height, width, channels], or [tokens, vocabulary]; errors name `key`.

    Raises:
        ConfigError: the library does not know it, its weights cannot be read or do not fit it, or
            it does not fit the view.
        MissingPackage: a package that it needs is not installed.
    """
    try:
        if isinstance(options, Timm):
            encoder = _timm(options, shape, key)
        else:
            encoder = _transformer(options, shape, key)
        if options.freeze:
            encoder.network.requires_grad_(False)
        if options.lora is not None:
            _add_lora(encoder.network, options.lora, key)
        if options.layer_decay < 1:
            _set_rates(encoder.network, options.layer_decay)
        sample = torch.ones(2, shape[0], dtype=torch.int32)
        if len(shape) == 3:
            sample = torch.zeros(2, shape[2], *shape[:2])
        return encoder, _freeze_unused(encoder, sample)
    except HeronError:
        raise
    except Exception as error:  # another library may raise anything
        raise ConfigError(
            f"{key}: {options.kind} cannot build this network ({in_a_line(error)}); its options "
            f"must fit it and a view of shape {tuple(shape)}"
        ) from error


def _transformer(options: Transformer, shape: Sequence[int], key: str) -> NetworkEncoder:
    from transformers import AutoConfig, AutoModel  # it takes seconds

    folder = None if options.weights is None else weights_folder(options.weights, key)
    published = {} if folder is None else read_json(folder / "config.json", key)
    tree = dict(options.config or published)
    if "auto_map" in tree:
        raise ConfigError(f"{key}: the network has its own code; use one that transformers has")
    if options.config is None or (tree == published and tree["model_type"] in strangers.NETWORKS):
        tree = strangers.transformers_config(tree, key, AS_CONFIG)
    kind = tree.pop("model_type", None)
    if len(shape) == 1:
        raise ConfigError(
            f"{key} is 'transformers', which takes text or pictures, but the view is a vector; use "
            "another encoder, such as 'mlp'"
        )
    if len(shape) == 3:
        defaults = {"num_channels": shape[2], "image_size": list(shape[:2])}
    else:
        defaults = {"vocab_size": shape[1], "pad_token_id": None}
    config = AutoConfig.for_model(kind, **defaults | tree)
    fields = config.to_dict().items()
    config.update({n: 0.0 for n, value in fields if "drop" in n and isinstance(value, float)})
    if len(shape) == 2:
        for name, least in (("vocab_size", shape[1]), ("max_position_embeddings", shape[0])):
            if (value := getattr(config, name, least)) < least:
                raise ConfigError(f"{key}: {name} must be at least {least}, got {value}")
    if folder is None:
        untrained: nn.Module = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
        return TransformerEncoder(untrained, options)
    network = AutoModel.from_pretrained(
        folder, config=config, use_safetensors=True, local_files_only=True
    )
    path = folder / "preprocessor_config.json"
    pictures = read_json(path, key) if path.exists() else {}
    return TransformerEncoder(
        network, options, pictures.get("image_mean") or HALF, pictures.get("image_std") or HALF
    )


def _timm(options: Timm, shape: Sequence[int], key: str) -> NetworkEncoder:
    if len(shape) != 3:
        raise ConfigError(f"{key} is 'timm', which takes pictures; use it for a view of pictures")
    timm: Any = require("timm", key)  # with the torchvision of torch's own index
    if drop := [name for name in options.options if "drop" in name]:
        raise ConfigError(f"{key}: remove {drop[0]}, because its masks would not depend on rows")
    arguments = {"num_classes": 0, "in_chans": shape[2], **options.options}
    try:
        network = timm.create_model(options.name, img_size=tuple(shape[:2]), **arguments)
    except TypeError:  # convolutional networks take pictures of any size
        network = timm.create_model(options.name, **arguments)
    if options.weights is not None:
        _load(network, Path(options.weights), key)
    if shape[2] != 3:
        return NetworkEncoder(network, options, HALF[:1], HALF[:1])
    pictures = network.pretrained_cfg
    return NetworkEncoder(network, options, pictures["mean"], pictures["std"])


def _load(network: nn.Module, path: Path, key: str) -> None:
    """Loads weights, but no classifier; ConfigError if the file lacks some or has others."""
    state = load_file(path)
    keys = network.load_state_dict(state, strict=False)
    extra = [name for name in keys.unexpected_keys if not name.startswith(("head", "fc", "cla"))]
    if misfits := [*keys.missing_keys, *extra]:
        raise ConfigError(
            f"{key}: {path} has weights of another network: {misfits[0]} is missing or extra, one "
            f"of {len(misfits)} such"
        )


def _add_lora(network: nn.Module, lora: Lora, key: str) -> None:
    """Adds low-rank updates to layers that are named, or peft knows; or to all linear ones.

    Where a network has none, it adds them to its convolutions, but not to those that peft would
    compute otherwise: in groups, dilated, or with weights that a subclass standardises.
    """
    peft: Any = require("peft", f"{key}.lora")
    layers = dict(network.named_modules())
    linear = {n.rpartition(".")[2] for n, m in layers.items() if isinstance(m, nn.Linear)}
    plain = [
        re.escape(name)
        for name, m in layers.items()
        if isinstance(m, nn.Conv2d)
        and (m.groups, m.dilation) == (1, (1, 1))
        and "Std" not in type(m).__name__
    ]
    kind = getattr(getattr(network, "config", None), "model_type", None)
    known = kind in peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets: Any = lora.targets or (None if known else sorted(linear))
    if not (targets or known):
        targets = "|".join(plain)  # matched whole; a name in a list would match as an ending, too
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0
    )
    try:
        peft.inject_adapter_in_model(config, network)
    except Exception as error:  # another library may raise anything
        raise ConfigError(
            f"{key}.lora: {in_a_line(error)}; set targets to the last parts of names of layers, "
            "linear ones or convolutions"
        ) from error


def _set_rates(network: nn.Module, decay: float) -> None:
    """Sets each parameter's `rate_share` of `optim.lr`: decay to the power of its depth.

    The layers are the longest list of modules; parameters before them are one level deeper.
    """
    lists = {name: m for name, m in network.named_modules() if isinstance(m, nn.ModuleList)}
    lists |= {name: m for name, m in network.named_modules() if isinstance(m, nn.Sequential)}
    layers, modules = max(lists.items(), key=lambda item: len(item[1]), default=("", []))
    count, level = len(modules), 0
    for name, parameter in network.named_parameters():
        if name.startswith(f"{layers}."):
            level = int(name.removeprefix(f"{layers}.").partition(".")[0]) + 1
        elif level:
            level = count  # after the layers
        parameter.rate_share = decay ** (count - level)  # type: ignore[attr-defined]


def _freeze_unused(encoder: nn.Module, sample: Tensor) -> int:
    """Freezes weights that no feature depends on, as DDP requires; returns the features' width."""
    encoder.eval()
    features = encoder(sample, torch.zeros(len(sample), dtype=torch.int64))
    if features.requires_grad:
        features.sum().backward()
    for parameter in encoder.parameters():
        parameter.requires_grad_(parameter.requires_grad and parameter.grad is not None)
        parameter.grad = None
    encoder.train()
    return int(features.shape[1])


def weights_folder(weights: str, key: str) -> Path:
    """Returns the local folder of weights, fetched from the hub if need be; ConfigError if none."""
    if not weights.startswith(HUB):
        if not (Path(weights) / "config.json").is_file():
            raise ConfigError(
                f"{key}.weights is {weights}, which has no config.json; use a folder with "
                f"config.json and safetensors files, or {HUB}ORG/NAME"
            )
        _refuse_other_weights(Path(weights), key)
        return Path(weights)
    hub: Any = require("huggingface_hub", f"{key}.weights")
    name, _, revision = weights.removeprefix(HUB).partition("@")
    try:
        fetched = hub.snapshot_download(name, revision=revision or None, allow_patterns=HUB_FILES)
    except Exception as error:  # of the hub, the network or the disk
        raise ConfigError(f"{key}.weights: cannot download {weights}: {error}") from error
    return Path(fetched)


def _refuse_other_weights(folder: Path, key: str) -> None:
    """Raises ConfigError where transformers would read more than the folder's safetensors."""
    index = folder / "model.safetensors.index.json"
    parts = read_json(index, key).get("weight_map") if index.is_file() else None
    names = map(str, parts.values() if isinstance(parts, dict) else ())
    pickles = [name for name in names if not name.endswith(".safetensors")]
    if pickles or (folder / "adapter_config.json").exists():
        others = pickles[0] if pickles else "those of the network that it is an adapter of"
        raise ConfigError(
            f"{key}.weights is {folder}, and it lacks some: {others}; use a folder that has all of "
            "them in safetensors files, as `save_pretrained` writes them"
        )


def read_json(path: Path, key: str) -> dict[str, Any]:
    """Returns a JSON object; ConfigError where the file is not one, or is too long."""
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_JSON_BYTES + 1)
        tree = json.loads(text) if len(text) <= MAX_JSON_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: cannot read {path}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{key}: {path} must be a JSON object of at most {MAX_JSON_BYTES:,} bytes"
        )
    return tree


def with_pretrained_configs(model: ModelConfig) -> ModelConfig:
    """Returns a model's options with its weights' configurations, to be built without them."""
    return _map_networks(model, _with_config)


def without_weights(model: ModelConfig) -> ModelConfig:
    """Returns a model's options without initial weights: a checkpoint's will be loaded."""
    return _map_networks(model, lambda key, network: network.model_copy(update={"weights": None}))


def of_folder(model: ModelConfig, trust_code: bool) -> ModelConfig:
    """Returns a model's options to load weights into, whoever wrote the folder of both.

    Initial weights are left out, those of timm's `pretrained` too. Raises ConfigError, unless
    `trust_code`, for options of other libraries that may name files, addresses or code.
    """

    def changed(key: str, network: Network) -> Network:
        update: dict[str, Any] = {"weights": None}
        if isinstance(network, Timm):
            update["options"] = {
                n: x for n, x in network.options.items() if n not in strangers.INITIAL
            }
            if not trust_code:
                strangers.timm_options(network.name, update["options"], key)
        elif isinstance(network, Transformer) and not trust_code:
            update["config"] = strangers.transformers_config(network.config or {}, key)
        return network.model_copy(update=update)

    return _map_networks(model, changed)


def _with_config(key: str, network: Network) -> Network:
    if not isinstance(network, Transformer):
        return network
    if network.config is not None or network.weights is None:
        return network
    config = read_json(weights_folder(network.weights, key) / "config.json", key)
    strangers.transformers_config(config, key, AS_CONFIG)  # refuses networks that it may not have
    return network.model_copy(update={"config": config})


def _map_networks(model: ModelConfig, change: Callable[[str, Network], Network]) -> ModelConfig:
    def changed(key: str, options: Any) -> Any:
        return change(key, options) if isinstance(options, Network) else options

    encoders = {name: changed(f"model.encoders.{name}", x) for name, x in model.encoders.items()}
    default = changed("model.encoder", model.encoder)
    return model.model_copy(update={"encoder": default, "encoders": encoders})
