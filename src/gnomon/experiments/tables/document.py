"""A page of text, tables and pictures, as Markdown and as HTML in one file."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from pathlib import Path

from .. import page


@dataclass(frozen=True)
class Rows:
    """A table; a row whose first cell begins with "ours" stands out."""

    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        head = ["| " + " | ".join(self.header) + " |", "|---|" + "---:|" * (len(self.header) - 1)]
        return "\n".join(head + ["| " + " | ".join(_marked(row)) + " |" for row in self.rows])

    def html(self) -> str:
        return page.table(self.header, self.rows)


@dataclass(frozen=True)
class Picture:
    """An image file beside the page."""

    path: Path
    title: str

    def markdown(self) -> str:
        return f"![{self.title}]({self.path.name})"

    def html(self) -> str:
        return page.image(self.path)


@dataclass(frozen=True)
class Text:
    """A paragraph, in which `this` is code."""

    text: str

    def markdown(self) -> str:
        return self.text

    def html(self) -> str:
        return f"<p>{_inline(self.text)}</p>"


@dataclass(frozen=True)
class Points:
    """A list."""

    items: list[str]

    def markdown(self) -> str:
        return "\n".join(f"- {item}" for item in self.items)

    def html(self) -> str:
        return "<ul>" + "".join(f"<li>{_inline(item)}</li>\n" for item in self.items) + "</ul>"


Block = Rows | Picture | Text | Points


@dataclass
class Document:
    """Sections under headings, and small print."""

    title: str
    sections: list[tuple[str, list[Block]]] = field(default_factory=list)
    footer: str = ""

    def markdown(self) -> str:
        parts = [f"# {self.title}"]
        for heading, blocks in self.sections:
            parts += [f"## {heading}", *(block.markdown() for block in blocks)]
        return "\n\n".join([*parts, self.footer]) + "\n"

    def html(self) -> str:
        sections = [(heading, "\n".join(block.html() for block in blocks)) for heading, blocks in self.sections]
        return page.page(self.title, sections, self.footer)


def _marked(row: list[str]) -> list[str]:
    return [f"**{cell}**" if cell else cell for cell in row] if row[0].startswith("ours") else row


def _inline(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text, quote=False))
