"""Sections of an experiment that name networks of other libraries."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from heron.pipeline.config.sections import Natural, PathText, Plain, Positive, Section


class Lora(Section):
    """Low-rank changes of layers that otherwise stay as they are (Hu et al. 2022), by peft.

    Attributes:
        rank: of the change of a layer's matrix.
        alpha: the change is scaled by alpha / rank.
        targets: last parts of the names of the layers; null: those that peft has for the network.
    """

    rank: Natural = 8
    alpha: Positive = 16.0
    targets: Annotated[list[str], Field(min_length=1)] | None = None


class Network(Section):
    """What networks of all libraries have. Their own dropout is off, as it would not follow rows.

    Attributes:
        weights: to begin with; null: they are drawn at random.
        freeze: whether they stay as they are.
        lora: changes of low rank, which alone are learnt; null: all weights are learnt.
        layer_decay: rate of a layer as a share of the next higher one's; the highest has
            `optim.lr` (Bao et al. 2022). 1: all layers have one rate.
    """

    weights: PathText | None = None
    freeze: bool = False
    lora: Lora | None = None
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.freeze and self.lora is not None:
            raise ValueError(
                "freeze and lora are both there; lora leaves the weights as they are, and learns "
                "beside them: leave out one of them"
            )
        return self


class Transformer(Network):
    """A model of transformers (`AutoModel`), of token ids or of pictures.

    Attributes:
        kind: of the encoder.
        config: its configuration, with `model_type`, such as {model_type: bert, hidden_size: 64};
            null: that of `weights`.
        weights: a folder with config.json and safetensors files.
        pooling: mean over the tokens that are there, or the first token's output.
    """

    kind: Literal["transformers"] = "transformers"
    config: Plain | None = None
    pooling: Literal["mean", "first"] = "mean"

    @model_validator(mode="after")
    def _some_network(self) -> Self:
        if self.config is None and self.weights is None:
            raise ValueError(
                "neither config nor weights is there; expected config: {model_type: bert, ...}, "
                "or weights: a folder with config.json"
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config has no model_type; expected one, such as bert or vit")
        return self


class Timm(Network):
    """A model of timm, of pictures.

    Attributes:
        kind: of the encoder.
        name: timm's, such as vit_small_patch16_224 or resnet50.
        options: of `timm.create_model`, such as {patch_size: 8}; the size of pictures is the
            view's.
        weights: a safetensors file of that model, whose mean and standard deviation of pictures
            count then.
    """

    kind: Literal["timm"] = "timm"
    name: str
    options: Plain = {}


class Gin(Section):
    """A graph isomorphism network of torch_geometric; features are those of all layers.

    Attributes:
        kind: of the encoder.
        width: of a layer; a graph has `layers` times as many features.
        layers: how many there are.
    """

    kind: Literal["gin"] = "gin"
    width: Natural = 32
    layers: Natural = 3
