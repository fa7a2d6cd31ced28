"""Sections of an experiment that describe the model."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    Field,
    PlainSerializer,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from heron.base.dotted import load_class
from heron.base.sections import BelowOne, Natural, PathText, Plain, Positive, Section

if TYPE_CHECKING:
    from torch import nn

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"]  # that a model is computed in
Tuning = Literal["frozen", "lora", "full"]  # what is trained of a pretrained network
Sizes = Annotated[list[Natural], Field(min_length=1)]


class Connected(Section):
    """Fully connected layers, Linear-ReLU-BatchNorm, each with dropout; without `norm` Linear-ReLU.

    Attributes:
        widths: widths of the fully connected layers.
        dropout: share of values that are dropped after each layer.
        norm: whether each layer has a BatchNorm.
    """

    widths: Sizes = [200, 200]
    dropout: BelowOne = 0.0
    norm: bool = True


class Mlp(Connected):
    """Fully connected layers.

    Attributes:
        kind: kind of encoder.
    """

    kind: Literal["mlp"] = "mlp"


class Linear(Section):
    """One linear layer: with a classifier on it, a linear model.

    Attributes:
        kind: kind of encoder.
        width: width of the features.
    """

    kind: Literal["linear"] = "linear"
    width: Natural = 128


class Cnn(Section):
    """Stages of a stride-2 convolution, BatchNorm and ReLU; average pooling; connected layers.

    For aligned pictures, such as faces, `places` above 1 keep spatial information.

    Attributes:
        kind: kind of encoder.
        channels: output channels of each stage.
        places: side of the square grid that the last stage is average-pooled to.
        widths: widths of the fully connected layers that follow, Linear-ReLU-BatchNorm; none by
            default.
        dropout: share of values that are dropped after each fully connected layer.
    """

    kind: Literal["cnn"] = "cnn"
    channels: Sizes = [32, 64, 128, 128]
    places: Natural = 1
    widths: list[Natural] = []
    dropout: BelowOne = 0.0


class Convnet(Connected):
    """Stages of a convolution, ReLU, BatchNorm and max-pool, then fully connected layers.

    Without `norm` no layer has a BatchNorm.

    Attributes:
        kind: kind of encoder.
        channels: output channels of each stage.
        kernel: side of the convolution kernels.
        shape: [channels, height, width] that a vector is laid out as; null: the view is a picture.
    """

    kind: Literal["convnet"] = "convnet"
    channels: Sizes = [16, 32]
    kernel: Literal[1, 3, 5, 7] = 3
    shape: Annotated[list[Natural], Field(min_length=3, max_length=3)] | None = None


class Vgg(Connected):
    """VGG (default VGG-16): stages of 3 x 3 convolutions and a max-pool, then connected layers.

    `norm` adds a BatchNorm to every layer, unlike the original.

    Attributes:
        kind: kind of encoder.
        channels: output channels of each stage.
        depths: number of convolutions of each stage.
        places: side of the square grid that the last stage is average-pooled to.
        widths: widths of the fully connected layers; []: the features are those of the grid.
    """

    kind: Literal["vgg"] = "vgg"
    channels: Sizes = [64, 128, 256, 512, 512]
    depths: Sizes = [2, 2, 3, 3, 3]
    widths: list[Natural] = [4096, 4096]
    places: Natural = 7

    @model_validator(mode="after")
    def _stages(self) -> Self:
        _refuse_unequal_stages("channels", self.channels, self.depths)
        return self


class Resnet(Section):
    """A ResNet, by default ResNet-18 for small images.

    Attributes:
        kind: kind of encoder.
        widths: output channels of each stage.
        depths: number of residual layers of each stage.
        layer: residual layer: two 3 x 3 convolutions (`basic`), or a `bottleneck` of three.
        stem: `small` is a 3 x 3 convolution, for pictures of 32 x 32; `standard` is the 7 x 7
            convolution of stride 2 and the max-pool of He et al. 2016, for 224 x 224.
        stem_stride: stride of the first convolution of a small stem; 2 halves the picture there.
    """

    kind: Literal["resnet"] = "resnet"
    widths: Sizes = [64, 128, 256, 512]
    depths: Sizes = [2, 2, 2, 2]
    layer: Literal["basic", "bottleneck"] = "basic"
    stem: Literal["small", "standard"] = "small"
    stem_stride: Literal[1, 2] = 1

    @model_validator(mode="after")
    def _stages(self) -> Self:
        _refuse_unequal_stages("widths", self.widths, self.depths)
        if self.layer == "bottleneck" and (uneven := [w for w in self.widths if w % 4]):
            raise ValueError(
                "widths must be multiples of 4, because a bottleneck has a quarter of its "
                f"stage's channels; got {uneven}"
            )
        return self


def _refuse_unequal_stages(name: str, sizes: list[int], depths: list[int]) -> None:
    if len(sizes) != len(depths):
        raise ValueError(
            f"{name} must have a width and depths a depth for each stage, got {len(sizes)} and "
            f"{len(depths)} of them"
        )


class Lora(Section):
    """Low-rank updates of otherwise frozen layers (Hu et al. 2022), by peft.

    Attributes:
        rank: rank of the update of a layer's matrix.
        alpha: the update is scaled by alpha / rank.
        targets: last components of the layers' names; null: peft's defaults for the network, or all
            linear layers where peft has none, or convolutions where the network has none of these.
    """

    rank: Natural = 8
    alpha: Positive = 16.0
    targets: Annotated[list[str], Field(min_length=1)] | None = None


class Network(Section):
    """Options of networks from libraries. Their own dropout is off: it would not follow the rows.

    Attributes:
        weights: initial weights; null: random.
        freeze: whether the weights stay as they are.
        lora: train low-rank updates instead of the weights; null: train all weights.
        layer_decay: learning rate of a layer as a share of that of the next higher layer; the
            highest has `optim.lr` (Bao et al. 2022). 1: all layers have the same rate.
    """

    weights: PathText | None = None
    freeze: bool = False
    lora: Lora | None = None
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _freeze_or_lora(self) -> Self:
        if self.freeze and self.lora is not None:
            raise ValueError(
                "freeze and lora cannot both be set; lora freezes the weights itself and learns "
                "updates to them: remove one of the two"
            )
        return self


class Transformer(Network):
    """A model of transformers (`AutoModel`), for token ids or pictures.

    Attributes:
        kind: kind of encoder.
        config: the network's configuration, with `model_type`, such as {model_type: bert,
            hidden_size: 64}; null: that of `weights`.
        weights: a folder with config.json and safetensors files.
        pooling: `mean` of the outputs of all tokens except padding, or the `first` token's output.
    """

    kind: Literal["transformers"] = "transformers"
    config: Plain | None = None
    pooling: Literal["mean", "first"] = "mean"

    @model_validator(mode="after")
    def _some_network(self) -> Self:
        if self.config is None and self.weights is None:
            raise ValueError(
                "neither config nor weights is set; set config: {model_type: bert, ...}, or "
                "weights: a folder with config.json"
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config has no model_type; add one, such as bert or vit")
        return self


class Timm(Network):
    """A model of timm, for pictures.

    Attributes:
        kind: kind of encoder.
        name: timm's name of the model, such as vit_small_patch16_224 or resnet50.
        options: options of `timm.create_model`, such as {patch_size: 8}; the size of pictures is
            the view's.
        weights: a safetensors file of that model; pictures are then standardised by the model's
            mean and standard deviation.
    """

    kind: Literal["timm"] = "timm"
    name: str
    options: Plain = {}


class Gin(Section):
    """A graph isomorphism network of torch_geometric; the features are those of all layers.

    Attributes:
        kind: kind of encoder.
        width: width of a layer; a graph has `layers` times as many features.
        layers: number of layers.
    """

    kind: Literal["gin"] = "gin"
    width: Natural = 32
    layers: Natural = 3


class OwnEncoder(Section):
    """Your own encoder: a section of its options that builds its layers.

    `kind` is the dotted path of its class: `encoder: {kind: my_lab.nets.Mine, width: 64}`.
    """

    kind: str

    @abstractmethod
    def build(self, shape: Sequence[int], salt: int) -> tuple[nn.Module, int]:
        """Returns the encoder of one view, and the width of its features.

        Args:
            shape: shape of a sample: [width], [height, width, channels], [tokens, vocabulary] of
                text, or [nodes, edges, 2, labels] of graphs.
            salt: for random numbers that are functions of the rows, as in
                `models.encoders.RowDropout`.

        Returns:
            A module that takes a batch ([rows, width]; [rows, channels, height, width] of pictures;
            token ids [rows, tokens] of text, padded with -1; rows of `data.graphs`) and `rng_keys`,
            the keys of the rows' random numbers, and returns features [rows, features' width]; and
            that width.
        """


def _load_own(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Returns your own encoder if `kind` is a dotted path, else lets `handler` validate."""
    if isinstance(value, OwnEncoder):
        return value
    kind = value.get("kind") if isinstance(value, dict) else None
    if not (isinstance(kind, str) and "." in kind):
        return handler(value)
    encoder = load_class(kind, OwnEncoder)  # type: ignore[type-abstract]
    if inspect.isabstract(encoder):
        raise ValueError(f"{kind} has no method build(shape, salt); add one")
    return encoder.model_validate(value)


