"""The data sets of `benchmarks.recipes`, from scikit-learn and a folder of public ones."""

import csv
import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from heron.shards.build import build
from heron.sources import make_source

Arrays = dict[str, Any]  # views, `labels` and perhaps `split`, as the arrays source takes them
TRAIN, TEST = 10_000, 2_000  # rows of a large set
FACE = 48  # pixels of a side of the central square of a CelebA picture
# Drawn with numpy's generator 0 from the attributes that a quarter to three quarters of faces have.
DRAWN = ("Mouth_Slightly_Open", "Wavy_Hair", "High_Cheekbones", "Young", "Oval_Face")


class DataSet(NamedTuple):
    """A set of the benchmark."""

    arrays: Callable[[Path], Arrays]  # of the folder of shared data
    labelled: int | None = None  # as `heron init --labelled`
    tuned: bool = False  # whether a recipe was chosen on it


def _toy(name: str) -> Callable[[Path], Arrays]:
    def read(_: Path) -> Arrays:
        import sklearn.datasets

        data = getattr(sklearn.datasets, f"load_{name}")()
        return {"columns": data.data.astype(np.float32), "labels": data.target}

    return read


def _digits(kind: str) -> Callable[[Path], Arrays]:
    def read(_: Path) -> Arrays:
        import sklearn.datasets

        data = sklearn.datasets.load_digits()
        if kind == "halves":
            views = {"upper": data.data[:, :32], "lower": data.data[:, 32:]}
            return {key: v.astype(np.float32) for key, v in views.items()} | {"labels": data.target}
        return {"image": (data.images * 15.9).astype(np.uint8), "labels": data.target}

    return read


def _columns(file: str, header: bool) -> Callable[[Path], Arrays]:
    """A CSV file, its class in the last column; unknown numbers are their column's mean."""

    def read(shared: Path) -> Arrays:
        with (shared / "uci" / file).open(newline="") as lines:
            rows = list(csv.reader(lines))[header:]
        cells = np.array([[np.nan if cell == "?" else float(cell) for cell in row] for row in rows])
        columns, classes = cells[:, :-1], np.unique(cells[:, -1], return_inverse=True)[1]
        columns = np.where(np.isnan(columns), np.nanmean(columns, 0), columns)
        return {"columns": columns.astype(np.float32), "labels": classes}

    return read


def _dermatology(shared: Path) -> Arrays:
    """What a doctor sees, and what a microscope shows of the same patient."""
    both = _columns("dermatology.csv", True)(shared)
    clinical = [*range(11), 33]  # the last is the age
    microscope = [n for n in range(34) if n not in clinical]
    views = {"clinical": both["columns"][:, clinical], "tissue": both["columns"][:, microscope]}
    return views | {"labels": both["labels"]}


def _idx(name: str, halves: bool = False) -> Callable[[Path], Arrays]:
    def read(shared: Path) -> Arrays:
        parts = list[tuple[Any, Any]]()
        for prefix in ("train", "t10k"):
            images, labels = (
                _read_idx(next((shared / name).glob(f"{prefix}-{kind}*")))
                for kind in ("images", "labels")
            )
            parts.append((images, labels.astype(int)))
        both = _sampled(parts[0], parts[1])
        if not halves:
            return both
        image = both.pop("image")
        views = {"left": image[:, :, :14], "right": image[:, :, 14:]}
        return {k: v.reshape(len(v), -1).astype(np.float32) / 255 for k, v in views.items()} | both

    return read


