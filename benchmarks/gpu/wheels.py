"""Gathers what travels to a GPU machine without a network: wheels beside the tree.

    python -m benchmarks.gpu.wheels --out .whl                 # here
    python3 -m pip install --no-index --no-deps --target site .whl/*.whl
    PYTHONPATH=site:. python3 -m benchmarks.gpu --out OUT      # there, in the root of the tree

The machine has Python 3.12 with torch, Triton and most of what Heron needs; these wheels are the
rest. With the tree they must stay below what may travel. The ways back and forth are not ours.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_MIB = 64  # that may travel, the tree included
PYTHON = "3.12"
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)) + (
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
WHEELS = (
    "pydantic==2.14.3", "pydantic_core==2.50.4", "annotated-types==0.8.0",
    "typing-inspection==0.4.5", "typing_extensions==4.16.0", "simplejpeg==1.9.0",
    "faiss-cpu==1.15.1", "greenlet==3.5.6", "plotly==7.1.0",
    "webdataset==1.0.2", "braceexpand==0.1.7", "hjson==3.1.0", "beartype==0.23.1", "inf-cl==1.2.1",
    "siglip-kernel==0.1.2",
)  # fmt: skip
DEEPSPEED = "deepspeed==0.19.8"  # has no wheel: a pure Python one is built, its ops where it runs


def commands(out: Path) -> list[list[str]]:
    """The commands of pip that fill a folder with wheels for the machine."""
    pip = [sys.executable, "-m", "pip"]
    download = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(out)]
    download += ["--python-version", PYTHON, "--implementation", "cp"]
    download += [word for platform in PLATFORMS for word in ("--platform", platform)]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
    return [[*download, wheel] for wheel in WHEELS] + [[*build, DEEPSPEED]]


def size_mib(out: Path) -> float:
    """Mebibytes of the wheels and of the files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    sizes = [path.stat().st_size for path in (*files, *out.glob("*.whl")) if path.is_file()]
    return sum(sizes) / 2**20


def refuse_too_much(mib: float) -> None:
    """Ends the program where the wheels and the tree are more than may travel."""
    if mib > MOST_MIB:
        sys.exit(
            f"the wheels and the tree are {mib:.0f} MiB; expected at most {MOST_MIB}: take a wheel "
            "that the parts to be run do not need (inf-cl and siglip-kernel: `peers`) out of "
            "benchmarks/gpu/wheels.py"
        )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.wheels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=ROOT / ".whl")
    out: Path = parser.parse_args(words).out
    out.mkdir(parents=True, exist_ok=True)
    for command in commands(out):
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"DS_BUILD_OPS": "0"}
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["pip says nothing"]
            sys.exit(f"no wheel of {command[-1]} for Python {PYTHON}: {lines[-1]}")
    mib = size_mib(out)
    refuse_too_much(mib)
    print(f"{out}: {len(list(out.glob('*.whl')))} wheels; {mib:.0f} MiB with the tree")


if __name__ == "__main__":
    main()
