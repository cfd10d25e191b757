"""Pages in a headless browser."""

import html
import json
import re
import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="looking at pages needs Chromium (Debian's package chromium)"
)
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
SCHEMES = {"dark": "--blink-settings=preferredColorScheme=0", "light": "--blink-settings=preferredColorScheme=1"}

MEASURE = """<script>
const boxes = kind => [...document.querySelectorAll(kind)].map(one => one.getBoundingClientRect());
parent.document.body.dataset.measures = JSON.stringify({
  charts: boxes("svg.chart").map(box => [box.width, box.height, box.left, box.top]),
  cells: boxes("td, th").filter(box => box.width > 0).map(box => [box.left, box.right]),
  cut: [...document.querySelectorAll("td, th, li, p, dd, pre")].filter(
    one => one.scrollWidth > one.clientWidth + 1).length,
  ground: getComputedStyle(document.body).backgroundColor,
  page: document.documentElement.scrollWidth});
</script>"""


def browse(*arguments, timeout=90):
    """Start the browser, and return what it has printed."""
    return subprocess.run(
        [CHROMIUM, *OPTIONS, *arguments], capture_output=True, text=True, check=False, timeout=timeout
    )


class View:
    """A page in a frame as wide as a device: a headless window is never narrower than 500 pixels."""

    def __init__(self, page, folder, width, scheme="light", height=4000):
        (folder / "measured.html").write_text(page + MEASURE)
        frame, style = folder / "frame.html", f"height:{height}px;border:0;width:{width}px"
        frame.write_text(f'<body style="margin:0"><iframe src="measured.html" style="{style}"></iframe>')
        self._options = [f"--window-size=1200,{height}", "--allow-file-access-from-files", SCHEMES[scheme]]
        self._options += [f"--user-data-dir={folder / 'profile'}"]
        self._address, self._folder = frame.as_uri(), folder

    def measures(self):
        """Where charts and cells of tables are, the colour of the ground, and the width of the page."""
        dump = browse(*self._options, "--dump-dom", self._address)
        found = re.search(r'data-measures="([^"]*)"', dump.stdout)
        assert found, dump.stderr
        return json.loads(html.unescape(found[1]))

    def picture(self):
        """The path of a picture of the page."""
        path = self._folder / "picture.png"
        browse(*self._options, f"--screenshot={path}", self._address)
        return path
