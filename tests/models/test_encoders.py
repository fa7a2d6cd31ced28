"""Encoders: their layers, their shapes, a gradient for every parameter, and what does not fit."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from heron.base.errors import ConfigError
from heron.models.encoders import build_encoder, vgg
from heron.models.options import Cnn, Convnet, Encoder, Linear, Mlp, Resnet, Vgg

VECTOR, IMAGE = [48], [4, 4, 3]  # as stored; an image is height, width, channels
SMALL = Resnet(widths=[4, 8], depths=[2, 1])
CASES: list[tuple[Encoder, list[int], int]] = [
    (Mlp(widths=[5, 7]), VECTOR, 7),
    (Mlp(widths=[5, 7], norm=False, dropout=0.5), VECTOR, 7),
    (Linear(width=6), VECTOR, 6),
    (Cnn(channels=[4, 5]), IMAGE, 5),
    (Cnn(channels=[4], places=2), IMAGE, 16),
    (Cnn(channels=[4, 5], places=2, widths=[8, 6], dropout=0.5), IMAGE, 6),
    (Convnet(channels=[4, 5], widths=[8, 6]), IMAGE, 6),
    (Convnet(channels=[4], widths=[8, 6], shape=[3, 4, 4]), VECTOR, 6),
    (Convnet(channels=[4, 5], kernel=5, widths=[8, 6], norm=False, dropout=0.3), IMAGE, 6),
    (SMALL, IMAGE, 8),
    (Vgg(channels=[4, 5], depths=[1, 2], widths=[8, 6], places=1), IMAGE, 6),
    (Vgg(channels=[4], depths=[1], widths=[6], places=2, norm=False, dropout=0.3), IMAGE, 6),
    (Resnet(widths=[8, 12], depths=[1, 2], layer="bottleneck", stem_stride=2), IMAGE, 12),
]


def build(config: Encoder, shape: list[int], seed: int = 0) -> tuple[nn.Module, int]:
    torch.manual_seed(seed)
    return build_encoder(config, shape, salt=100)


def inputs(shape: list[int], rows: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    size = shape if len(shape) == 1 else [shape[2], *shape[:2]]
    return torch.rand(rows, *size, generator=generator)


@pytest.mark.parametrize(("config", "shape", "width"), CASES)
def test_features_have_the_width_that_is_said_and_every_parameter_a_gradient(
    config: Encoder, shape: list[int], width: int
) -> None:
    encoder, said = build(config, shape)
    features = encoder(inputs(shape), torch.arange(6))
    assert said == width
    assert features.shape == (6, width)
    features.square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name


@pytest.mark.parametrize(("config", "shape", "width"), CASES)
def test_weights_are_those_of_the_seed(config: Encoder, shape: list[int], width: int) -> None:
    one, same, other = (build(config, shape, seed)[0].state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_an_mlp_without_norm_is_linear_and_relu() -> None:
    encoder, _ = build(Mlp(widths=[300], norm=False), VECTOR)
    linear = next(m for m in encoder.modules() if isinstance(m, nn.Linear))
    x = inputs(VECTOR)
    torch.testing.assert_close(encoder(x, torch.arange(6)), linear(x).relu())


def test_a_linear_encoder_is_an_affine_map() -> None:
    encoder, _ = build(Linear(width=6), VECTOR)
    x, y, keys = inputs(VECTOR), inputs(VECTOR).flip(0), torch.arange(6)
    half = encoder((x + y) / 2, keys)
    torch.testing.assert_close(half, (encoder(x, keys) + encoder(y, keys)) / 2)


def test_a_convnet_sees_a_vector_as_the_image_it_is() -> None:
    flat, _ = build(Convnet(channels=[4, 5], widths=[6], shape=[3, 4, 4]), VECTOR)
    planes, _ = build(Convnet(channels=[4, 5], widths=[6]), IMAGE)
    x, keys = inputs(IMAGE), torch.arange(6)
    torch.testing.assert_close(flat(x.flatten(1), keys), planes(x, keys))


@pytest.mark.parametrize("kernel", [3, 5])
def test_a_convnet_is_convolution_relu_norm_pool_then_an_mlp(kernel: Literal[3, 5]) -> None:
    """N-MNIST: 28 x 28 is halved twice, and 32 planes of 7 x 7 are flattened."""
    encoder, _ = build(Convnet(shape=[1, 28, 28], kernel=kernel), [784])
    sizes = [m.kernel_size for m in encoder.modules() if isinstance(m, nn.Conv2d)]
    assert sizes == [(kernel, kernel)] * 2
    kinds = [type(m).__name__ for m in encoder.modules() if not list(m.children())]
    stage, layer = ["Conv2d", "ReLU", "BatchNorm2d", "MaxPool2d"], ["Linear", "ReLU", "BatchNorm1d"]
    assert kinds == ["Unflatten", *stage, *stage, "Flatten", *layer, *layer]
    assert next(m for m in encoder.modules() if isinstance(m, nn.Linear)).in_features == 32 * 7 * 7


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (Resnet(), 11_173_962 - 5_130),
        (
            Resnet(widths=[256, 512, 1024, 2048], depths=[3, 4, 6, 3], layer="bottleneck"),
            23_520_842 - 20_490,
        ),
    ],
    ids=["ResNet-18", "ResNet-50"],
)
def test_a_resnet_has_the_parameters_of_its_name(config: Resnet, parameters: int) -> None:
    """As published for CIFAR-10, less the classifier of ten classes."""
    encoder, _ = build(config, [32, 32, 3])
    assert sum(p.numel() for p in encoder.parameters()) == parameters


def test_the_first_layers_of_a_resnet_keep_the_places() -> None:
    """3 x 3 and no max-pool: H-SCL's setting for images of 32 x 32; the stem may halve them."""
    halving = Resnet(widths=[4], depths=[1], stem_stride=2)
    for config, side in ((Resnet(widths=[4], depths=[1]), 32), (halving, 16)):
        encoder: Any = build(config, [32, 32, 3])[0]
        network = encoder.layers[0].network
        assert network.embedder.embedder.convolution.kernel_size == (3, 3)
        assert network.embedder(inputs([32, 32, 3])).shape == (6, 4, side, side)


