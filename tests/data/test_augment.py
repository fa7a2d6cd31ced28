"""Augmentations against what they are by definition, and against a loop over pixels."""

import colorsys
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from benchmarks.launches import counting
from heron.data.augmentations import Blur, Color, Crop, Flip
from heron.data.options import ModelView
from heron.data.pictures import DRAWS, blur, color, crop, fit, flip

PICTURES = torch.rand(4, 3, 12, 18, generator=torch.Generator().manual_seed(0))
DRAWN = torch.rand(4, DRAWS, generator=torch.Generator().manual_seed(1))
WHOLE: dict[str, Any] = {"area": [1.0, 1.0], "flip": 0.0}


def test_a_crop_of_the_whole_is_the_picture() -> None:
    same = crop(PICTURES, Crop(**WHOLE), DRAWN, (12, 18))
    torch.testing.assert_close(same, PICTURES, atol=1e-5, rtol=0)
    mirrored = crop(PICTURES, Crop(area=[1.0, 1.0], flip=1.0), DRAWN, (12, 18))
    torch.testing.assert_close(mirrored, PICTURES.flip(3), atol=1e-5, rtol=0)


def test_a_smaller_crop_is_the_mean_of_what_it_covers() -> None:
    """No pixel is skipped: that would alias."""
    half = crop(PICTURES, Crop(**WHOLE), DRAWN, (6, 9))
    torch.testing.assert_close(half, F.avg_pool2d(PICTURES, 2), atol=1e-5, rtol=0)
    third = crop(PICTURES, Crop(**WHOLE), DRAWN, (4, 6))
    torch.testing.assert_close(third, F.avg_pool2d(PICTURES, 3), atol=1e-5, rtol=0)


def test_a_crop_is_a_loop_over_pixels() -> None:
    """Bilinear samples of the drawn rectangle, pixel by pixel in float64."""
    options = Crop(area=[0.3, 0.6], ratio=[0.5, 2.0], flip=0.0)
    size = 7, 5
    out = crop(PICTURES, options, DRAWN, size)
    height, width = PICTURES.shape[2:]
    for n, u in enumerate(DRAWN.double().tolist()):
        area = (0.3 + 0.3 * u[0]) * height * width  # in pixels
        shape = size[1] / size[0] * math.exp(math.log(0.5) + (math.log(2) - math.log(0.5)) * u[4])
        w, h = math.sqrt(area * shape), math.sqrt(area / shape)
        fits = max(1.0, w / width, h / height)
        w, h = w / fits, h / fits
        left, top = (width - w) * u[1], (height - h) * u[2]
        fine = max(1, math.ceil(max(height / size[0], width / size[1]) * 0.6**0.5 - 0.25))
        for i in range(size[0]):
            for j in range(size[1]):
                mean = torch.zeros(3, dtype=torch.float64)
                for a in range(fine):
                    for b in range(fine):
                        y = top + (i + (a + 0.5) / fine) * h / size[0] - 0.5
                        x = left + (j + (b + 0.5) / fine) * w / size[1] - 0.5
                        mean += bilinear(PICTURES[n].double(), y, x) / fine**2
                torch.testing.assert_close(out[n, :, i, j].double(), mean, atol=1e-4, rtol=0)


def bilinear(picture: torch.Tensor, y: float, x: float) -> torch.Tensor:
    height, width = picture.shape[1:]
    value = torch.zeros(3, dtype=torch.float64)
    for row in (math.floor(y), math.floor(y) + 1):
        for column in (math.floor(x), math.floor(x) + 1):
            weight = (1 - abs(y - row)) * (1 - abs(x - column))
            inside = picture[:, min(max(row, 0), height - 1), min(max(column, 0), width - 1)]
            value += weight * inside
    return value


