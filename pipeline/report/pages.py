"""Pages whose charts Plotly draws, from disk: one file holds all of it, and fetches nothing."""

import base64
import gzip
import html
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from pydantic_core import to_json

from heron.pipeline.report.charts import Chart

PAGE = Path(__file__).parent / "page"


def render(template: str, **values: Any) -> str:
    """Returns a page by one of the templates in `page/`; `name` heads it.

    A template of its own extends base.html; that itself takes `body`, which is HTML. Plotly is in
    the page as base64 of gzip, 2 MB: a browser unpacks it, and the page fetches nothing.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["inline"] = _inline
    environment.filters["figure"] = figure
    plotly = files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
    return environment.get_template(template).render(
        css=(PAGE / "run.css").read_text(),
        script=(PAGE / "run.js").read_text(),
        plotly=base64.b64encode(gzip.compress(plotly, mtime=0)).decode(),
        **values,
    )


def figure(chart: Chart) -> str:
    """Returns the HTML of a chart below its title, if it has one; the page's script draws it."""
    title = f"<figcaption>{html.escape(chart.title)}</figcaption>" if chart.title else ""
    return (
        f'<figure class="chart">{title}<div class="plot">'
        f'<script type="application/json">{_inline(chart.plot)}</script></div></figure>'
    )


def _inline(value: Any) -> str:
    """Returns JSON that may stand in a script element: nothing in it ends the element."""
    return to_json(value, inf_nan_mode="null").decode().replace("<", "\\u003c")
