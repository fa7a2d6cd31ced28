"""Pictures decoded for training, against bare libraries and against an earlier checkout.

    python -m benchmarks.pictures [--before FOLDER]

Times are of one process and one thread, in turns; a ratio is the median over the turns. Of JPEGs
the other side is the decoder of the checkout in FOLDER, else simplejpeg; of other kinds Pillow.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

from heron.data.pictures import PictureDecoder

SIDE, COUNT, TURNS = 300, 40, 7
KINDS = {"JPEG": {"quality": 90}, "PNG": {}, "WEBP": {}, "GIF": {}, "TIFF": {}, "BMP": {}}


def drawn(kind: str) -> list[bytes]:
    """Smooth pictures with a little noise, as files."""
    draw, files = np.random.default_rng(0), []
    for _ in range(COUNT):
        small = Image.fromarray(draw.integers(0, 256, (12, 12, 3)).astype(np.uint8))
        large = np.asarray(small.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).astype(int)
        noisy = (large + draw.integers(0, 12, large.shape)).clip(0, 255).astype(np.uint8)
        stream = BytesIO()
        Image.fromarray(noisy).save(stream, kind, **KINDS[kind])
        files.append(stream.getvalue())
    return files


def seconds(decode: Callable[[bytes], object], files: list[bytes]) -> float:
    """The processor time of all files."""
    start = time.process_time()
    for data in files:
        decode(data)
    return time.process_time() - start


def serve() -> None:
    """Times JPEGs each time a line comes in: the side of the other checkout."""
    files, out = drawn("JPEG"), np.empty((SIDE, SIDE, 3), np.uint8)
    decoder = PictureDecoder(out.shape, out.shape)
    for _ in sys.stdin:
        print(seconds(lambda data: decoder.decode(data, out), files), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout, for its rate of JPEGs")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    out = np.empty((SIDE, SIDE, 3), np.uint8)
    decoder = PictureDecoder(out.shape, out.shape)
    other = None
    if options.before:
        command = [sys.executable, __file__, "--serve"]
        path = {"PYTHONPATH": str(options.before.resolve())}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        other = subprocess.Popen(command, env=path, cwd=options.before, text=True, **pipes)

    def by_pillow(data: bytes) -> None:
        with Image.open(BytesIO(data)) as image:
            out[:] = np.asarray(image.convert("RGB"))

    def bare(kind: str, files: list[bytes]) -> float:
        if kind != "JPEG":
            return seconds(by_pillow, files)
        if other is None or other.stdin is None or other.stdout is None:
            return seconds(lambda data: simplejpeg.decode_jpeg(data, buffer=out), files)
        print(file=other.stdin, flush=True)
        return float(other.stdout.readline())

    print(f"{'kind':6}{'ms':>8}{'of bare':>10}{'least':>8}{'most':>8}")
    for kind in KINDS:
        files = drawn(kind)
        ours, ratios = [], []
        for _ in range(TURNS * (3 if kind == "JPEG" else 1)):
            theirs = bare(kind, files)
            ours.append(seconds(lambda data: decoder.decode(data, out), files))
            ratios.append(ours[-1] / theirs)
        each = 1000 * statistics.median(ours) / COUNT
        middle = statistics.median(ratios)
        print(f"{kind:6}{each:8.3f}{middle:10.3f}{min(ratios):8.3f}{max(ratios):8.3f}")
    if other is not None and other.stdin is not None:
        other.stdin.close()
        other.wait()


if __name__ == "__main__":
    main()
