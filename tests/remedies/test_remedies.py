"""An error that names a command or an option: doing what it says succeeds.

The messages are found by a search of the product's syntax trees. Each of them is performed here, or
by a test that `elsewhere.py` names, or needs what a test has not, which it says.
"""

import ast
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import uvicorn
import yaml

from tests.remedies.data_cases import CASES
from tests.remedies.elsewhere import NEEDS, PERFORMED
from tests.remedies.label_cases import LABELLED
from tests.remedies.makers import RANDOM, Case, arrays, call
from tests.remedies.publisher_cases import PUBLISHED
from tests.remedies.retrieval_cases import ON_INDEXES

ROOT = Path(__file__).parents[2]
# Words of a text that says what is wrong, as the help of an option does not.
REFUSAL = re.compile(
    r"expected | must |^must |^no file|is missing;|where only|but most|again, with"
    r"|^add it to|not used with"
)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+|`heron [a-z]+")

NEGATIVES = ("negatives", "EMBEDDINGS", "--out", "OUT/report")
# Commands on a run of one step, its embeddings and its index.
ON_A_RUN = [
    Case(
        "pass exactly one of --key, --file, --text and --vector",
        lambda folder: ["query", "INDEX"],
        ["--key", "000001"],
    ),
    Case(
        "a sheet cannot be",
        lambda folder: ["query", "INDEX", "--key", "000001", "--sheet", "OUT/near.txt"],
        ["--sheet", "OUT/near.png"],
        ["--sheet", "OUT/near.txt"],
    ),
    Case(
        " queries to learn ",
        lambda folder: ["index", "EMBEDDINGS", "--kind", "ivfpq", "--out", "OUT/index"],
        ["--kind", "flat"],
        ["--kind", "ivfpq"],
    ),
    Case(
        " queries to train on, but there are ",
        lambda folder: ["index", "OUT/e", "--kind", "ivf", "--out", "OUT/index"],
        ["--kind", "flat"],
        ["--kind", "ivf"],
        given=["embed", "RUN", "--out", "OUT/e", "--split", "test"],
    ),
    Case(
        "is too little to read",
        lambda folder: ["index", "EMBEDDINGS", "--memory", "1KB", "--out", "OUT/index"],
        ["--memory", "1GB"],
        ["--memory", "1KB"],
    ),
    Case(
        "use another --width, or none for all",
        lambda folder: ["index", "EMBEDDINGS", "--width", 10_000, "--out", "OUT/index"],
        ["--width", 8],
        ["--width", "10000"],
    ),
    Case(
        "already exists; choose another ",
        lambda folder: ["embed", "RUN", "--out", "OUT/full"],
        ["--overwrite"],
    ),
    Case(
        "continues; remove one of them",
        lambda folder: ["pretrain", "OUT/run/config.yaml", "run.resume=auto", "--overwrite"],
        [],
        ["run.resume=auto"],
    ),
    Case(
        "nothing to do; pass --out, --push, or both",
        lambda folder: ["save", "RUN"],
        ["--out", "OUT/model"],
    ),
    Case(
        "--out must end with ",
        lambda folder: ["predict", "RUN", "--out", "OUT/rows.txt"],
        ["--out", "OUT/rows.csv"],
        ["--out", "OUT/rows.txt"],
    ),
    Case(
        "--page must be the address that",
        lambda folder: [*NEGATIVES, "--page", "here"],
        ["--page", "http://127.0.0.1:8000/"],
        ["--page", "here"],
    ),
    Case(
        "the index has the layer",
        lambda folder: [*NEGATIVES, "--index", "INDEX", "--layer", "projection"],
        ["--layer", "hidden"],
        ["--layer", "projection"],
    ),
    Case(
        "is not a comparison; write KEY SIGN VALUE",
        lambda folder: ["runs", "PLACE", "--where", "optim.lr"],
        ["--where", "optim.lr>0"],
        ["--where", "optim.lr"],
    ),
    Case(
        "only 'and' can follow a comparison",
        lambda folder: ["runs", "PLACE", "--where", "optim.lr>0 or optim.lr<1"],
        ["--where", "optim.lr>0 and optim.lr<1"],
        ["--where", "optim.lr>0 or optim.lr<1"],
    ),
    Case(
        "overrides and --method need an experiment",
        lambda folder: ["config", "--method", "simclr"],
        ["faces"],
    ),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step on few faces, its embeddings and its index."""
    folder = tmp_path_factory.mktemp("place")
    changes = ["train=40", "test=8"]
    overrides = [f"data.build.{change}" for change in changes]
    overrides += ["data.protocol.labelled=20", "data.batch.labelled=4", "data.batch.unlabelled=8"]
    overrides += ["train.steps=1", "train.cpu_threads=1", "evaluate.baselines=false"]
    overrides += ["evaluate.seeds=1", "evaluate.map=never", f"data.path={folder / 'faces'}"]
    assert call(["pretrain", "faces", f"run.dir={folder / 'run'}", *overrides]) == 0
    assert call(["embed", folder / "run", "--out", folder / "embeddings"]) == 0
    assert call(["index", folder / "embeddings", "--out", folder / "index"]) == 0
    return folder


def text_of(node: ast.expr) -> str:
    """The words of a message, `{}` for each value that it has in it."""
    if isinstance(node, ast.JoinedStr):
        parts = [v.value if isinstance(v, ast.Constant) else "{}" for v in node.values]
        return "".join(map(str, parts))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def texts_of(tree: ast.Module) -> Iterator[str]:
    """The messages of a module: what it raises, and whatever else says what to do."""
    seen: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield max(map(text_of, ast.walk(node.exc)), key=len, default="")  # type: ignore[arg-type]
            seen |= {id(part) for part in ast.walk(node)}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            seen.add(id(node.value))  # a docstring
    for node in ast.walk(tree):  # a text before its parts
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in seen:
            seen |= {id(part) for part in ast.walk(node)}
            if REFUSAL.search(text := text_of(node)):
                yield text


def messages() -> dict[str, str]:
    """Every message that names an option or a verb, and the file it is in."""
    found = {}
    for room in ("heron",):
        for path in sorted((ROOT / room).rglob("*.py")):
            for text in texts_of(ast.parse(path.read_text())):
                if OPTION.search(text):
                    found[text] = str(path.relative_to(ROOT))
    return found


def perform(
    case: Case, folder: Path, capsys: pytest.CaptureFixture[str], place: Path = Path()
) -> None:
    names = {"OUT": folder, "RUN": place / "run", "INDEX": place / "index", "PLACE": place}
    names["EMBEDDINGS"] = place / "embeddings"

    def placed(words: Sequence[Any]) -> list[str]:
        return [re.sub("|".join(names), lambda m: str(names[m[0]]), str(word)) for word in words]

    words = placed(case.make(folder))
    if words[1] == "build" and "--out" not in words:
        words += ["--out", str(folder / "out"), "--quiet"]
    if case.given:
        assert call(placed(case.given)) == 0
    capsys.readouterr()
    assert call(words) != 0
    error = capsys.readouterr().err
    assert case.said in error
    for option in OPTION.findall(" ".join(map(str, case.more))):
        assert option in error, error
    if case.before:
        assert f"`heron {' '.join(case.before[:2])}`" in error
        assert call(placed(case.before)) == 0
    left = [word for word in words if word not in placed(case.without)]
    assert call([*left, *placed(case.more)]) == 0, capsys.readouterr().err


def ids(cases: Sequence[Case]) -> list[str]:
    return [case.said[:40] for case in cases]


ON_DATA = [*CASES, *LABELLED, *PUBLISHED]


@pytest.mark.parametrize("case", ON_DATA, ids=ids(ON_DATA))
def test_data(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("a file of the user's")
    perform(case, tmp_path, capsys)


@pytest.fixture
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is asked nothing, on a machine without GPUs."""

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        sockets[0].close()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)


ON_A_PLACE = [*ON_A_RUN, *ON_INDEXES]


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.parametrize("case", ON_A_PLACE, ids=ids(ON_A_PLACE))
def test_a_run(case: Case, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("full", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "notes.txt").write_text("the user's")
    tree = yaml.safe_load((place / "run" / "config.yaml").read_text())
    tree["run"]["dir"] = str(tmp_path / "again")
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(tree))
    perform(case, tmp_path, capsys, place)


def test_rows_without_a_view_and_the_option_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused as another build, since the first shard was finished."""
    x = RANDOM.normal(size=(20_000, 2)).astype(np.float32)
    x[-1] = np.nan
    words = arrays(x=x, z=np.ones((20_000, 2)), labels=np.arange(20_000) % 2)(tmp_path)
    words = [*words, "--out", tmp_path / "out", "--quiet"]
    capsys.readouterr()
    assert call(words) == 1
    assert "or `--missing allow` rows that are NaN throughout" in capsys.readouterr().err
    assert call([*words, "--missing", "allow"]) == 0
    assert call(["shards", "verify", tmp_path / "out"]) == 0


def strings(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and type(n.value) is str]


def test_what_another_test_performs_is_there() -> None:
    """The test exists, and it or another in its file asks for a part of the message."""
    for said, test in PERFORMED.items():
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
        assert any(said in text for text in strings(tree)), (said, test)


def test_every_message_is_performed_here_or_elsewhere() -> None:
    """A new message that names an option needs a case here, or a line in `elsewhere.py`."""
    known = [*(case.said for case in [*ON_DATA, *ON_A_PLACE]), *PERFORMED, *NEEDS]
    found = messages()
    for said in known:
        assert [said in text for text in found].count(True) == 1, said
    left = [text for text in found if not any(said in text for said in known)]
    assert not left, left
