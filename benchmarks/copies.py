"""Near copies that `heron audit` finds: pictures saved again, cut, and mirrored, across splits.

    python -m benchmarks.copies --pictures celeba/img_align_celeba.zip --out copies \
        --encoder timm:tf_efficientnet_lite0=lite0.safetensors

The first pictures of a zip are the training split; of some of them a changed one is a test picture:
saved as JPEG of another quality, cut to 95 % and enlarged again, or mirrored. Pairs of one group of
copies.csv count as found. Precision is the share of the found pairs that were planted (a data set's
own copies count against it, and are listed); recall that of the planted ones that were found.
"""

import argparse
import zipfile
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from heron.cli.main import main as heron
from heron.studies.text import markdown

KINDS = "quality 30", "quality 75", "crop of 95 %", "mirrored"


def changed(picture: Image.Image, kind: str) -> tuple[Image.Image, int]:
    """Returns a changed picture and the quality that it is saved with."""
    if kind.startswith("quality"):
        return picture, int(kind.split()[1])
    if kind == "mirrored":
        return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT), 95
    width, height = picture.size
    cut = round(0.025 * width), round(0.025 * height)
    inner = picture.crop((cut[0], cut[1], width - cut[0], height - cut[1]))
    return inner.resize((width, height), Image.Resampling.BICUBIC), 95


def write(archive: Path, out: Path, count: int, each: int, width: int) -> dict[str, str]:
    """Writes pictures as folders of a split and a class; returns the kind of each copy, by stem."""
    kinds = dict[str, str]()
    with zipfile.ZipFile(archive) as stored:
        names = sorted(name for name in stored.namelist() if name.endswith(".jpg"))[:count]
        chosen = np.random.default_rng(0).permutation(count)[: each * len(KINDS)].tolist()
        kind_of = {number: KINDS[place % len(KINDS)] for place, number in enumerate(chosen)}
        for number, name in enumerate(names):
            with stored.open(name) as stream, Image.open(stream) as opened:
                picture = opened.convert("RGB")
            picture.thumbnail((width, width), Image.Resampling.LANCZOS)
            stem = f"{number:06d}"
            for split, image, quality in (
                ("train", picture, 95),
                *([("test", *changed(picture, kind_of[number]))] if number in kind_of else []),
            ):
                folder = out / split / "face"
                folder.mkdir(parents=True, exist_ok=True)
                image.save(folder / f"{split}{stem}.jpg", quality=quality)
            if number in kind_of:
                kinds[stem] = kind_of[number]
    return kinds


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--pictures", type=Path, required=True)
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--each", type=int, default=50)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    kinds = write(args.pictures, args.out / "pictures", args.count, args.each, args.width)
    data, report = args.out / "data", args.out / "audit"
    given = ["--folder", str(args.out / "pictures"), "--out", str(data)]
    assert heron(["shards", "build", "folder", *given, "--quiet"]) == 0
    out = ["--data", str(data), "--out", str(report)]
    assert heron(["audit", "--encoder", args.encoder, *out]) == 0
    found, other = dict.fromkeys(KINDS, 0), list[str]()
    table = pd.read_csv(report / "copies.csv", dtype=str)
    for _, members in table.groupby("group"):
        for one, two in combinations(sorted(members.key), 2):
            stems = {"".join(c for c in key if c.isdecimal())[-6:] for key in (one, two)}
            if len(stems) == 1 and (kind := kinds.get(stems.pop())):
                found[kind] += 1
            else:
                other.append(f"{one} and {two}")
    planted = {kind: list(kinds.values()).count(kind) for kind in KINDS}
    rows = [[k, str(planted[k]), f"{found[k] / planted[k]:.2f}"] for k in KINDS]
    print(markdown(["copy", "planted", "recall"], rows))
    total = sum(found.values())
    print(f"precision {total / max(1, total + len(other)):.3f}; not planted: {', '.join(other)}")


if __name__ == "__main__":
    main()
