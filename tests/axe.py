"""What axe-core finds on a page: WCAG's rules, and good practice."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any


def violations(page: Any) -> list[str]:
    """A line for each element of an open page that breaks a rule."""
    package = find_spec("axe_playwright_python")
    assert package is not None and package.origin is not None, "pip install axe-playwright-python"
    page.evaluate((Path(package.origin).parent / "axe.min.js").read_text())
    return [
        f"{found['id']} ({found['impact']}): {found['help']}: {node['html']:.200}"
        for found in page.evaluate("axe.run()")["violations"]
        for node in found["nodes"]
    ]
