"""Compare the loss files of two folders.

    python -m tests.compare_losses A B [--relative 1e-9]

exits with 1 and names the first step that differs. Without a tolerance the numbers must be the
same to the last digit, which they are on one machine; on another, rounding differs: 1e-9.
"""

import argparse
import json
import math
import sys
from pathlib import Path


def differences(mine: Path, theirs: Path, relative: float) -> list[str]:
    """Returns a line for each value of a loss file that is not that of the other.

    Args:
        mine: a loss file.
        theirs: the loss file to compare with.
        relative: largest difference that passes, as a share of the value; 0: none.
    """
    ours, expected = json.loads(mine.read_text()), json.loads(theirs.read_text())
    if len(ours) != len(expected):
        return [f"{mine.name}: {len(ours)} rows; expected {len(expected)}"]
    wrong = []
    for row, (one, other) in enumerate(zip(ours, expected, strict=True)):
        if one.keys() != other.keys():
            wrong.append(f"{mine.name}: row {row} has {sorted(one)}; expected {sorted(other)}")
            continue
        for name, value in other.items():
            if not math.isclose(one[name], value, rel_tol=relative, abs_tol=relative):
                wrong.append(f"{mine.name}: row {row}: {name} is {one[name]!r}; expected {value!r}")
    return wrong


def main() -> int:
    """Reads the command line and compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("mine", type=Path)
    parser.add_argument("expected", type=Path)
    parser.add_argument("--relative", type=float, default=0.0)
    given = parser.parse_args()
    names = sorted(path.name for path in given.mine.glob("*.json"))
    missing = sorted({path.name for path in given.expected.glob("*.json")} - set(names))
    wrong = [f"{name}: not in {given.mine}" for name in missing]
    for name in names:
        wrong += differences(given.mine / name, given.expected / name, given.relative)[:3]
    print("\n".join(wrong) if wrong else f"{len(names)} loss files are the same")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