def test_a_resnet_is_its_formula() -> None:
    """One basic layer without a shortcut's convolution, and the mean over places."""
    encoder, _ = build(Resnet(widths=[4], depths=[1]), IMAGE)
    weights = {k.rsplit("network.")[1]: v for k, v in encoder.state_dict().items()}
    x = inputs(IMAGE)

    def norm(x: Tensor) -> Tensor:
        mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), False, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt()

    def convolve(x: Tensor, name: str) -> Tensor:
        return norm(nn.functional.conv2d(x, weights[f"{name}.convolution.weight"], padding=1))

    first = convolve(x, "embedder.embedder").relu()
    layer = "encoder.stages.0.layers.0.layer"
    inner = convolve(convolve(first, f"{layer}.0").relu(), f"{layer}.1")
    expected = (inner + first).relu().mean((2, 3))
    torch.testing.assert_close(encoder(x, torch.arange(6)), expected)


@pytest.mark.parametrize(
    ("config", "shape", "message"),
    [
        (
            Mlp(),
            IMAGE,
            r"'mlp', but the view is an image of shape \(4, 4, 3\); .* 'timm' or 'transformers'",
        ),
        (Linear(), IMAGE, "'linear', but the view is an image"),
        (
            Cnn(),
            VECTOR,
            r"'cnn', but the view is a vector of shape \(48,\); .* or 'convnet' with a shape",
        ),
        (SMALL, VECTOR, "'resnet', but the view is a vector"),
        (
            Convnet(),
            VECTOR,
            r"without a shape, .* vector of 48 values; set model.encoder.shape to \[chann",
        ),
        (
            Convnet(shape=[1, 28, 28]),
            VECTOR,
            r"shape must be .* of 48 values, .*, got \[1, 28, 28\], 784 values",
        ),
        (
            Convnet(shape=[1, 4, 4]),
            IMAGE,
            r"is \[1, 4, 4\], but the view's images are \[3, 4, 4\]; remove it",
        ),
        (Vgg(), IMAGE, "'vgg', which halves images 5 times, .* 32 x 32, got 4 x 4; use fewer st"),
        (Vgg(), VECTOR, "'vgg', but the view is a vector"),
        (
            Convnet(channels=[2, 2, 2]),
            IMAGE,
            "halves images 3 times, .* at least 8 x 8, got 4 x 4; use fewer channels",
        ),
    ],
)
def test_an_encoder_that_does_not_fit_the_view_is_refused(
    config: Encoder, shape: list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(config, shape)


def test_vgg_16_has_the_parameters_of_its_paper() -> None:
    """138,357,544 (Simonyan and Zisserman 2015, Table 2: 138 million), less the last layer's."""
    with torch.device("meta"):
        network = nn.Sequential(*vgg(Vgg(norm=False), 3, 0)[0])
    assert sum(p.numel() for p in network.parameters()) == 138_357_544 - 4_097_000
    assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in network) == 15


def test_vgg_without_layers_has_the_features_of_its_grid() -> None:
    config = Vgg(channels=[4, 8], depths=[1, 1], places=3, widths=[])
    network, width = build(config, [16, 16, 3])
    features = network(torch.rand(2, 3, 16, 16), torch.arange(2))
    assert features.shape == (2, width) == (2, 8 * 9)
    assert not any(isinstance(layer, nn.Linear) for layer in network.modules())


def test_vgg_draws_weights_that_keep_the_scale() -> None:
    """Through all thirteen convolutions without a norm, a picture neither fades nor explodes."""
    small = Vgg(channels=[16, 32, 32, 32, 32], widths=[8], places=1, norm=False)
    network, _ = build(small, [32, 32, 3])
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    hidden = x
    for layer in list(network.layers)[:-3]:  # type: ignore[arg-type]
        hidden = layer(hidden).detach()
    assert 0.1 < float(hidden.std() / x.std()) < 10


def test_vgg_needs_a_depth_for_each_stage() -> None:
    with pytest.raises(ValueError, match="got 5 and 2 of them"):
        Vgg(depths=[1, 2])
