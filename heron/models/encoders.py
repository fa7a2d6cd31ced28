"""Encoders of one view, from raw input to hidden features."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heron.base.errors import ConfigError
from heron.base.extras import require
from heron.data.graphs import NONE, group_sums, parted
from heron.data.random_keys import opaque_uniforms, uniforms
from heron.models.networks import build_network
from heron.models.options import Cnn, Convnet, Gin, Linear, Mlp, Network, OwnEncoder, Resnet, Vgg
from heron.models.options import Encoder as EncoderConfig


class GinEncoder(nn.Module):
    r"""A graph isomorphism network (Xu et al. 2019), as InfoGraph's (Sun et al. 2020).

    Layer k is, of the features h of nodes v with neighbours N(v),

    .. math:: h_v^{(k)} = BN(ReLU(MLP^{(k)}(h_v^{(k-1)} + \sum_{u \in N(v)} h_u^{(k-1)})))

    with h^(0) the one-hot label of the node (all 0 where it is hidden), and MLP two linear layers
    with a ReLU between. A node's features are those of all layers, concatenated; a graph's are the
    sum over its nodes. Batch norm is over the nodes of a stream's rows on all processes.

    Attributes:
        width: of the features.
    """

    def __init__(self, options: Gin, shape: Sequence[int], key: str) -> None:
        """Draws the weights; `shape` is (nodes, edges, 2, labels), errors name `key`."""
        super().__init__()
        geometric: Any = require("torch_geometric.nn", key)
        self.most_nodes, _, _, self.labels = shape
        self.width = options.width * options.layers
        width, layers = self.labels, []
        for _ in range(options.layers):
            first, second = nn.Linear(width, options.width), nn.Linear(options.width, options.width)
            layers.append(nn.Sequential(first, nn.ReLU(), second))
            width = options.width
        self.convolutions = nn.ModuleList(map(geometric.GINConv, layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(options.width) for _ in layers)

    def forward(self, x: Int[Tensor, "rows numbers"], keys: Tensor) -> Float[Tensor, "rows width"]:
        """Returns each graph's sum over its nodes; for the format of x see `data.graphs`."""
        exists, features = self._features(x)
        graph = exists.nonzero()[:, 0]
        return group_sums(features, graph, len(x))

    def nodes(
        self, x: Int[Tensor, "rows numbers"], keys: Tensor
    ) -> Float[Tensor, "rows nodes width"]:
        """Returns features of the nodes of each graph, 0 where there is no node."""
        exists, features = self._features(x)
        out = features.new_zeros(*exists.shape, self.width)
        return out.masked_scatter(exists[..., None], features)

    def _features(
        self, x: Int[Tensor, "rows numbers"]
    ) -> tuple[Bool[Tensor, "rows nodes"], Float[Tensor, "all_nodes width"]]:
        """Returns which nodes exist, and the features of those, row after row."""
        labels, edges = parted(x, self.most_nodes)
        exists = labels != NONE
        index = (exists.flatten().cumsum(0) - 1).view(exists.shape)  # of a node among all
        rows, columns = edges[..., 0].ge(0).nonzero(as_tuple=True)
        ends = index[rows[:, None], edges[rows, columns].long()]
        edge_index = torch.cat([ends, ends.flip(1)]).T  # in both directions
        weight: Any = self.norms[0].weight
        h = torch.zeros(int(exists.sum()), self.labels, dtype=weight.dtype, device=x.device)
        label = labels[exists].long()
        h[label >= 0, label[label >= 0]] = 1
        layers = []
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            h = norm(torch.relu(convolution(h, edge_index)))
            layers.append(h)
        return exists, torch.cat(layers, 1)


class RowDropout(nn.Module):
    """Dropout whose mask is a function of each row's key, not of a generator's state.

    So the mask of a sample is the same on any number of processes, and a resumed run needs no
    generator state. Srivastava et al. 2014; kept units are scaled by 1 / (1 - p).
    """

    def __init__(self, p: float, salt: int) -> None:
        """Drops with probability p; `salt` gives the layers of a model different masks."""
        super().__init__()
        self.p, self.salt = p, salt

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        """Drops units of [rows, units] by the rows' keys; evaluation drops none."""
        if not self.training:
            return x
        draw = opaque_uniforms if torch.compiler.is_compiling() else uniforms
        mask = draw(keys, self.salt, x.shape[1]) >= self.p
        return x * mask / (1 - self.p)