def _read_idx(path: Path) -> Any:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    shape = np.frombuffer(data, ">u4", data[3], 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def _sampled(*splits: tuple[Any, Any]) -> Arrays:
    """Draws TRAIN and TEST rows of two splits of pictures and classes."""
    random, parts = np.random.default_rng(7), list[tuple[Any, Any]]()
    for (images, labels), count in zip(splits, (TRAIN, TEST), strict=True):
        rows = random.permutation(len(labels))[:count]
        parts.append((images[rows], labels[rows]))
    split = np.array(["train"] * len(parts[0][1]) + ["test"] * len(parts[1][1]))
    image, label = (np.concatenate(part) for part in zip(*parts, strict=True))
    return {"image": image, "labels": label, "split": split}


def _cifar10(shared: Path) -> Arrays:
    files: dict[str, list[tuple[Any, str]]] = {"train": [], "test": []}
    with tarfile.open(shared / "cifar10" / "cifar10-images.tar.gz") as tar:
        for member in tar:
            if member.isfile() and len(parts := member.name.split("/")) >= 3:
                files[parts[-3]].append((_pixels(tar.extractfile(member).read()), parts[-2]))  # type: ignore[union-attr]
    names = sorted({name for _, name in files["test"]})
    both = []
    for split in ("train", "test"):
        images, labels = zip(*files[split], strict=True)
        both.append((np.stack(images), np.array([names.index(name) for name in labels])))
    return _sampled(*both)


def _faces(attribute: str) -> Callable[[Path], Arrays]:
    """CelebA's pictures of people who have an attribute, or do not; cut as `size` cuts a view."""

    def read(shared: Path) -> Arrays:
        folder = shared / "celeba"
        _, names, *lines = (folder / "list_attr_celeba.txt").read_text().splitlines()
        column = 1 + names.split().index(attribute)
        flags = {line.split()[0]: line.split()[column] == "1" for line in lines}
        part = dict(map(str.split, (folder / "list_eval_partition.txt").read_text().splitlines()))
        splits: dict[str, list[tuple[Any, int]]] = {"0": [], "2": []}
        with zipfile.ZipFile(folder / "img_align_celeba.zip") as pictures:
            for name in pictures.namelist():
                key = Path(name).name
                if key in flags and part.get(key) in splits:
                    row = _pixels(pictures.read(name), FACE), int(flags[key])
                    splits[part[key]].append(row)
        pairs = [tuple(map(np.stack, zip(*rows, strict=True))) for rows in splits.values()]
        return _sampled(*pairs)  # type: ignore[arg-type]

    return read


def _pixels(data: bytes, side: int | None = None) -> Any:
    from PIL import Image, ImageOps

    picture = Image.open(io.BytesIO(data)).convert("RGB")
    return np.asarray(ImageOps.fit(picture, (side, side)) if side else picture)


SETS = {
    "iris": DataSet(_toy("iris")),
    "wine": DataSet(_toy("wine")),
    "breast_cancer": DataSet(_toy("breast_cancer")),
    "yeast": DataSet(_columns("yeast.csv", False)),
    "texture": DataSet(_columns("texture.dat", False), 200),
    "digits-pictures": DataSet(_digits("pictures"), 100, True),
    "mnist": DataSet(_idx("mnist"), 100),
    "smiling": DataSet(_faces("Smiling"), 200, True),
    "smiling-1000": DataSet(_faces("Smiling"), 1000, True),
    **{name.lower(): DataSet(_faces(name), 200) for name in DRAWN},
    "digits-halves": DataSet(_digits("halves"), 100),
    "dermatology": DataSet(_dermatology),
    "dermatology-60": DataSet(_dermatology, 60),
    "kmnist": DataSet(_idx("kmnist"), 200, True),
    "kmnist-halves": DataSet(_idx("kmnist", True), 200, True),
    "male": DataSet(_faces("Male"), 200, True),
    "cifar10": DataSet(_cifar10, 1000, True),
}


def build_set(name: str, folder: Path, shared: Path) -> str:
    """Builds a set's shards where they are missing, and returns their folder."""
    path = folder / "data" / name
    if not (path / "manifest.json").exists():
        (folder / "data").mkdir(parents=True, exist_ok=True)
        np.savez(file := folder / "data" / f"{name}.npz", **SETS[name].arrays(shared))
        build(make_source("arrays", {"npz": file}), path, progress=False)
    return str(path)
