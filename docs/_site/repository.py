"""Pages of the site that show files from outside its folder: nothing is written twice.

A line ``<!-- README: NAME -->`` of a page becomes the part of README.md between ``<!-- begin NAME -->`` and
``<!-- end NAME -->``. The picture of the quality suite becomes the drawings of its page there, which stack on small
screens. ``results/benchmarks.md`` is benchmarks/RESULTS.md, and links to that file lead to this page.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
RESULTS = "results/benchmarks.md"
PART = re.compile(r"^<!-- README: (\w+) -->$", re.MULTILINE)
PICTURE = re.compile(r"^!\[[^]]*\]\(results/quality\.png\)$", re.MULTILINE)
DRAWINGS = re.compile(r'<div class="charts" markdown>.*?</div>', re.DOTALL)


def part_of_readme(found: re.Match[str]) -> str:
    """A part of README.md, with links as the start page has to write them."""
    text = (ROOT / "README.md").read_text()
    begin, end = f"<!-- begin {found[1]} -->\n", f"<!-- end {found[1]} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"README.md must have {begin.strip()} and {end} once each: a page of the site shows that part")
    part = text.partition(begin)[2].partition(end)[0]
    part = part.replace("](benchmarks/RESULTS.md", f"]({RESULTS}").replace("](docs/", "](")
    return PICTURE.sub(lambda _: drawings_of_quality(), part)


def drawings_of_quality() -> str:
    """The drawings at the top of the page of the quality suite, with links as the start page has to write them."""
    found = DRAWINGS.search((ROOT / "docs" / "results" / "quality.md").read_text())
    if found is None:
        raise ValueError("docs/results/quality.md has no drawings for the start page")
    return found[0].replace("](", "](results/")


def on_files(files, config, **_: object):
    """Called by mkdocs with all files of the site."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text().replace("](../docs/", "](../")
    files.append(File.generated(config, RESULTS, content=results))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs with the Markdown of each page."""
    return PART.sub(part_of_readme, markdown).replace("](../benchmarks/RESULTS.md", f"]({RESULTS}")
