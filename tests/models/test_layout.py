"""Pictures stay channels-last from the loader through a network, forward and backward."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heron.models.encoders import build_encoder
from heron.models.options import Convnet, Resnet

ROWS, SIDE = 4, 32
RESNET = Resnet(widths=[8, 16], depths=[1, 1])
CONVNET = Convnet(channels=[8, 16], widths=[8])


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts copies of what has the batch's rows and four axes: another layout, or another type."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        of_pictures = isinstance(result, Tensor) and result.dim() == 4 and len(result) == ROWS
        self.found[name] += of_pictures and name in ("clone", "_to_copy", "copy_")
        return result


@pytest.mark.parametrize(
    ("options", "flattened"), [(RESNET, {}), (CONVNET, {"clone": 1})], ids=["resnet", "convnet"]
)
def test_a_network_copies_no_picture_but_to_its_type(
    options: Any, flattened: dict[str, int]
) -> None:
    """Under autocast the input becomes bfloat16; what follows has its type and its layout.

    A convnet's last pictures, a few pixels each, become vectors.
    """
    encoder, _ = build_encoder(options, [SIDE, SIDE, 3], salt=1)
    encoder = encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.rand(ROWS, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
    with Copies() as copies:
        with torch.autocast("cpu", torch.bfloat16):
            y = encoder(x, torch.arange(ROWS))
        y.float().sum().backward()
    assert +copies.found == {"_to_copy": 1} | flattened


def test_another_layout_is_seen() -> None:
    x = torch.rand(ROWS, 3, SIDE, SIDE)
    with Copies() as copies:
        x.contiguous(memory_format=torch.channels_last)
    assert +copies.found == {"clone": 1}
