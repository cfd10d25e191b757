"""Tables of the documentation that every screen can show.

A table that is wider than a phone becomes a list there: each row is an entry, and each cell has the title of its column
before it. A table that is wider than the page of a desktop has smaller letters. Names may break after underscores.
``assets/gnomon.css`` chooses the form by the width of the screen.
"""

import html
import re
from typing import NamedTuple

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
CELL = re.compile(r"<(t[hd])\b([^>]*)>(.*?)</\1>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
BOLD = re.compile(r"^\s*(?:<th\b|<td[^>]*>\s*<strong>)")
BREAKS = re.compile(r"\s+|(?<=[_-])")
"""Where a browser may break the text of a cell."""
UNDERSCORE = re.compile(r"_(?=\w)(?![^<]*>)")
"""An underscore inside a word, and not inside a tag."""


class Screen(NamedTuple):
    """Pixels that a screen has for a table, those of a character, and those beside the text of a cell."""

    room: float
    character: float
    padding: float


PHONE, DESKTOP = Screen(362.0, 6.9, 8.0), Screen(936.0, 7.6, 19.0)
BOLDER = 1.2
"""How much wider a bold character is."""
FORMULA = 1.8
"""How much wider a sign of a formula is than a character: it is larger, and operators have space around them."""


def plain(cell: str) -> str:
    """The text of a cell."""
    return html.unescape(TAG.sub("", cell)).strip()


def longest_part(cell: str) -> float:
    """The number of characters that a browser cannot break, weighted by their width."""
    length = max(map(len, BREAKS.split(plain(cell))))
    return length * (BOLDER if BOLD.match(cell) else 1) * (FORMULA if "<math" in cell else 1)


def is_wide(rows: list[list[str]], screen: Screen) -> bool:
    """Whether the screen would have to break words of the table, or to cut it."""
    columns = zip(*rows, strict=True)
    return sum(screen.character * max(map(longest_part, column)) + screen.padding for column in columns) > screen.room


def with_titles(row: str, titles: list[str]) -> str:
    """A row whose cells name their columns."""
    remaining = iter(titles)

    def named(cell: re.Match[str]) -> str:
        tag, attributes, content = cell.groups()
        title = html.escape(next(remaining), quote=True)
        label = f' data-title="{title}"' if title and tag == "td" else ""
        return f"<{tag}{attributes}{label}>{content}</{tag}>"

    return CELL.sub(named, row)


def table(found: re.Match[str]) -> str:
    """A table as it is, or one that can have other forms."""
    rows = [[cell[0] for cell in CELL.finditer(row)] for row in ROW.findall(found[0])]
    shown = CELL.sub(lambda cell: UNDERSCORE.sub("_<wbr>", cell[0]), found[0])
    if not is_wide(rows, PHONE):
        return shown
    titles = [plain(cell) for cell in rows[0]]
    listed = ROW.sub(lambda row: with_titles(row[0], titles), shown)
    form = "data-wide data-crowded" if is_wide(rows, DESKTOP) else "data-wide"
    return listed.replace("<table>", f"<table {form}>", 1)


def on_page_content(content: str, **_: object) -> str:
    """Called by mkdocs with the HTML of each page."""
    return TABLE.sub(table, content)
