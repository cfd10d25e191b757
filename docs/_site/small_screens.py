"""Tables of the documentation that a narrow screen can show.

A table that is wider than a phone becomes a list: each row is an entry, and each cell has the title of its column
before it. ``assets/gnomon.css`` chooses the form by the width of the screen.
"""

import html
import re

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
CELL = re.compile(r"<(t[hd])\b([^>]*)>(.*?)</\1>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")

ROOM, CHARACTER, PADDING = 362.0, 6.9, 8.0
"""Pixels of a phone's screen for a table, of a character, and beside the text of a cell."""
FORMULA = 1.8
"""How much wider a sign of a formula is than a character: it is larger, and operators have space around them."""


def plain(cell: str) -> str:
    """The text of a cell."""
    return html.unescape(TAG.sub("", cell)).strip()


def longest_word(cell: str) -> float:
    length = max((len(word) for word in plain(cell).split()), default=0)
    return length * FORMULA if "<math" in cell else length


def is_wide(rows: list[list[str]]) -> bool:
    """Whether a phone would have to break words of the table, or to cut it."""
    columns = zip(*rows, strict=True)
    return sum(CHARACTER * max(map(longest_word, column)) + PADDING for column in columns) > ROOM


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
    """A table as it is, or one that can become a list."""
    rows = [[cell[3] for cell in CELL.finditer(row)] for row in ROW.findall(found[0])]
    if not is_wide(rows):
        return found[0]
    titles = [plain(cell) for cell in rows[0]]
    listed = ROW.sub(lambda row: with_titles(row[0], titles), found[0])
    return listed.replace("<table>", "<table data-wide>", 1)


def on_page_content(content: str, **_: object) -> str:
    """Called by mkdocs with the HTML of each page."""
    return TABLE.sub(table, content)
