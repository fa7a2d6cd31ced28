"""The lines of docs/api.md as they stand; what `import heron` loads and has."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heron
from heron.base.errors import ConfigError
from heron.shards.build import build
from heron.sources import make_source
from heron.training.tracking import FACTS
from tests.experiments import frames

ROOT = Path(__file__).resolve().parents[2]
LABELS = ["Beach", "Sunset", "Foliage", "Field", "Mountain", "Urban"]
SMALL = ["train.steps=30", "evaluate.map_rows=20"]
SCRIPT = """
import sys
import heron
if __name__ == "__main__":
    config = heron.load_config(sys.argv[1])
    run = heron.pretrain(config)
    print(f"processes {run.result['world_size']} {run.folder}", flush=True)
"""


def like_scene(folder: Path) -> dict[str, Any]:
    """Shards of 400 rows with the views and labels of Scene; the names that the lines use."""
    draw = np.random.default_rng(0)
    vectors = np.concatenate([np.eye(6), [[1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 1, 1]]])
    y = vectors[draw.integers(0, 8, 400)].astype(np.uint8)  # folds want each of them often
    x1, x2 = (
        (3 + y @ draw.normal(size=(6, width)) + draw.normal(size=(400, width))).astype(np.float32)
        for width in (12, 9)
    )
    np.savez(folder / "made.npz", view1=x1, view2=x2, labels=y)
    options = {"npz": str(folder / "made.npz"), "label_names": LABELS}
    build(make_source("arrays", options), folder / "data" / "scene", progress=False)
    return {"x1": x1, "x2": x2, "y": y}


@pytest.mark.parametrize("page", ["docs/api.md"])
def test_the_lines_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = "".join(block for block in blocks if "hf://" not in block)  # test_travel.py has the hub
    monkeypatch.chdir(tmp_path)
    names = like_scene(tmp_path)
    small = lines.replace('"optim.lr=0.1"', f'"optim.lr=0.1", {", ".join(map(repr, SMALL))}')
    assert small != lines
    exec(compile(small, page, "exec"), names)  # noqa: S102
    run, y = names["run"], names["y"]
    assert run.folder == Path("runs/scene") and (run.folder / "report.html").exists()
    assert names["config"].optim.lr == 0.1
    assert "weighted_supervised" not in names["config"].objective.terms()
    assert run.scores["auc_macro"] > 0.6
    assert run.result.keys() - run.scores.keys() == {*FACTS} - {"mfu"}  # which a CPU has not
    found = y[names["numbers"]]
    assert found.shape == (5, 10, 6)
    assert (found[..., 0] == 1).all() and (found[..., 5] == 0).all()


def test_an_import_is_cheap_and_names_are_there() -> None:
    code = "import heron, sys; print(*sys.modules); assert 'Index' in dir(heron)"
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"torch", "numpy", "pydantic", "faiss", "yaml"}
    assert "heron" in told and not heavy & set(told)
    for name in heron.__all__:
        assert getattr(heron, name) is not None
    with pytest.raises(AttributeError, match="module 'heron' has no attribute 'Indexes'"):
        heron.Indexes  # type: ignore[attr-defined]  # noqa: B018


def test_every_metric_is_there() -> None:
    assert all(callable(getattr(heron.metrics, name)) for name in heron.metrics.__all__)
    assert all(f"`{name}`" in (heron.metrics.__doc__ or "") for name in heron.metrics.__all__)


def test_a_wrong_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="No experiment named 'scnee'\\. Did you mean 'scene'\\?"):
        heron.load_config("scnee")
    with pytest.raises(ConfigError, match="unknown method 'herocon-x'; did you mean 'herocon-"):
        heron.load_config("scene", method="herocon-x")


def test_processes_of_torchrun_train_together(tmp_path: Path) -> None:
    from heron.experiment.config import dump_config

    (tmp_path / "go.py").write_text(SCRIPT)
    (tmp_path / "small.yaml").write_text(dump_config(frames(tmp_path, train={"steps": 2})))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command, "go.py", "small.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(f"processes 2 {tmp_path / 'run'}") == 2


def test_a_name_is_no_experiment() -> None:
    with pytest.raises(heron.HeronError, match=r"what heron.load_config returns: .*, got 'faces'"):
        heron.pretrain("faces")  # type: ignore[arg-type]
