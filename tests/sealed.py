"""Manifests as an attacker with our code would leave them: changed, and with a fingerprint."""

import json
from pathlib import Path
from typing import Any

from heron.base.artefact import FileSum, fingerprint


def seal(path: Path, **changes: Any) -> None:
    """Changes keys of a manifest, and gives it the fingerprint of what it then holds."""
    tree = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(tree | {"fingerprint": fingerprint(tree)}))


def seal_files(folder: Path) -> None:
    """Gives a checkpoint the sums of the files that lie in it now."""
    state = folder / "state.json"
    names = json.loads(state.read_text())["files"]
    seal(state, files={name: FileSum.of(folder / name).model_dump() for name in names})