def test_crops_stay_inside_and_have_their_area() -> None:
    """A ramp tells where a crop lay: its corners are its least and largest values."""
    ramp = (torch.arange(100.0) / 99).expand(1, 1, 100, 100)
    pictures = torch.cat([ramp, ramp.transpose(2, 3)], 1).expand(500, 2, 100, 100)
    draws = torch.rand(500, DRAWS, generator=torch.Generator().manual_seed(2))
    out = crop(pictures, Crop(area=[0.2, 0.5], ratio=[0.75, 4 / 3], flip=0.0), draws, (20, 20))
    spans = out.flatten(2).amax(2) - out.flatten(2).amin(2)
    area = (spans * 20 / 19).prod(1)
    assert 0.18 < area.min() < 0.25
    assert 0.45 < area.max() < 0.52
    ratio = spans[:, 0] / spans[:, 1]
    assert 0.73 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.36


def test_a_process_without_rows_crops_none() -> None:
    assert crop(PICTURES[:0], Crop(), DRAWN[:0], (6, 5)).shape == (0, 3, 6, 5)


def test_fit_is_the_centre_without_distortion() -> None:
    part = fit(PICTURES, (12, 12))
    assert torch.equal(part, PICTURES[:, :, :, 3:15])
    assert fit(PICTURES, (12, 18)).data_ptr() == PICTURES.data_ptr()
    small = fit(PICTURES, (4, 4))
    assert small.shape == (4, 3, 4, 4)
    assert torch.equal(small, fit(PICTURES[:, :, :, 3:15], (4, 4)))
    even = torch.full((1, 3, 50, 40), 0.3)
    torch.testing.assert_close(fit(even, (8, 8)), torch.full((1, 3, 8, 8), 0.3))
    assert fit(even, (1, 200)).shape == (1, 3, 1, 200)
    assert fit(even, (200, 1)).shape == (1, 3, 200, 1)


def test_color_by_its_options() -> None:
    still = color(PICTURES, Color(strength=0.0, hue=0.0, grey=0.0), DRAWN)
    torch.testing.assert_close(still, PICTURES, atol=1e-5, rtol=0)
    assert torch.equal(color(PICTURES, Color(probability=0.0, grey=0.0), DRAWN), PICTURES)
    grey = color(PICTURES, Color(strength=0.0, hue=0.0, grey=1.0), DRAWN)
    weights = torch.tensor([0.299, 0.587, 0.114])
    expected = (PICTURES * weights[:, None, None]).sum(1, keepdim=True).expand_as(grey)
    torch.testing.assert_close(grey, expected, atol=1e-5, rtol=0)
    some = color(PICTURES, Color(probability=0.5, grey=0.0), DRAWN)
    kept = [torch.equal(a, b) for a, b in zip(some, PICTURES, strict=True)]
    assert kept == (DRAWN[:, 5] >= 0.5).tolist()
    assert some.min() >= 0
    assert some.max() <= 1


def distorted(
    picture: NDArray[np.float64], factors: list[float], turn: float
) -> NDArray[np.float64]:
    """A picture [height, width, 3], pixel by pixel, by Python's own HSV."""
    brightness, contrast, saturation = factors
    luma = np.array([0.299, 0.587, 0.114])
    y: NDArray[np.float64] = np.clip(picture * brightness, 0, 1)
    y = np.clip(contrast * y + (1 - contrast) * (y @ luma).mean(), 0, 1)
    y = np.clip(saturation * y + (1 - saturation) * (y @ luma)[..., None], 0, 1)
    for place in np.ndindex(y.shape[:2]):
        hue, *others = colorsys.rgb_to_hsv(*y[place])
        y[place] = colorsys.hsv_to_rgb((hue + turn) % 1, *others)
    return y


@pytest.mark.parametrize("colors", ["any", "corners", "greys"])
@pytest.mark.parametrize(
    "options", [Color(grey=0.0), Color(strength=1.0, hue=0.5, grey=0.0)], ids=str
)
def test_color_is_that_of_hsv(colors: str, options: Color) -> None:
    """Of any colours, of those where two or three channels are equal, and of greys."""
    torch.manual_seed(0)
    x, draws = torch.rand(6, 3, 5, 4, dtype=torch.float64), torch.rand(6, DRAWS).double()
    x = {"any": x, "corners": x.round(), "greys": x[:, :1].expand_as(x).clone()}[colors]
    found = color(x, options, draws)
    factor, turn = 1 + options.strength * (2 * draws - 1), (2 * draws[:, 3] - 1) * options.hue
    for picture, n in zip(found, range(len(x)), strict=True):
        given = x[n].permute(1, 2, 0).numpy()
        expected = distorted(given, factor[n, :3].tolist(), float(turn[n]))
        np.testing.assert_allclose(picture.permute(1, 2, 0).numpy(), expected, atol=1e-12)


