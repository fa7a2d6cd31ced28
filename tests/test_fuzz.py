"""Whatever a file holds, it is read, or refused in one line: nothing else is ever raised.

`HERON_FUZZ` is the number of draws in all, anew each time; without it a few hundred, the same ones.
"""

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heron.base.artefact import fingerprint
from heron.base.errors import CONTROL, HeronError
from heron.experiment.config import METHODS, dump_config, load_config, parse_config
from heron.shards.manifest import Manifest
from heron.sources.arff import read_arff
from heron.studies.results import read_results
from heron.studies.study import load_study
from heron.training.tracking import read_metrics, read_result
from tests.studies import made

FUZZ = os.environ.get("HERON_FUZZ")
PARTS = 7  # properties below, which share the draws
EACH = settings(
    max_examples=max(1, int(FUZZ or 400) // PARTS),
    deadline=None,
    database=None,
    derandomize=FUZZ is None,
    suppress_health_check=list(HealthCheck),
)
CONFIGS = sorted({*METHODS.parent.glob("*.yaml")} - {METHODS})
STUDIES = sorted((METHODS.parent / "studies").glob("*.yaml"))
TREES = [yaml.safe_load(path.read_text()) for path in CONFIGS]
STUDY_TREES = [yaml.safe_load(path.read_text()) for path in STUDIES]
KEYS = sorted({key for tree in [*TREES, *STUDY_TREES] for key in tree} | {"lr", "kind", "a.b", "0"})
NASTY = [
    *[
        "1e400",
        ".nan",
        "-.inf",
        "9" * 5000,
        "0x" + "f" * 5000,
        "9223372036854775808",
        "-1",
        "1_000",
    ],
    *["&a", "*a", "&a [*a]", "<<: *a", "{", "}", "[" * 60, "[", "]", ": ", "? ", "- ", "\n", "\t"],
    *["!!int ''", "!!bool x", "!!binary aGk=", "!!python/object:os.system", "!!set {1}", "~", "''"],
    *["2001-13-45", "2001-01-01", "1:1:1", "\0", "\x85", "\u2028", "\ufeff", "\ud800", '"\\ud800"'],
    *["'", '"', "#", "%", "@", "`", "|", ">", "\\", "{a: 1, a: 2}", "é", "²", "٣", "NaN", "null"],
    *["@data", "@attribute", "{0 1}", "{0 1", "?", ",", ",,", "{", "9 9", "\r", "\x1c", "inf"],
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, 10**400, -(2**63) - 1, 10**4000])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["a\0b", "a\nb", "\ud800", "mlp", "all", "crop", "my_lab.none.Mine", ""])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def only_heron_errors(call: Callable[[], object]) -> None:
    """Calls, and passes over what a user is told in one line."""
    try:
        call()
    except HeronError as error:
        said = str(error)
        assert said and len(said.splitlines()) == 1 and not CONTROL.search(said), said


@st.composite
def mutated_trees(draw: st.DrawFn, trees: list[Any]) -> Any:
    """One of some trees of which a few values are others, gone, or under another key."""
    tree = copy.deepcopy(draw(st.sampled_from(trees)))
    for _ in range(draw(st.integers(1, 3))):
        place: Any = tree
        while True:
            if not (isinstance(place, dict | list) and place):
                break
            names: list[Any] = list(place if isinstance(place, dict) else range(len(place)))
            name = draw(st.sampled_from(names))
            if not (isinstance(place[name], dict | list) and draw(st.integers(0, 3))):
                what = draw(st.sampled_from(["other", "other", "gone", "renamed"]))
                if what != "gone" or isinstance(place, list):
                    new: Any = name if what == "other" or isinstance(place, list) else draw(NAMES)
                    place[new] = draw(VALUES)
                else:
                    del place[name]
                break
            place = place[name]
    return tree


NAMES = st.sampled_from(KEYS) | st.text(max_size=6)


@st.composite
def mutated_texts(draw: st.DrawFn, texts: list[str]) -> bytes:
    """One of some texts with characters out, others in, or bits flipped."""
    data = draw(st.sampled_from(texts)).encode()
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(data))), draw(st.sampled_from([0, 0, 1, 5, 40]))
        new = draw(st.sampled_from(NASTY) | st.text(max_size=6)).encode("utf-8", "surrogatepass")
        data = (
            data[:at]
            + draw(st.sampled_from([new, b"", b"\xff", data[at - 9 : at]]))
            + (data[at + length :])
        )
    return data


@EACH
@given(tree=mutated_trees(TREES))
def test_trees_of_configurations(tree: Any) -> None:
    def read() -> None:
        dump_config(parse_config(tree))

    only_heron_errors(read)


