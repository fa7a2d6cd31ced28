"""The drawing of the imports: of small houses by hand, and of this one."""

from pathlib import Path

import pytest

from tests import house

SMALL = {
    "__init__.py": "",
    "low/__init__.py": "from heron.low.floor import stone",
    "low/floor.py": "stone = 1",
    "low/wall.py": "import heron.low.floor",
    "high/__init__.py": "",
    "high/roof.py": "from heron.low import stone\nfrom .beam import wood",
    "high/beam.py": "wood = 2",
    "alone.py": "from heron.high import roof",
}


def build(root: Path, files: dict[str, str]) -> house.House:
    for name, text in files.items():
        path = root / "heron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return house.House(root)


def test_a_name_that_a_package_hands_on_leads_to_its_file(tmp_path: Path) -> None:
    small = build(tmp_path, SMALL)
    assert small.imports["heron.high.roof"] == {"heron.low.floor", "heron.high.beam"}
    assert small.imports["heron.alone"] == {"heron.high.roof"}
    assert small.rooms() == {
        "heron": set(),
        "heron.low": set(),
        "heron.high": {"heron.low"},
        "heron.alone": {"heron.high"},
    }
    assert house.floors(small.rooms()) == {
        "heron": 1,
        "heron.low": 1,
        "heron.high": 2,
        "heron.alone": 3,
    }
    assert not list(house.faults(small))


@pytest.mark.parametrize(
    "text",
    [
        "from heron import alone",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from heron.alone import x",
        "def late():\n    import heron.alone",
        "import importlib\nimportlib.import_module('heron.alone')",
        "__import__('heron.alone')",
        "from importlib import import_module\nimport_module({1: 'heron.alone'}[1])",
    ],
    ids=["at the top", "for types", "in a function", "by name", "by a bare name", "from a table"],
)
def test_an_import_counts_wherever_it_stands(tmp_path: Path, text: str) -> None:
    small = build(tmp_path, SMALL | {"low/floor.py": f"{text}\nstone = 1"})
    rooms, files = house.faults(small)
    assert rooms == "circle of rooms: heron.alone heron.high heron.low"
    assert files == "circle of files: heron.alone heron.high.roof heron.low.floor"
    assert house.main(["--root", str(tmp_path), "--check"]) == 1
    assert house.main(["--root", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    "text", ["f'{__name__}.alone'", "'heron.' + name", "'.'.join(['heron', name])"]
)
def test_a_name_that_is_put_together_is_a_fault(tmp_path: Path, text: str) -> None:
    late = f"from importlib import import_module\ndef late(name):\n    import_module({text})"
    (fault,) = house.faults(build(tmp_path, SMALL | {"low/wall.py": late}))
    assert fault.startswith("heron.low.wall:3 imports a module of heron by a name that is put tog")


def test_what_others_named_may_be_imported(tmp_path: Path) -> None:
    late = "import importlib\ndef late(name):\n    importlib.import_module(name)"
    assert not list(house.faults(build(tmp_path, SMALL | {"low/wall.py": late})))


def test_circles_are_those_of_a_graph_drawn_by_hand() -> None:
    graph = {1: {2}, 2: {3}, 3: {1, 4}, 4: {5}, 5: {4}, 6: {1}}
    assert sorted(map(sorted, house.circles(graph))) == [[1, 2, 3], [4, 5]]
    assert house.floors(graph) == {1: 2, 2: 2, 3: 2, 4: 1, 5: 1, 6: 3}


def test_too_much_of_anything_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MAX_ROOMS", "MAX_ARROWS", "MAX_LINES", "MAX_FILES"):
        monkeypatch.setattr(house, limit, 1)
    assert list(house.faults(build(tmp_path, SMALL))) == [
        "4 rooms; expected 1 at most",
        "2 arrows between rooms; expected 1 at most",
        "7 lines; expected 1 at most",
        "8 files; expected 1 at most",
    ]


def test_this_house_has_no_fault() -> None:
    """Neither a circle nor more of anything than `house` says, where limits only fall."""
    assert not list(house.faults(house.House(Path(__file__).parents[1])))
