"""A page of results as one HTML file, for wide and narrow screens, with a light and a dark style."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from . import palette
from .tables import least_width

STYLE = (
    palette.variables()
    + """
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; max-width: 1100px;
  margin: 0 auto; padding: 2rem 1.25rem 3rem; color: var(--ink); background: var(--page); }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .6rem; } h2 { font-size: 1.3rem; margin: 2.6rem 0 .6rem; }
p, ul, dl { max-width: 46rem; margin: .7rem 0; } ul { padding-left: 1.2rem; } .lead { font-size: 1.08rem; }
.small { color: var(--soft); font-size: .85rem; }
a { color: var(--accent); } code, pre { font: .88em/1.6 ui-monospace, "DejaVu Sans Mono", monospace; }
code { overflow-wrap: anywhere; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem;
  overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .35rem .9rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { font-size: .85rem; color: var(--soft); font-weight: 600; vertical-align: bottom; }
th, td.words, td.pair { white-space: normal; } th.words, td.words { text-align: left; }
th:first-child, td:first-child { padding-left: .2rem; } tr.ours { font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: .5rem 2rem; }
.chart { display: block; width: 100%; height: auto; } .chart text { font-family: inherit !important; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; list-style: none; margin: 1.2rem 0 .4rem; padding: 0;
  max-width: none; font-size: .92rem; }
.legend svg { width: 26px; height: 6px; margin-right: .5rem; vertical-align: middle; }
.strip { display: flex; gap: .5rem clamp(.5rem, 2vw, 1.4rem); margin: 1.2rem 0; color: var(--ink); }
.cells { display: block; width: 100%; } .digits .cells { flex: 0 1 44px; min-width: 0; }
.patterns { gap: 2rem; } .patterns .cells { width: 112px; border: 1px solid var(--line); }
figure { margin: 0; } figcaption { color: var(--soft); font-size: .85rem; margin: .3rem 0; max-width: 46rem; }
.claim { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .4rem 1rem 1rem; }
.claim { max-width: 52rem; } .claim dt { font-weight: 600; margin-top: .7rem; } .claim dd { margin: .1rem 0 0; }
@media (max-width: 60rem) { table.wide thead { display: none; } table.wide, table.wide tbody { display: block; }
  table.wide tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  table.wide td { display: flex; justify-content: space-between; gap: 1rem; padding: .05rem 0; border: 0;
    white-space: normal; }
  table.wide td:not(:first-child)::before { content: attr(data-column); color: var(--soft); font-weight: 400;
    text-align: left; }
  table.wide td:first-child { font-weight: 600; } table.wide td:empty { display: none; }
  table.wide td.words:not(:first-child) { text-align: right; } }
@media (max-width: 40rem) { body { padding: 1.2rem 1rem 2rem; font-size: 15px; } h1 { font-size: 1.5rem; }
  table { font-size: .76rem; } th { font-size: .68rem; } th, td { padding: .35rem .18rem; }
  table.wide { font-size: .9rem; } pre { padding: .7rem; white-space: pre-wrap; } }
"""
)

NARROW = 52
"""The characters of a row that a narrow screen shows. Rows of wider tables stand there as lists."""


def table(header: list[str], rows: list[list[str]], ours: str = "ours") -> str:
    """Return an HTML table.

    Rows whose first cell begins with ``ours`` are bold. Columns that contain words are aligned to the left. On a narrow
    screen each row of a wide table is a list, so that no column is out of sight.
    """
    words = columns_of_words(header, rows)
    head = "".join(
        f"<th{_kind('words' * wordy)}>{html.escape(name)}</th>" for name, wordy in zip(header, words, strict=True)
    )
    body = "".join(_row(header, row, words, "ours" * row[0].startswith(ours)) for row in rows)
    widths = [least_width(name, cells, wordy) for name, wordy, *cells in zip(header, words, *rows, strict=True)]
    kind = _kind("wide" * (sum(widths) + len(widths) > NARROW))
    return f"<table{kind}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>"


def columns_of_words(header: list[str], rows: list[list[str]]) -> list[bool]:
    """Return for each column of a table whether it contains words."""
    return [any(row[i][:1].isalpha() for row in rows) for i in range(len(header))]


def _row(header: list[str], row: list[str], words: list[bool], kind: str) -> str:
    cells = "".join(
        f'<td{_kind("words" if wordy else "pair" * ("±" in cell))} data-column="{html.escape(name)}">{_cell(cell)}</td>'
        for name, cell, wordy in zip(header, row, words, strict=True)
    )
    return f"<tr{_kind(kind)}>{cells}</tr>\n"


def _cell(text: str) -> str:
    """Return the HTML of a cell. It may break before a sign, but not after it."""
    return html.escape(text).replace("± ", "±&nbsp;")


def _kind(name: str) -> str:
    """Return the class of an element, if it has one."""
    return f' class="{name}"' if name else ""


# ---------------------------------------------------------------------- pieces
def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph. Text between backticks is code."""
    return f"<p{_kind(kind)}>{inline(text)}</p>\n"


def points(items: Iterable[str]) -> str:
    """Return a bulleted list."""
    return "<ul>" + "".join(f"<li>{inline(item)}</li>\n" for item in items) + "</ul>\n"


def code(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def inline(text: str) -> str:
    """Convert the text of a paragraph to HTML."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text, quote=False))


def figure(content: str, caption: str) -> str:
    return f"<figure>{content}<figcaption>{inline(caption)}</figcaption></figure>\n"


def charts(drawings: Iterable[str]) -> str:
    """Return drawings beside each other. On a narrow screen they are below each other."""
    return f'<div class="charts">{"".join(drawings)}</div>\n'


def strip(pictures: Iterable[str], kind: str) -> str:
    return f'<div class="strip {kind}">{"".join(pictures)}</div>\n'


def page(title: str, sections: list[tuple[str, str]], footer: str, lead: str = "", reload: int | None = None) -> str:
    """Return the page: a title, sections of HTML under headings, and a footer. It loads nothing from elsewhere.

    With ``reload`` a browser reads the page again after so many seconds.
    """
    body = "\n".join(f"<h2>{html.escape(heading)}</h2>\n{content}" for heading, content in sections)
    opening = paragraph(lead, "lead") if lead else ""
    again = "" if reload is None else f'<meta http-equiv="refresh" content="{reload}">\n'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{again}'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style></head><body>\n"
        f"<h1>{html.escape(title)}</h1>\n{opening}{body}\n"
        f'<p class="small">{inline(footer)}</p>\n</body></html>\n'
    )