class Encoder(nn.Module):
    """A sequence of layers; dropout also gets the rows' keys."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """Chains the layers."""
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        """Returns hidden features [rows, width] of one view's input."""
        for layer in self.layers:
            x = layer(x, keys) if isinstance(layer, RowDropout) else layer(x)
        return x


class PooledResNet(nn.Module):
    """A `transformers.ResNetModel`, its `network`, as a layer.

    He et al. 2016, with the stride of a bottleneck in its 3 x 3 convolution. A small stem is a
    3 x 3 convolution without max-pool, as in H-SCL and others for 32 x 32 pictures.
    """

    def __init__(self, config: Resnet, channels: int) -> None:
        """Draws the weights from torch's generator: He normal by the fan-out of a layer."""
        super().__init__()
        # Imported here, since it takes seconds.
        from transformers import ResNetConfig, ResNetModel

        stem = config.widths[0] // (4 if config.layer == "bottleneck" else 1)
        self.network = ResNetModel(
            ResNetConfig(
                num_channels=channels,
                embedding_size=stem,
                hidden_sizes=config.widths,
                depths=config.depths,
                layer_type=config.layer,
            )
        )
        if config.stem == "standard":
            return
        first = nn.Conv2d(channels, stem, 3, config.stem_stride, padding=1, bias=False)
        nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
        self.network.embedder.embedder.convolution = first
        self.network.embedder.register_module("pooler", nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        """Returns the spatial mean [rows, width] of images [rows, channels, height, width]."""
        pooled: Tensor = self.network(x).pooler_output
        return pooled.flatten(1)


def mlp(
    width: int, widths: Sequence[int], dropout: float, salt: int, norm: bool = True
) -> list[nn.Module]:
    """Returns Linear-ReLU-BatchNorm layers, in the order of HeroCon's networks, with dropout.

    `widths` are of the layers' outputs. A `dropout` of 0 adds no layer; `salt` is the first one's.
    """
    layers: list[nn.Module] = []
    for number, out in enumerate(widths):
        layers += [nn.Linear(width, out), nn.ReLU()]
        if norm:
            layers.append(nn.BatchNorm1d(out))
        if dropout > 0:
            layers.append(RowDropout(dropout, salt + number))
        width = out
    return layers


def cnn(config: Cnn, channels: int, salt: int) -> tuple[list[nn.Module], int]:
    """Returns 3 x 3 convolutions of stride 2, with BatchNorm and ReLU, average pooling and `mlp`.

    The input is [batch, `channels`, height, width]; also returns the width of the features.
    """
    layers: list[nn.Module] = []
    for out in config.channels:
        convolution = nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(out), nn.ReLU()]
        channels = out
    layers += [nn.AdaptiveAvgPool2d(config.places), nn.Flatten()]
    flat = channels * config.places**2
    return [*layers, *mlp(flat, config.widths, config.dropout, salt)], (flat, *config.widths)[-1]


def convnet(config: Convnet, shape: Sequence[int], salt: int) -> list[nn.Module]:
    """Returns convolutions, each with ReLU, BatchNorm and 2 x 2 max-pool, then `mlp`.

    HeroCon's network for N-MNIST has two stages and two widths. The paper gives no kernel size and
    no width; here they are options. A convolution preserves height and width. The `shape` of the
    input is (channels, height, width).
    """
    channels, height, width = shape
    layers: list[nn.Module] = []
    for out in config.channels:
        layers += [nn.Conv2d(channels, out, config.kernel, padding="same"), nn.ReLU()]
        layers += [nn.BatchNorm2d(out)] if config.norm else []
        layers.append(nn.MaxPool2d(2))
        channels, height, width = out, height // 2, width // 2
    flat = channels * height * width
    return [*layers, nn.Flatten(), *mlp(flat, config.widths, config.dropout, salt, config.norm)]


def vgg(config: Vgg, channels: int, salt: int) -> tuple[list[nn.Module], int]:
    """Returns stages of 3 x 3 convolutions with ReLU and a 2 x 2 max-pool, then dense layers.

    Simonyan and Zisserman 2015, Table 1, column D by default. Weights are He normal by the fan-out
    of a layer, without which sixteen layers do not learn from scratch. Also returns the width.
    """
    layers: list[nn.Module] = []
    for out, depth in zip(config.channels, config.depths, strict=True):
        for _ in range(depth):
            convolution = nn.Conv2d(channels, out, 3, padding=1, bias=not config.norm)
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
            layers += [convolution, *([nn.BatchNorm2d(out)] if config.norm else []), nn.ReLU()]
            channels = out
        layers.append(nn.MaxPool2d(2))
    places = config.places
    flat = channels * places * places
    layers += [nn.AdaptiveAvgPool2d(places), nn.Flatten()]
    layers += mlp(flat, config.widths, config.dropout, salt, config.norm)
    return layers, (flat, *config.widths)[-1]


