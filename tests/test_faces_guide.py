"""The page from CelebA's pictures to a model runs as it is written, on some of the pictures.

Each week all 10,000 of them are there, and the pretrained network, trained for as long as the page
says, ends above logistic regression on the pixels.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from heron.cli.main import main
from tests import forked
from tests.test_tutorial import ENVIRONMENT, ROOT
from tests.weekly import WEEKLY

PAGE = (ROOT / "docs" / "faces.md").read_text()
CELEBA = ROOT.parent / "shared" / "data" / "celeba"
LISTS = ("list_attr_celeba.txt", "list_eval_partition.txt")
KEPT = {"0": 300, "1": 5, "2": 100}  # pictures of each split, but each week
SHORT = ["train.total_steps=4", "evaluate.baselines=false", "train.cpu_threads=1"]
SHORT += ["data.views.0.size=32", "data.views.1.size=32", "evaluate.map=never"]
VISION = Path(sys.prefix) / "vision"  # timm and the weights: see the Makefile

pytestmark = [
    pytest.mark.skipif(not CELEBA.exists(), reason="needs CelebA in ../shared/data"),
    pytest.mark.skipif(not VISION.exists(), reason="needs `make .venv/.tested`"),
    pytest.mark.timeout(6 * 3600 if WEEKLY else 300),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three files of the publisher, of some pictures, and the page's script."""
    folder = tmp_path_factory.mktemp("faces")
    (own := folder / "celeba").mkdir()
    _, partition = ((CELEBA / name).read_text().splitlines() for name in LISTS)
    by_split = {s: [n for n, part in map(str.split, partition) if part == s] for s in KEPT}
    names = {name for s, of in by_split.items() for name in (of if WEEKLY else of[: KEPT[s]])}
    with (
        zipfile.ZipFile(CELEBA / "img_align_celeba.zip") as whole,
        zipfile.ZipFile(own / "img_align_celeba.zip", "w") as some,
    ):
        for member in whole.namelist():
            if Path(member).name in names:
                some.writestr(member, whole.read(member))
    for name in LISTS:
        lines = (CELEBA / name).read_text().splitlines()
        kept = [line for line in lines if line.split()[0] in names]
        heads = [str(len(kept)), lines[1]] if "attr" in name else []
        (own / name).write_text("\n".join([*heads, *kept, ""]))
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (folder / "weights.py").write_text(script)
    return folder


def beside_timm(words: Sequence[str]) -> int:
    sys.path.insert(0, str(VISION))
    return main(words)


def weights_by_script(words: list[str], place: Path) -> None:
    paths = os.pathsep.join([str(ROOT), str(VISION)])
    environment = ENVIRONMENT | {"PYTHONPATH": paths}
    subprocess.run([sys.executable, *words], cwd=place, env=environment, check=True)


def test_every_command_of_the_page_runs(place: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for words in (shlex.split(line) for text in blocks for line in text.splitlines()):
        if words[:2] == ["pip", "install"]:  # as `make .venv/.tested` has done
            pinned = (ROOT / "requirements-vision.lock").read_text()
            assert all(f"{name}==" in pinned for name in words[3:])
            continue
        if words[0] == "python":
            weights_by_script(words[1:], place)
            continue
        # Of a network from scratch 1,500 steps take hours.
        short = (
            SHORT if words[1] == "pretrain" and not (WEEKLY and "pretrained.yaml" in words) else []
        )
        command = forked.start([*words[1:], *short], place, beside_timm)
        said, _ = command.communicate()
        assert command.returncode == 0, said[-3000:]
    result = json.loads((place / "runs" / "pretrained" / "result.json").read_text())
    assert not WEEKLY or result["auc_macro"] > max(0.75, result["logistic_auc_macro"])
