"""A results page in one file."""

from __future__ import annotations

import base64
import html
from pathlib import Path

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; } tr.ours { font-weight: 600; }
img { max-width: 100%; } .small { color: #666; font-size: .85rem; }
"""


def table(header: list[str], rows: list[list[str]]) -> str:
    """Rows whose first cell begins with "ours" stand out."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = ""
    for row in rows:
        mark = ' class="ours"' if row[0].startswith("ours") else ""
        body += f"<tr{mark}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n"
    return f"<table>\n<tr>{head}</tr>\n{body}</table>"


def image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}">'


def page(title: str, sections: list[tuple[str, str]], footer: str) -> str:
    """A title, sections of ready HTML under headings, and small print; nothing is loaded from elsewhere."""
    body = "\n".join(f"<h2>{html.escape(heading)}</h2>\n{content}" for heading, content in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"<style>{STYLE}</style></head><body>\n<h1>{html.escape(title)}</h1>\n{body}\n"
        f'<p class="small">{html.escape(footer)}</p>\n</body></html>\n'
    )
