"""What starts quickly: a fresh interpreter loads no library before something needs it."""

import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.isolation  # which asks for a server of its own for its processes
from tests import ranks

ROOT = Path(__file__).parent.parent
LATE = {  # loaded by the functions that need them: most take as long as half of torch
    *("deepspeed", "faiss", "fsspec", "h5py", "matplotlib", "pandas", "pyarrow", "ray"),
    *("rich", "scipy", "sklearn", "tensorboard", "transformers"),
}
HELP = "import contextlib, heron.cli.main as cli\nwith contextlib.suppress(SystemExit): cli.main"

RUN = """
import tempfile
from pathlib import Path
from heron.api.job import pretrain
from tests import reference_runs
with tempfile.TemporaryDirectory() as folder:
    reference_runs.data(Path(folder))
    pretrain(reference_runs.experiment(Path(folder), "herocon", "herocon", steps=1))
"""


@pytest.mark.parametrize(
    ("code", "needed", "late"),
    [
        ("import heron.api.job", {"torch", "accelerate"}, LATE),
        ("import heron.losses.functional", {"torch"}, LATE | {"accelerate", "PIL"}),
        (f"{HELP}(['--help'])", {"argparse"}, LATE | {"torch", "accelerate"}),
        (RUN, {"torch._dynamo"}, LATE - {"fsspec", "tensorboard"}),
    ],
    ids=["pretrain", "losses", "help", "a run of a step"],
)
def test_libraries_are_loaded_late(code: str, needed: set[str], late: set[str]) -> None:
    tell = "import sys; print(*sys.modules, file=sys.stderr)"
    script = f"{code}\n{tell}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stderr.split())
    assert needed <= loaded
    assert not loaded & late


def _is_loaded() -> bool:
    return {"tests.preloaded", "sklearn.linear_model", "torch._dynamo"} <= set(sys.modules)


def test_processes_of_tests_are_forked_with_their_libraries() -> None:
    assert benchmarks.isolation.CONTEXT.get_start_method() == "forkserver"
    assert ranks.run(2, _is_loaded) == [True, True]
