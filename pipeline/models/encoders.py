"""Encoders of one view: raw input to hidden features."""

from collections.abc import Sequence

from torch import nn

from pipeline.config import Cnn, Mlp


def mlp(width: int, widths: Sequence[int]) -> nn.Sequential:
    """Linear-ReLU-BatchNorm layers, the order of HeroCon's networks.

    Args:
        width: of the input.
        widths: of each layer's output.
    """
    layers: list[nn.Module] = []
    for out in widths:
        layers += [nn.Linear(width, out), nn.ReLU(), nn.BatchNorm1d(out)]
        width = out
    return nn.Sequential(*layers)


def cnn(channels: int, stages: Sequence[int]) -> nn.Sequential:
    """Conv-BatchNorm-ReLU-MaxPool stages and the mean over places.

    Args:
        channels: of the input, [batch, channels, height, width].
        stages: channels out of each stage; the last is the width of the features.
    """
    layers: list[nn.Module] = []
    for out in stages:
        layers += [
            nn.Conv2d(channels, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def build_encoder(config: Mlp | Cnn, shape: Sequence[int]) -> tuple[nn.Module, int]:
    """An encoder for one view and the width of its hidden features.

    Args:
        config: which encoder.
        shape: of one sample as stored: [width], or [height, width, channels].

    Raises:
        ValueError: the encoder does not fit the view.
    """
    if isinstance(config, Mlp):
        if len(shape) != 1:
            raise ValueError(
                f"model.encoder is 'mlp', but the view is an image of shape {tuple(shape)}; "
                "expected an encoder for images: 'cnn'"
            )
        return mlp(shape[0], config.widths), config.widths[-1]
    if len(shape) != 3:
        raise ValueError(
            f"model.encoder is 'cnn', but the view is a vector of shape {tuple(shape)}; "
            "expected 'mlp'"
        )
    return cnn(shape[2], config.channels), config.channels[-1]