def build_encoder(
    config: EncoderConfig | OwnEncoder, shape: Sequence[int], salt: int, key: str = "model.encoder"
) -> tuple[nn.Module, int]:
    """Returns an encoder for one view, and the width of its hidden features.

    For `shape` and `salt` see `OwnEncoder.build`. Raises ConfigError, which names `key`, if the
    encoder does not fit the view.
    """
    if isinstance(config, OwnEncoder):
        built: object = config.build(shape, salt)
        match built:
            case (nn.Module() as encoder, int(width)):
                return encoder, width
        raise ConfigError(
            f"{key}: {config.kind}.build must return a module and the width of its features, got "
            f"{built!r:.80}"
        )
    if isinstance(config, Gin) != (len(shape) == 4):
        why = "but the view has graphs; use 'gin', or your own encoder"
        if isinstance(config, Gin):
            why = f"which takes graphs, but the view has shape {tuple(shape)}; use another encoder"
        raise ConfigError(f"{key} is '{config.kind}', {why}")
    if isinstance(config, Gin):
        encoder = GinEncoder(config, shape, key)
        return encoder, encoder.width
    if isinstance(config, Network):
        return build_network(config, shape, key)
    if len(shape) == 2:
        raise ConfigError(
            f"{key} is '{config.kind}', but the view is text of {shape[0]} tokens; use "
            "'transformers', or your own encoder"
        )
    if isinstance(config, Convnet):
        image_shape = _image_shape(config, shape, key)
        layers = convnet(config, image_shape, salt)
        if len(shape) == 1:
            layers = [nn.Unflatten(1, image_shape), *layers]
        return Encoder(layers), config.widths[-1]
    if isinstance(config, Mlp | Linear):
        if len(shape) != 1:
            raise ConfigError(
                f"{key} is '{config.kind}', but the view is an image of shape "
                f"{tuple(shape)}; use an encoder for images: 'cnn', 'convnet', 'vgg', "
                "'resnet', 'timm' or 'transformers'"
            )
        if isinstance(config, Linear):
            return Encoder([nn.Linear(shape[0], config.width)]), config.width
        layers = mlp(shape[0], config.widths, config.dropout, salt, config.norm)
        return Encoder(layers), config.widths[-1]
    if len(shape) != 3:
        raise ConfigError(
            f"{key} is '{config.kind}', but the view is a vector of shape "
            f"{tuple(shape)}; use 'mlp', 'linear', or 'convnet' with a shape"
        )
    if isinstance(config, Vgg):
        if min(shape[:2]) < (least := 2 ** len(config.channels)):
            raise ConfigError(
                f"{key} is 'vgg', which halves images {len(config.channels)} times, so they must "
                f"be at least {least} x {least}, got {shape[0]} x {shape[1]}; use fewer stages"
            )
        layers, width = vgg(config, shape[2], salt)
        return Encoder(layers), width
    if isinstance(config, Resnet):
        return Encoder([PooledResNet(config, shape[2])]), config.widths[-1]
    layers, width = cnn(config, shape[2], salt)
    return Encoder(layers), width


def _image_shape(config: Convnet, shape: Sequence[int], key: str) -> tuple[int, int, int]:
    requested = config.shape
    if len(shape) == 3:
        height, width, channels = shape
        if requested is not None and requested != [channels, height, width]:
            raise ConfigError(
                f"{key}.shape is {requested}, but the view's images are "
                f"{[channels, height, width]}; remove it to use theirs"
            )
    elif requested is None:
        raise ConfigError(
            f"{key} is 'convnet' without a shape, but the view is a vector of {shape[0]} values; "
            f"set {key}.shape to [channels, height, width] of {shape[0]} values"
        )
    elif math.prod(requested) != shape[0]:
        raise ConfigError(
            f"{key}.shape must be [channels, height, width] of {shape[0]} values, as many as the "
            f"view's vector has, got {requested}, {math.prod(requested)} values"
        )
    else:
        channels, height, width = requested
    if min(height, width) < (least := 2 ** len(config.channels)):
        raise ConfigError(
            f"{key} is 'convnet', which halves images {len(config.channels)} times, so they must "
            f"be at least {least} x {least}, got {height} x {width}; use fewer channels"
        )
    return channels, height, width
