"""Formulas of the documentation, ``$...$`` and ``$$...$$``, as MathML, which browsers draw without a script."""

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
"""What the Markdown extension ``pymdownx.arithmatex`` leaves: ``\\(...\\)`` in a line, ``\\[...\\]`` for a display."""
NORM = '<mo form="prefix" stretchy="false" lspace="0" rspace="0">&#x02016;</mo>'
"""The bars of a norm: as infix operators, which browsers take them for, they have space on both sides."""


def mathml(found: re.Match[str]) -> str:
    """A formula as MathML; a display scrolls inside its own box where the screen is narrower than it."""
    tag, body = found.groups()
    tex = html.unescape(body).strip()[2:-2].strip()
    drawn = convert(tex, display="block" if tag == "div" else "inline")
    drawn = drawn.replace("<mo>&#x02016;</mo>", NORM)
    return f'<{tag} class="formula">{drawn}</{tag}>'


def on_page_content(content: str, **_: object) -> str:
    """Called by mkdocs with the HTML of each page."""
    return FORMULA.sub(mathml, content)