@EACH
@given(
    text=mutated_texts([path.read_text() for path in CONFIGS]),
    overrides=st.lists(
        st.tuples(
            st.sampled_from(["optim.lr", "data.views.0.size", "seed", "model.encoder", "objective"])
            | NAMES,
            st.sampled_from(NASTY) | st.text(max_size=9),
        ).map("=".join),
        max_size=2,
    ),
    method=st.none() | st.sampled_from(["herocon", "supcon", "c2ae", "none"]),
)
def test_texts_of_configurations(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, overrides: list[str], method: str | None
) -> None:
    path = write(tmp_path_factory, "some.yaml", text)
    whole = random.Random(len(text)).choice(CONFIGS)  # overrides of a file that is read
    only_heron_errors(lambda: load_config(path, overrides, method))
    only_heron_errors(lambda: load_config(path))
    only_heron_errors(lambda: dump_config(load_config(whole, overrides, method)))


@EACH
@given(tree=mutated_trees(STUDY_TREES), small=st.booleans())
def test_studies(tmp_path_factory: pytest.TempPathFactory, tree: Any, small: bool) -> None:
    text = yaml.dump(tree, allow_unicode=False).encode()
    path = write(tmp_path_factory, "some.yaml", text)
    only_heron_errors(lambda: load_study(path, small, ["seed=1", "optim.lr=[1, 2]"]))


METRICS = '{"step": 0, "epoch": 0, "loss": 1.5, "seconds": 0.1, "samples_per_s": null}\n' * 3
RESULT = json.dumps({"steps": 3, "f1": 0.5, "nested": {"a": [1, None]}, "strategy": "ddp"})


@EACH
@given(lines=mutated_texts([METRICS]), result=mutated_texts([RESULT]))
def test_metrics_and_results(
    tmp_path_factory: pytest.TempPathFactory, lines: bytes, result: bytes
) -> None:
    path = write(tmp_path_factory, "metrics.jsonl", lines)
    only_heron_errors(lambda: read_metrics(path))
    only_heron_errors(lambda: read_result(write(tmp_path_factory, "result.json", result), ["f1"]))


ROW = made.trial("000", {"optim.lr": 0.1})


@EACH
@given(row=mutated_trees([ROW]), sealed=st.booleans(), text=mutated_texts([json.dumps(ROW)]))
def test_rows_of_a_study(
    tmp_path_factory: pytest.TempPathFactory, row: Any, sealed: bool, text: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "study"
    if not folder.exists():
        made.study(folder, [ROW])
    lines = [text]
    try:
        lines.append(json.dumps(made.sealed(row) if sealed else row).encode())
    except ValueError:  # a number without an end has no fingerprint
        lines.append(repr(row).encode("utf-8", "surrogatepass"))
    for line in lines:
        (folder / "trials.jsonl").write_bytes(line + b"\n")
        only_heron_errors(lambda: read_results(folder))


ARFF = [
    "@relation x\n@attribute a numeric\n@attribute 'b c' {0,1}\n@data\n0.5,1\n-1e3,0\n% end\n",
    "@RELATION x\n@ATTRIBUTE a real\n@ATTRIBUTE b {0, 1}\n\n@DATA\n{0 0.5, 1 1}\n{}\n",
]


@EACH
@given(text=mutated_texts(ARFF))
def test_arff(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = write(tmp_path_factory, "some.arff", text)
    only_heron_errors(lambda: read_arff(path))


SHARD = {"file": "all-000000.tar", "samples": 3, "bytes": 9, "sha256": "a" * 64}
MANIFEST = {
    "dataset": "x",
    "schema_version": 3,
    "views": [{"name": "v", "kind": "vector", "shape": [2], "dtype": "float32", "mean": [0, 1]}],
    "labels": {"kind": "multi_class", "names": ["a", "b"]},
    "block_rows": 4,
    "splits": {"all": [SHARD | {"index_bytes": 9, "index_sha256": "b" * 64}]},
    "built_from": {"source": "x", "version": 1, "options": {}, "files": [], "shard_rows": 4},
}


@EACH
@given(
    tree=mutated_trees([MANIFEST]),
    text=mutated_texts([json.dumps(MANIFEST)]),
)
def test_manifests(tree: Any, text: bytes) -> None:
    """With the fingerprint of what they say, so that the types see them too."""
    only_heron_errors(lambda: Manifest.parse(text, "some.json"))
    try:
        sealed = tree | {"fingerprint": fingerprint(tree)}
    except (ValueError, TypeError):  # no finite number
        sealed = tree
    data = json.dumps(sealed).encode()
    only_heron_errors(lambda: Manifest.parse(data, "some.json"))


def write(factory: pytest.TempPathFactory, name: str, data: bytes) -> Path:
    path = factory.getbasetemp() / name
    path.write_bytes(data)
    return path
