"""What a spreadsheet would compute is text in every CSV of ours (OWASP, "CSV Injection")."""

import csv
import json
import shutil
import subprocess
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from heron.base.errors import csv_line, csv_of
from heron.cli import models
from heron.evaluation.evaluator import Predictions
from heron.retrieval import embedding_model
from heron.serve.routes import lines_of

FORMULAS = (
    "=1+1",
    "+1+1",
    "-2+3",
    "@SUM(A1)",
    "\tx",
    "\rx",
    '=HYPERLINK("http://a","b")',
    "-",
    "=",
)
NUMBERS = ("-1.5", "+2", "-.5", "1e-5", "-1e-05", "-3.", "0", "")
PLAIN = ("000008", "a=b", "a,b", 'say "a"', "two\nlines", "é", "it's", "'quoted")


@pytest.mark.parametrize("cell", FORMULAS)
def test_a_formula_is_quoted_after_an_apostrophe(cell: str) -> None:
    line = csv_line(["key", cell, 1])
    assert line.startswith("key,\"'") and line.endswith('",1')
    assert next(csv.reader(StringIO(line, newline=""))) == ["key", f"'{cell}", "1"]


@pytest.mark.parametrize("cell", (*NUMBERS, *PLAIN))
def test_all_else_is_what_python_writes(cell: str) -> None:
    csv.writer(out := StringIO()).writerow(["key", cell])
    line = csv_line(["key", cell])
    assert line == out.getvalue().removesuffix("\r\n") or cell.startswith("'")
    assert next(csv.reader(StringIO(line, newline=""))) == ["key", cell]


def test_a_table_keeps_its_numbers() -> None:
    table = pd.DataFrame({"=key": ["a", "=b"], "x": [-1.5, np.nan], "n": [-3, 4]})
    table["half"] = np.array([0.1, -0.2], np.float32)
    lines = csv_of(table.to_csv(index=False))
    assert lines == '"\'=key",x,n,half\na,-1.5,-3,0.1\n"\'=b",,4,-0.2\n'
    again = pd.read_csv(StringIO(lines))
    assert again["x"].dtype == again["half"].dtype == float and again["n"].dtype == int


def test_the_page_s_fields_are_the_same() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node to run the page's script")
    page = Path(models.__file__).parents[1] / "serve/page/export.js"
    script = page.read_text().split("const csvField")[1].split("\n};\n")[0]
    cells = [*FORMULAS, *NUMBERS, *PLAIN]
    program = f"const csvField{script}\n}};\n"
    program += f"console.log(JSON.stringify({json.dumps(cells)}.map(csvField)))"
    done = subprocess.run([node, "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [csv_line([cell]) for cell in cells]


def test_keys_of_the_server_s_export() -> None:
    text = "".join(lines_of(iter(["=cmd|' /C calc'!A0", "-7", "a"]), "csv"))
    assert text == "key\r\n\"'=cmd|' /C calc'!A0\"\r\n-7\r\na\r\n"


def test_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probability = np.array([[0.25, 0.75], [1.0, 0.0]], np.float32)
    found = Predictions(probability, None, np.zeros((2, 2), np.float32), np.arange(2))
    given = ["=1+1", "-7"], found, ["@a", "b"], ""
    monkeypatch.setattr(embedding_model, "predict_rows", lambda *_: given)
    models.predict(tmp_path, out=tmp_path / "p.csv")
    text = (tmp_path / "p.csv").read_text()
    assert text == 'row,key,"\'@a",b\n0,"\'=1+1",0.25,0.75\n1,-7,1.0,0.0\n'
