"""Self-contained pages with Plotly charts: one file that opens from disk and fetches nothing.

`PageLinks` leads from a page to that of `heron serve`.
"""

import base64
import gzip
import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import jinja2
from PIL import Image
from pydantic_core import to_json

from heron.base.errors import RetrievalError
from heron.report.charts import Chart
from heron.retrieval.filters import quoted

PAGE = Path(__file__).parent / "page"
ADDRESS = "http://127.0.0.1:8000/"  # of `heron serve`, by default


def render(
    template: str,
    folder: Path = PAGE,
    filters: Mapping[str, Callable[..., str]] | None = None,
    **values: Any,
) -> str:
    """Renders a template of `page/`, or of another folder; the value `name` is the page's heading.

    All extend base.html. `filters` are added to those of all templates.
    """
    environment = _environment(folder)
    if filters:
        environment = environment.overlay()
        environment.filters = environment.filters | dict(filters)
    return environment.get_template(template).render(
        css=(PAGE / "run.css").read_text(),
        script=(PAGE / "run.js").read_text(),
        plotly=_plotly(),
        **values,
    )


def figure(chart: Chart) -> str:
    """Returns the HTML of a chart and of its title, if it has one; the page's script draws it."""
    kind = 'chart scroll" tabindex="0' if chart.least_width else "chart"  # keys scroll it, too
    title = f"<figcaption>{html.escape(chart.title)}</figcaption>" if chart.title else ""
    width = ""
    if least := chart.least_width:
        width = f' style="min-width: {least}px; max-width: {2 * least}px"'
    return (
        f'<figure class="{kind}">{title}<div class="plot"{width}>'
        f'<script type="application/json">{_inline(chart.plot)}</script></div></figure>'
    )


@cache
def _environment(folder: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, PAGE]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"inline": _inline, "figure": figure}
    return environment


@cache
def _plotly() -> str:
    """Returns Plotly as base64 of gzip, 2 MB, which the browser unpacks."""
    source = files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
    # Level 9, the default, takes twice as long and saves 1 %.
    return base64.b64encode(gzip.compress(source, compresslevel=5, mtime=0)).decode()


def _inline(value: Any) -> str:
    """Returns JSON for a script element: it cannot contain the tag that ends the element."""
    return to_json(value, inf_nan_mode="null").decode().replace("<", "\\u003c")


def plain_json(value: Any) -> bytes:
    """Returns JSON: dataclasses as mappings, arrays as lists, non-finite numbers as null."""
    return to_json(value, indent=1, inf_nan_mode="null", fallback=lambda array: array.tolist())


def png(picture: Image.Image) -> str:
    """Returns a picture as base64 of a PNG."""
    out = BytesIO()
    picture.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


@dataclass(frozen=True)
class PageLinks:
    """Addresses of views of the page of `heron serve` for the report's samples.

    Raises a RetrievalError if the address is not that of a web page.
    """

    address: str = ADDRESS

    def __post_init__(self) -> None:
        """Refuses what a browser would not open as a page."""
        try:
            scheme = urlsplit(self.address).scheme
        except ValueError:  # malformed, such as half of an IPv6 address
            scheme = ""
        if scheme not in ("http", "https"):
            raise RetrievalError(
                f"--page must be the address that `heron serve` prints, such as {ADDRESS}, got "
                f"'{self.address}'"
            )

    def sample(self, key: str, relation: str) -> str:
        """Returns the address that shows a sample with its `hard` or `false` negatives."""
        return self._with(key=key, relation=relation)

    def confused(self, anchor: str, neighbour: str) -> str:
        """Returns the address of a random sample with one label only, beside those with the other.

        If both labels are the same, it is shown beside others that have it.
        """
        if anchor == neighbour:
            return self._with(among=quoted(anchor), where=quoted(anchor))
        pair = quoted(anchor), quoted(neighbour)
        return self._with(
            among=f"{pair[0]} and not {pair[1]}", where=f"{pair[1]} and not {pair[0]}"
        )

    def _with(self, **query: str) -> str:
        return f"{self.address}{'&' if '?' in self.address else '?'}{urlencode(query)}"
