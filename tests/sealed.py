"""Manifests as an attacker with our code would leave them: changed, and with a fingerprint."""

import json
from pathlib import Path
from typing import Any

from heron.shards.artefact import fingerprint


def seal(path: Path, **changes: Any) -> None:
    """Changes keys of a manifest, and gives it the fingerprint of what it then holds."""
    tree = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(tree | {"fingerprint": fingerprint(tree)}))
