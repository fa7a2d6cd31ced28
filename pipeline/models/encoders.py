"""Encoders of one view: raw input to hidden features."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from pipeline.config import Cnn, Mlp
from pipeline.draws import uniforms
from pipeline.errors import ConfigError


class RowDropout(nn.Module):
    """Dropout whose mask is a function of each row's key, not of a generator's state.

    So the mask of a sample is the same on any number of processes, and a resumed run needs no
    generator. Srivastava et al. 2014; kept units are scaled by 1 / (1 - p).
    """

    def __init__(self, p: float, salt: int) -> None:
        """Drop with probability p; `salt` keeps the layers of a model apart."""
        super().__init__()
        self.p, self.salt = p, salt

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        """Drop units of [rows, units] by the rows' keys; evaluation drops none."""
        if not self.training:
            return x
        kept = uniforms(keys, self.salt, x.shape[1]) >= self.p
        return x * kept / (1 - self.p)


class Encoder(nn.Module):
    """Layers in a row, some of which take the rows' keys."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """Chain the layers."""
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        """Hidden features [rows, width] of one view's input."""
        for layer in self.layers:
            x = layer(x, keys) if isinstance(layer, RowDropout) else layer(x)
        return x


def mlp(width: int, widths: Sequence[int], dropout: float, salt: int) -> list[nn.Module]:
    """Linear-ReLU-BatchNorm layers, the order of HeroCon's networks, each with dropout.

    Args:
        width: of the input.
        widths: of each layer's output.
        dropout: probability; 0 adds no layer.
        salt: of the first layer's dropout.
    """
    layers: list[nn.Module] = []
    for number, out in enumerate(widths):
        layers += [nn.Linear(width, out), nn.ReLU(), nn.BatchNorm1d(out)]
        if dropout > 0:
            layers.append(RowDropout(dropout, salt + number))
        width = out
    return layers


def cnn(channels: int, stages: Sequence[int]) -> list[nn.Module]:
    """3 x 3 convolutions of stride 2, each with BatchNorm and ReLU, and the mean over places.

    Args:
        channels: of the input, [batch, channels, height, width].
        stages: channels out of each stage; the last is the width of the features.
    """
    layers: list[nn.Module] = []
    for out in stages:
        layers += [
            nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
        ]
        channels = out
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def build_encoder(config: Mlp | Cnn, shape: Sequence[int], salt: int) -> tuple[Encoder, int]:
    """An encoder for one view and the width of its hidden features.

    Args:
        config: which encoder.
        shape: of one sample as stored: [width], or [height, width, channels].
        salt: of the encoder's random numbers.

    Raises:
        ConfigError: the encoder does not fit the view.
    """
    if isinstance(config, Mlp):
        if len(shape) != 1:
            raise ConfigError(
                f"model.encoder is 'mlp', but the view is an image of shape {tuple(shape)}; "
                "expected an encoder for images: 'cnn'"
            )
        return Encoder(mlp(shape[0], config.widths, config.dropout, salt)), config.widths[-1]
    if len(shape) != 3:
        raise ConfigError(
            f"model.encoder is 'cnn', but the view is a vector of shape {tuple(shape)}; "
            "expected 'mlp'"
        )
    return Encoder(cnn(shape[2], config.channels)), config.channels[-1]
