"""Sections of an experiment that say what the model is made of."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from heron.pipeline.config.sections import BelowOne, Natural, NonNegative, Positive, Section

Sizes = Annotated[list[Natural], Field(min_length=1)]


class Connected(Section):
    """Connected layers, Linear-ReLU-BatchNorm, each with dropout; without `norm` Linear-ReLU."""

    widths: Sizes = [200, 200]
    dropout: BelowOne = 0.0
    norm: bool = True


class Mlp(Connected):
    """Connected layers alone."""

    kind: Literal["mlp"] = "mlp"


class Linear(Section):
    """One linear layer: with a classifier on it, a linear model."""

    kind: Literal["linear"] = "linear"
    width: Natural = 128


class Cnn(Section):
    """Stages of a stride-2 convolution, BatchNorm and ReLU, then the mean over places."""

    kind: Literal["cnn"] = "cnn"
    channels: Sizes = [32, 64, 128, 128]


class Convnet(Connected):
    """Stages of a convolution, ReLU, BatchNorm and max-pool, then connected layers.

    A vector view is laid out as `shape`, [channels, height, width]. Without `norm` no layer has a
    BatchNorm.
    """

    kind: Literal["convnet"] = "convnet"
    channels: Sizes = [16, 32]
    kernel: Literal[1, 3, 5, 7] = 3
    shape: Annotated[list[Natural], Field(min_length=3, max_length=3)] | None = None


class Vgg(Connected):
    """VGG (default VGG-16): stages of 3 x 3 convolutions and a max-pool, then connected layers.

    The last stage's places are pooled to `places` x `places` means. `norm` adds a BatchNorm to
    every layer, which the original has not.
    """

    kind: Literal["vgg"] = "vgg"
    channels: Sizes = [64, 128, 256, 512, 512]
    depths: Sizes = [2, 2, 3, 3, 3]
    widths: Sizes = [4096, 4096]
    places: Natural = 7

    @model_validator(mode="after")
    def _stages(self) -> Self:
        _same_stages("channels", self.channels, self.depths)
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
    def _stages(self) -> Self:
        _same_stages("widths", self.widths, self.depths)
        if self.layer == "bottleneck" and (uneven := [w for w in self.widths if w % 4]):
            raise ValueError(
                f"widths hold {uneven}; a bottleneck has a quarter of its stage's channels; "
                "expected multiples of 4"
            )
        return self


def _same_stages(name: str, sizes: list[int], depths: list[int]) -> None:
    if len(sizes) != len(depths):
        raise ValueError(
            f"{name} are of {len(sizes)} stages and depths of {len(depths)}; expected a width and "
            "a depth for each"
        )


Encoder = Mlp | Linear | Cnn | Convnet | Vgg | Resnet


class LabelAutoencoder(Section):
    """C2AE's networks of labels: one hidden layer each way; a code is narrower than the labels.

    `width` of a code; null is 0.8 of the labels, as in the authors' code.
    """

    hidden: Natural = 512
    width: Natural | None = None


class TaskGroups(Section):
    """DeepMTMV's classifier: layers that all labels share at first, and groups of them later.

    `widths` of its hidden layers; null is a half and a quarter of what it sees, as in the authors'
    code. Every `every_epochs` the highest layer that all labels share is parted where that is
    cheaper: a further group costs `cost` in the top layer and twice as much in each layer below,
    and `separation` weighs how little the labels of a group agree in their errors. Errors are
    averages over batches that forget at the rate `decay`: of each `view` alone, or of the `joint`
    prediction. `consensus` is how strongly the views' clusters are drawn together.
    """

    widths: Sizes | None = None
    every_epochs: Natural = 10
    errors: Literal["view", "joint"] = "view"
    decay: BelowOne = 0.99
    cost: NonNegative = 0.0625
    separation: Positive = 1.95
    consensus: NonNegative = 0.1


class Model(Section):
    """Per-view encoder and projector, the weight net H, and the classifier.

    A projector is one Linear-ReLU-BatchNorm layer, or `mlp`: Linear-ReLU-Linear. The classifier,
    the probe and all of evaluation see every view's hidden features, or the first view's. With
    `task_groups` the classifier is DeepMTMV's.
    """

    encoder: Annotated[Encoder, Field(discriminator="kind")] = Mlp()
    projector: Literal["layer", "mlp"] = "layer"
    projection_width: Natural = 200
    shared_encoder: bool = False
    shared_projector: bool = False
    classify_on: Literal["all_views", "first_view"] = "all_views"
    label_autoencoder: LabelAutoencoder = LabelAutoencoder()
    task_groups: TaskGroups | None = None