KERNELS = {"crop": 30, "color": 55, "blur": 16, "flip": 3}


@pytest.mark.parametrize("name", KERNELS)
def test_an_augmentation_asks_for_few_kernels(name: str) -> None:
    """As a GPU starts them; through kornia, colours took 120."""
    changes: dict[str, Callable[[], torch.Tensor]] = {
        "crop": lambda: crop(PICTURES, Crop(), DRAWN, (6, 6)),
        "color": lambda: color(PICTURES, Color(), DRAWN),
        "blur": lambda: blur(PICTURES, Blur(), DRAWN),
        "flip": lambda: flip(PICTURES, Flip(), DRAWN),
    }
    with counting() as counts:
        changes[name]()
    assert 0 < counts.launches.total() <= KERNELS[name] and not counts.up and not counts.down


def test_flip_and_blur() -> None:
    assert torch.equal(flip(PICTURES, Flip(probability=1.0), DRAWN), PICTURES.flip(3))
    assert torch.equal(flip(PICTURES, Flip(probability=0.0), DRAWN), PICTURES)
    assert torch.equal(blur(PICTURES, Blur(probability=0.0), DRAWN), PICTURES)
    even = torch.full((4, 3, 40, 40), 0.3)
    torch.testing.assert_close(blur(even, Blur(probability=1.0), DRAWN), even)
    blurred = blur(PICTURES, Blur(sigma=[1.0, 2.0], probability=1.0), DRAWN)
    assert (blurred.var((2, 3)) < PICTURES.var((2, 3)) / 2).all()


def test_blur_is_a_gaussian() -> None:
    point = torch.zeros(2, 1, 41, 41)
    point[:, :, 20, 20] = 1
    draws = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    out = blur(point, Blur(sigma=[0.5, 1.5], probability=1.0), draws)
    for picture, sigma in zip(out, (0.5, 1.5), strict=True):
        ratio = float(picture[0, 20, 21] / picture[0, 20, 20])
        assert ratio == pytest.approx(math.exp(-1 / (2 * sigma**2)), rel=1e-4)


def test_a_sample_is_augmented_alike_alone_and_among_others() -> None:
    changes: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda x, u: crop(x, Crop(), u, (6, 6)),
        lambda x, u: color(x, Color(), u),
        lambda x, u: flip(x, Flip(), u),
        lambda x, u: blur(x, Blur(), u),
    ]
    for change in changes:
        together = change(PICTURES, DRAWN)
        alone = torch.cat(
            [change(PICTURES[n : n + 1], DRAWN[n : n + 1]) for n in range(len(PICTURES))]
        )
        torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


def test_augmentations_are_named_or_written_out() -> None:
    view = ModelView.model_validate({"stored": "a", "size": 8, "augment": ["simclr", {"flip": {}}]})
    assert view.size == [8, 8]
    assert [a.name for a in view.augment] == ["crop", "color", "blur", "flip"]
    assert view.augment[0].options == Crop(area=[0.08, 1.0], ratio=[3 / 4, 4 / 3])
    assert ModelView.model_validate(view.model_dump(mode="json")) == view
    with pytest.raises(
        ValueError, match="subgraph or the dotted path of your own class, got crop and fl"
    ):
        ModelView.model_validate({"stored": "a", "augment": [{"crop": {}, "flip": {}}]})
    with pytest.raises(
        ValueError, match="no augmentation named 'jitter'; choose one of crop, color"
    ):
        ModelView.model_validate({"stored": "a", "augment": ["jitter"]})
    with pytest.raises(ValueError, match=r"the smaller value must come first"):
        ModelView.model_validate({"stored": "a", "augment": [{"crop": {"area": [0.9, 0.2]}}]})
