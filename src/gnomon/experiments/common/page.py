"""A page of results as one HTML file, for wide and narrow screens, with a light and a dark style."""

from __future__ import annotations

import base64
import html
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; --ink: #1f2733; --soft: #5d6878; --line: #dfe4ea; --page: #fff; --panel: #f6f8fa;
  --accent: #1f6feb; }
@media (prefers-color-scheme: dark) { :root { --ink: #dbe2ea; --soft: #97a3b3; --line: #323b47; --page: #12161c;
  --panel: #1a2028; --accent: #6aa8ff; } }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; max-width: 1100px;
  margin: 0 auto; padding: 2rem 1.25rem 3rem; color: var(--ink); background: var(--page); }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .6rem; } h2 { font-size: 1.3rem; margin: 2.6rem 0 .6rem; }
p { max-width: 46rem; margin: .7rem 0; } .lead { font-size: 1.08rem; } .small { color: var(--soft); font-size: .85rem; }
a { color: var(--accent); } code, pre { font: .88em/1.6 ui-monospace, "DejaVu Sans Mono", monospace; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem;
  overflow-x: auto; }
.scroll { overflow-x: auto; margin: 1rem 0; } table { border-collapse: collapse; }
th, td { padding: .35rem .9rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { font-size: .85rem; color: var(--soft); font-weight: 600; vertical-align: bottom; } .words { text-align: left; }
th:first-child, td:first-child { padding-left: .2rem; } tr.ours { font-weight: 600; }
img { max-width: 100%; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: .5rem 2rem; }
.chart { display: block; width: 100%; height: auto; } .chart text { font-family: inherit !important; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; list-style: none; margin: 1.2rem 0 .4rem; padding: 0;
  font-size: .92rem; } .legend svg { width: 26px; height: 6px; margin-right: .5rem; vertical-align: middle; }
.strip { display: flex; gap: .5rem clamp(.5rem, 2vw, 1.4rem); margin: 1.2rem 0; color: var(--ink); }
.cells { display: block; width: 100%; } .digits .cells { flex: 0 1 44px; min-width: 0; }
.patterns { gap: 2rem; } .patterns .cells { width: 112px; border: 1px solid var(--line); }
figure { margin: 0; } figcaption { color: var(--soft); font-size: .85rem; margin-top: .3rem; }
@media (max-width: 40rem) { body { padding: 1.2rem 1rem 2rem; font-size: 15px; } h1 { font-size: 1.5rem; }
  table { font-size: .76rem; } th { white-space: normal; font-size: .68rem; } th, td { padding: .35rem .18rem; }
  pre { padding: .7rem; } }
"""


def table(header: list[str], rows: list[list[str]], ours: str = "ours") -> str:
    """Return an HTML table.

    Rows whose first cell begins with ``ours`` are bold. Columns that contain words are aligned to the left.
    """
    words = [any(row[i][:1].isalpha() for row in rows) for i in range(len(header))]
    marks = [' class="words"' if wordy else "" for wordy in words]

    def cells(kind: str, row: list[str]) -> str:
        pairs = zip(row, marks, strict=True)
        return "".join(f"<{kind}{mark}>{html.escape(cell)}</{kind}>" for cell, mark in pairs)

    body = ""
    for row in rows:
        mark = ' class="ours"' if row[0].startswith(ours) else ""
        body += f"<tr{mark}>{cells('td', row)}</tr>\n"
    return f'<div class="scroll"><table>\n<tr>{cells("th", header)}</tr>\n{body}</table></div>'


def image(path: Path) -> str:
    """Return an HTML image that contains the PNG file."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}">'


def page(title: str, sections: list[tuple[str, str]], footer: str, lead: str = "") -> str:
    """Return the page: a title, sections of HTML under headings, and a footer. It loads nothing from elsewhere."""
    body = "\n".join(f"<h2>{html.escape(heading)}</h2>\n{content}" for heading, content in sections)
    opening = f'<p class="lead">{html.escape(lead)}</p>\n' if lead else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style></head><body>\n"
        f"<h1>{html.escape(title)}</h1>\n{opening}{body}\n"
        f'<p class="small">{html.escape(footer)}</p>\n</body></html>\n'
    )
