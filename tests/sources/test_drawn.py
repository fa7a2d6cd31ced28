"""Sources that are drawn: faces and frames, the same however they are read."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from heron.sources import make_source
from heron.sources.faces import ATTRIBUTES, Camera, draw_attributes, draw_face, photograph
from tests.shards.tiny import whole


def test_two_cameras_see_one_face_each_in_its_own_way() -> None:
    two = make_source("faces", {"train": 20, "test": 5, "size": 32, "cameras": 2})
    rows = two.read("train", 0, 20)
    one = make_source("faces", {"train": 20, "test": 5, "size": 32}).read("train", 0, 20)
    assert list(rows.views) == ["left", "right"]
    assert all(a != b for a, b in zip(rows.views["left"], rows.views["right"], strict=True))
    np.testing.assert_array_equal(rows.labels, one.labels)
    part = two.read("train", 7, 9)
    assert part.views == {name: view[7:9] for name, view in rows.views.items()}


@pytest.mark.parametrize("male", [False, True])
def test_every_attribute_of_a_face_can_be_seen(male: bool) -> None:
    still = Camera(0, 0, 0, (1, 1), 0, 0, 0, (128, 129))

    def picture(**changes: bool) -> NDArray[np.int64]:
        plain = dict.fromkeys(ATTRIBUTES, False)
        has = plain | {"Male": male, "No_Beard": True, "Young": True, "Attractive": True} | changes
        random = np.random.default_rng(5)
        face = draw_face(has, random, 32)
        return np.asarray(photograph(face, has["Blurry"], still, random), int)

    for name in ATTRIBUTES:
        changed = np.abs(picture(**{name: True}) - picture(**{name: False})).max(2)
        assert (changed > 20).sum() >= 4, name  # of 32 x 32 pixels


def test_faces_are_the_same_however_they_are_read(tmp_path: Path) -> None:
    source = make_source("faces", {"train": 20, "test": 5, "size": 32})
    rows = whole(source, "train")
    part = source.read("train", 7, 9)
    assert part.keys == ["000008", "000009"]
    assert part.views["image"] == rows.views["image"][7:9]
    np.testing.assert_array_equal(part.labels, rows.labels[7:9])
    assert source.read("test", 0, 1).keys == ["000021"]
    other = make_source("faces", {"train": 20, "test": 5, "size": 32, "seed": 1})
    assert whole(other, "train").views["image"] != rows.views["image"]


def test_face_attributes_are_plausible() -> None:
    drawn = [draw_attributes(np.random.default_rng([0, n])) for n in range(4000)]
    table = {name: np.array([face[name] for face in drawn]) for name in ATTRIBUTES}
    assert len(ATTRIBUTES) == 40
    for name, has in table.items():
        assert 0.05 <= has.mean() <= 0.9, f"{name}: {has.mean():.3f}"
    names = ("Black_Hair", "Blond_Hair", "Brown_Hair", "Gray_Hair")
    colours = np.sum([table[name] for name in names], 0)
    assert np.max(colours) == 1 and not np.any(colours[table["Bald"]])
    for one, other in [
        ("Bald", "Bangs"),
        ("Straight_Hair", "Wavy_Hair"),
        ("No_Beard", "Goatee"),
        ("No_Beard", "Mustache"),
        ("Receding_Hairline", "Bangs"),
    ]:
        assert not (table[one] & table[other]).any(), (one, other)


def test_frames_are_the_same_however_they_are_read() -> None:
    source = make_source("frames", {"train": 700, "classes": 5})
    rows = whole(source, "train")
    part = source.read("train", 200, 300)
    assert [rows.views[view.name].shape for view in source.views] == [(700, 273), (700, 112)]  # type: ignore[union-attr]
    np.testing.assert_array_equal(part.views["view2"], rows.views["view2"][200:300])
    np.testing.assert_array_equal(part.labels, rows.labels[200:300])
    assert set(rows.labels.tolist()) == set(range(5))
    assert not np.array_equal(source.read("test", 0, 9).views["view1"], rows.views["view1"][:9])
