"""Sections of an experiment that say what the model is made of."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from heron.pipeline.config.sections import Natural, Section

Sizes = Annotated[list[Natural], Field(min_length=1)]


class Mlp(Section):
    """Linear-ReLU-BatchNorm layers; without `norm` Linear-ReLU."""

    kind: Literal["mlp"] = "mlp"
    widths: Sizes = [200, 200]
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    norm: bool = True


class Linear(Section):
    """One linear layer: with a classifier on it, a linear model."""

    kind: Literal["linear"] = "linear"
    width: Natural = 128


class Cnn(Section):
    """Stages of a stride-2 convolution, BatchNorm and ReLU, then the mean over places."""

    kind: Literal["cnn"] = "cnn"
    channels: Sizes = [32, 64, 128, 128]


class Convnet(Section):
    """Stages of a convolution, ReLU, BatchNorm and max-pool, then connected layers as of `Mlp`.

    A vector view is laid out as `shape`, [channels, height, width]. Dropout is that of the
    connected layers; without `norm` no layer has a BatchNorm.
    """

    kind: Literal["convnet"] = "convnet"
    channels: Sizes = [16, 32]
    kernel: Literal[1, 3, 5, 7] = 3
    widths: Sizes = [200, 200]
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    norm: bool = True
    shape: Annotated[list[Natural], Field(min_length=3, max_length=3)] | None = None


class Vgg(Section):
    """VGG (default VGG-16): stages of 3 x 3 convolutions and a max-pool, then connected layers.

    The last stage's places are pooled to `places` x `places` means. `norm` adds a BatchNorm to
    every layer, which the original has not.
    """

    kind: Literal["vgg"] = "vgg"
    channels: Sizes = [64, 128, 256, 512, 512]
    depths: Sizes = [2, 2, 3, 3, 3]
    widths: Sizes = [4096, 4096]
    places: Natural = 7
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    norm: bool = True

    @model_validator(mode="after")
    def _stages(self) -> "Vgg":
        if len(self.channels) != len(self.depths):
            raise ValueError(
                f"channels are of {len(self.channels)} stages and depths of {len(self.depths)}; "
                "expected channels and a depth for each"
            )
        return self


class Resnet(Section):
    """A ResNet for small images: 3 x 3 first convolution, no max-pool; default ResNet-18.

    `widths` are channels out of each stage, `depths` its residual layers.
    """

    kind: Literal["resnet"] = "resnet"
    widths: Sizes = [64, 128, 256, 512]
    depths: Sizes = [2, 2, 2, 2]
    layer: Literal["basic", "bottleneck"] = "basic"
    stem_stride: Literal[1, 2] = 1

    @model_validator(mode="after")
    def _stages(self) -> "Resnet":
        if len(self.widths) != len(self.depths):
            raise ValueError(
                f"widths are of {len(self.widths)} stages and depths of {len(self.depths)}; "
                "expected a width and a depth for each"
            )
        if self.layer == "bottleneck" and (uneven := [w for w in self.widths if w % 4]):
            raise ValueError(
                f"widths hold {uneven}; a bottleneck has a quarter of its stage's channels; "
                "expected multiples of 4"
            )
        return self


Encoder = Mlp | Linear | Cnn | Convnet | Vgg | Resnet


class Model(Section):
    """Per-view encoder and projector, the weight net H, and the classifier.

    A projector is one Linear-ReLU-BatchNorm layer, or `mlp`: Linear-ReLU-Linear. The classifier,
    the probe and all of evaluation see every view's hidden features, or the first view's.
    """

    encoder: Annotated[Mlp | Linear | Cnn | Convnet | Vgg | Resnet, Field(discriminator="kind")] = (
        Mlp()
    )
    projector: Literal["layer", "mlp"] = "layer"
    projection_width: Natural = 200
    shared_encoder: bool = False
    shared_projector: bool = False
    classify_on: Literal["all_views", "first_view"] = "all_views"
