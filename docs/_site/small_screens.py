"""Tables of the documentation that every screen can show, and words that it must not break.

A table that is wider than a phone becomes a list there: each row is an entry, and each cell has the title of its column
before it. A table that is wider than the page of a desktop has smaller letters, and its names may break after
underscores. ``assets/gnomon.css`` chooses the form by the width of the screen.
"""

import html
import re
from typing import NamedTuple

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
CELL = re.compile(r"<(t[hd])\b([^>]*)>(.*?)</\1>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
BOLD = re.compile(r"^\s*(?:<th\b|<td[^>]*>\s*<strong>)")
UNDERSCORE = re.compile(r"_(?=\w)(?![^<]*>)")
"""An underscore inside a word, and not inside a tag."""
EXPONENT = re.compile(r"\b\d+(?:\.\d+)?e-\d+\b(?![^<]*>)")
"""A number that a browser would break after the hyphen."""
CODE = re.compile(r"<pre\b.*?</pre>|<code>(.*?)</code>", re.DOTALL)
"""A block of code, or code in a line, which is the group."""
PRE = re.compile(r"(<pre\b.*?</pre>)", re.DOTALL)
"""A block of code, which stays as it is."""
OPTION = re.compile(r"(?<![\w-])--\w[\w-]*")
"""An option of a command, which a browser would break after its first hyphens."""
WHOLE = r'<span class="whole">\g<0></span>'


class Screen(NamedTuple):
    """Pixels that a screen has for a table, those of a character, those beside the text of a cell, where it breaks."""

    room: float
    character: float
    padding: float
    breaks: str


PHONE, DESKTOP = Screen(362.0, 6.9, 8.0, r"\s+"), Screen(936.0, 7.6, 19.0, r"\s+|(?<=[_-])")
BOLDER = 1.2
"""How much wider a bold character is."""
FORMULA = 1.8
"""How much wider a sign of a formula is than a character: it is larger, and operators have space around them."""


def plain(cell: str) -> str:
    """The text of a cell."""
    return html.unescape(TAG.sub("", cell)).strip()


def longest_part(cell: str, breaks: str) -> float:
    """The number of characters that a browser cannot break, weighted by their width."""
    length = max(map(len, re.split(breaks, plain(cell))))
    return length * (BOLDER if BOLD.match(cell) else 1) * (FORMULA if "<math" in cell else 1)


def is_wide(rows: list[list[str]], screen: Screen) -> bool:
    """Whether the screen would have to break words of the table, or to cut it."""
    longest = [max(longest_part(cell, screen.breaks) for cell in column) for column in zip(*rows, strict=True)]
    return sum(screen.character * length + screen.padding for length in longest) > screen.room


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
    if not is_wide(rows, PHONE):
        return found[0]
    titles = [plain(cell) for cell in rows[0]]
    listed = ROW.sub(lambda row: with_titles(row[0], titles), found[0])
    if not is_wide(rows, DESKTOP):
        return listed.replace("<table>", "<table data-wide>", 1)
    return UNDERSCORE.sub("_<wbr>", listed).replace("<table>", "<table data-wide data-crowded>", 1)


def code(found: re.Match[str]) -> str:
    """Code in a line whose options do not break; a block of code as it is."""
    return f"<code>{OPTION.sub(WHOLE, found[1])}</code>" if found[1] else found[0]


def numbers(content: str) -> str:
    """A page whose numbers with exponents do not break, except in blocks of code."""
    return "".join(part if part.startswith("<pre") else EXPONENT.sub(WHOLE, part) for part in PRE.split(content))


def on_page_content(content: str, **_: object) -> str:
    """Called by mkdocs with the HTML of each page."""
    return numbers(CODE.sub(code, TABLE.sub(table, content)))
