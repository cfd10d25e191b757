"""Documents of text, tables and pictures, as Markdown and as one HTML file."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from pathlib import Path

from . import page
from .tables import markdown_row


@dataclass(frozen=True)
class Rows:
    """A table. A row whose first cell begins with "ours" is bold."""

    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        rule = "|---|" + "---:|" * (len(self.header) - 1)
        return "\n".join([markdown_row(self.header), rule, *(markdown_row(_marked(row)) for row in self.rows)])

    def html(self) -> str:
        return page.table(self.header, self.rows)


@dataclass(frozen=True)
class Picture:
    """An image file in the folder of the page."""

    path: Path
    title: str

    def markdown(self) -> str:
        return f"![{self.title}]({self.path.name})"

    def html(self) -> str:
        return page.image(self.path)


@dataclass(frozen=True)
class Text:
    """A paragraph. Text between backticks is code."""

    text: str

    def markdown(self) -> str:
        return self.text

    def html(self) -> str:
        return f"<p>{_inline(self.text)}</p>"


@dataclass(frozen=True)
class Points:
    """A bulleted list."""

    items: list[str]

    def markdown(self) -> str:
        return "\n".join(f"- {item}" for item in self.items)

    def html(self) -> str:
        return "<ul>" + "".join(f"<li>{_inline(item)}</li>\n" for item in self.items) + "</ul>"


Block = Rows | Picture | Text | Points


@dataclass
class Document:
    """A title, sections under headings, and a footer."""

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
    """Make the cells of our own row bold."""
    return [f"**{cell}**" if cell else cell for cell in row] if row[0].startswith("ours") else row


def _inline(text: str) -> str:
    """Convert the text of a paragraph to HTML."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text, quote=False))
