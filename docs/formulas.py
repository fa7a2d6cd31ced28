"""Formulas of docstrings, as Sphinx writes them, become MathML, which browsers draw themselves."""

import re
import textwrap
from typing import Any

from griffe import Extension, Object
from latex2mathml.converter import convert

BLOCK = re.compile(r"^( *)\.\. math:: (.+(?:\n\1 +\S.*)*)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")


class Formulas(Extension):
    """Puts MathML into the docstring of every object that is loaded."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrites the docstring of a module, class or function, or of an attribute."""
        if obj.docstring is not None and ":" in obj.docstring.value:
            obj.docstring.value = with_mathml(obj.docstring.value)


def with_mathml(text: str) -> str:
    r"""Returns a docstring with MathML for `.. math::` blocks and :math:`x^2`."""
    text = BLOCK.sub(lambda m: textwrap.indent(_mathml(m[2], "block"), m[1]), text)
    return INLINE.sub(lambda m: _mathml(m[1], "inline"), text)


def _mathml(latex: str, display: str) -> str:
    """Returns a formula on one line, with nothing that Markdown reads as its own."""
    made = convert(" ".join(latex.split()), display=display)
    return made.replace("*", "&#42;").replace("_", "&#95;")
