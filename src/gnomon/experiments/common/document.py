"""Documents of text, tables and drawings, as Markdown with files of drawings and as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import page
from .files import write_atomically
from .svg import Drawing, Line, legend
from .tables import markdown_row

RELOAD = 30
"""The seconds after which a browser reads the page of unfinished runs again."""


@dataclass(frozen=True)
class Rows:
    """A table. A row whose first cell begins with "ours" is bold."""

    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        rule = "|" + "".join("---|" if wordy else "---:|" for wordy in page.columns_of_words(self.header, self.rows))
        rows = (markdown_row(_marked(row)).replace("± ", "±\u00a0") for row in self.rows)  # cells break before the sign
        return "\n".join([markdown_row(self.header), rule, *rows])

    def html(self) -> str:
        return page.table(self.header, self.rows)


@dataclass(frozen=True)
class Drawings:
    """Drawings that belong together, each with the name of its file, and a caption."""

    drawings: Mapping[str, Drawing]
    caption: str
    lines: Sequence[Line] = ()
    """The lines that a legend names."""

    def markdown(self) -> str:
        images = [f"![{drawing.title}]({name}.svg)" for name, drawing in self.drawings.items()]
        return "\n\n".join(['<div class="charts" markdown>', *images, "</div>", f"*{self.caption}*"])

    def html(self) -> str:
        names = legend(self.lines) if self.lines else ""
        return page.figure(names + page.charts(one.inline() for one in self.drawings.values()), self.caption)


@dataclass(frozen=True)
class Text:
    """A paragraph. Text between backticks is code."""

    text: str

    def markdown(self) -> str:
        return self.text

    def html(self) -> str:
        return page.paragraph(self.text)


@dataclass(frozen=True)
class Points:
    """A bulleted list."""

    items: list[str]

    def markdown(self) -> str:
        return "\n".join(f"- {item}" for item in self.items)

    def html(self) -> str:
        return page.points(self.items)


@dataclass(frozen=True)
class Claim:
    """What the paper says, what is seen in the runs, and whether the two agree."""

    paper: str
    seen: list[str]
    verdict: str

    def markdown(self) -> str:
        seen = Points(self.seen).markdown()
        return f"**The paper**: {self.paper}\n\n**Here**:\n\n{seen}\n\n**Verdict**: {self.verdict}"

    def html(self) -> str:
        parts = {"The paper": page.inline(self.paper), "Here": page.points(self.seen)}
        parts["Verdict"] = page.inline(self.verdict)
        return '<dl class="claim">' + "".join(f"<dt>{k}</dt><dd>{v}</dd>\n" for k, v in parts.items()) + "</dl>\n"


Block = Rows | Drawings | Text | Points | Claim


@dataclass
class Document:
    """A title, a first paragraph, sections under headings, and a footer."""

    title: str
    lead: str
    sections: list[tuple[str, list[Block]]] = field(default_factory=list)
    footer: str = ""
    runs: tuple[int, int] | None = None
    """The number of finished runs and of all runs, as long as runs go on. None if all are finished."""

    def markdown(self) -> str:
        parts = [f"# {self.title}", self.lead]
        for heading, blocks in self.sections:
            parts += [f"## {heading}", *(block.markdown() for block in blocks)]
        return "\n\n".join([*parts, self.footer]) + "\n"

    def html(self) -> str:
        sections = [(heading, "\n".join(block.html() for block in blocks)) for heading, blocks in self.sections]
        if self.runs is None:
            return page.page(self.title, sections, self.footer, self.lead)
        finished = (
            f"{self.runs[0]} of {self.runs[1]} runs are finished. This page is written again while the others go on, "
            f"and your browser reads it every {RELOAD} seconds."
        )
        sections.insert(0, ("What is run", page.paragraph(self.lead)))
        return page.page(self.title, sections, self.footer, finished, reload=RELOAD)

    def write(self, folder: Path, name: str) -> Path:
        """Write ``index.html``, and of finished runs also ``NAME.md`` with its drawings. Return the page's path."""
        index = folder / "index.html"
        write_atomically(index, self.html())
        if self.runs is None:
            write_atomically(folder / f"{name}.md", self.markdown())
            for file, drawing in self._drawings().items():
                write_atomically(folder / f"{file}.svg", drawing.file())
        return index

    def _drawings(self) -> dict[str, Drawing]:
        blocks = [block for _, blocks in self.sections for block in blocks if isinstance(block, Drawings)]
        return {name: drawing for block in blocks for name, drawing in block.drawings.items()}


def _marked(row: list[str]) -> list[str]:
    """Make the cells of our own row bold."""
    return [f"**{cell}**" if cell else cell for cell in row] if row[0].startswith("ours") else row
