"""Pages of the site that show files from outside its folder: nothing is written twice.

A line ``<!-- README: NAME -->`` of a page becomes the part of README.md between ``<!-- begin NAME -->`` and
``<!-- end NAME -->``. ``results/benchmarks.md`` is benchmarks/RESULTS.md, and links to that file lead to this page.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
RESULTS = "results/benchmarks.md"
PART = re.compile(r"^<!-- README: (\w+) -->$", re.MULTILINE)


def part_of_readme(found: re.Match[str]) -> str:
    """A part of README.md, with links as the start page has to write them."""
    text = (ROOT / "README.md").read_text()
    begin, end = f"<!-- begin {found[1]} -->\n", f"<!-- end {found[1]} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"README.md must have {begin.strip()} and {end} once each: a page of the site shows that part")
    part = text.partition(begin)[2].partition(end)[0]
    return part.replace("](benchmarks/RESULTS.md", f"]({RESULTS}").replace("](docs/", "](")


def on_files(files, config, **_: object):
    """Called by mkdocs with all files of the site."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text().replace("](../docs/", "](../")
    files.append(File.generated(config, RESULTS, content=results))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs with the Markdown of each page."""
    return PART.sub(part_of_readme, markdown).replace("](../benchmarks/RESULTS.md", f"]({RESULTS}")