Encoder = Annotated[
    Mlp | Linear | Cnn | Convnet | Vgg | Resnet | Transformer | Timm | Gin,
    Field(discriminator="kind"),
    WrapValidator(_load_own),
    PlainSerializer(lambda encoder: encoder.model_dump(mode="json")),
]


class ModelConfig(Section):
    """Per-view encoder and projector, the weight net H, and the classifier.

    Attributes:
        encoder: encoder of each view; its keys depend on `kind`, which may be the dotted path of a
            class of your own.
        encoders: encoders of single views by their names, in place of `encoder`.
        projector: `layer`: one Linear-ReLU-BatchNorm layer; `mlp`: Linear-ReLU-Linear.
        projection_width: width of the projections that the loss compares.
        matryoshka: widths to which projections are truncated; a term of projections is then the
            mean over these widths (see `losses.Matryoshka`); []: full width only.
        shared_encoder: whether all views have one encoder.
        shared_projector: whether all views have one projector.
        classify_on: input of the classifier, the probe and evaluation: the hidden features of all
            views, or of the first one.
    """

    encoder: Encoder = Mlp()
    encoders: dict[str, Encoder] = {}
    projector: Literal["layer", "mlp"] = "layer"
    projection_width: Natural = 200
    matryoshka: list[Natural] = []
    shared_encoder: bool = False
    shared_projector: bool = False
    classify_on: Literal["all_views", "first_view"] = "all_views"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.shared_encoder and self.encoders:
            raise ValueError(
                f"shared_encoder is true, but encoders has {', '.join(self.encoders)}; configure "
                "one encoder for all views, or set shared_encoder: false"
            )
        widths = self.matryoshka
        if widths and (widths != sorted(set(widths)) or widths[-1] != self.projection_width):
            raise ValueError(
                f"matryoshka must increase up to projection_width, {self.projection_width}, "
                f"because numbers beyond its last width would learn nothing; got {widths}"
            )
        return self

    def encoder_of(self, view: str) -> tuple[str, Encoder | OwnEncoder]:
        """Returns the configuration key and the section of a view's encoder."""
        if view in self.encoders:
            return f"model.encoders.{view}", self.encoders[view]
        return "model.encoder", self.encoder
