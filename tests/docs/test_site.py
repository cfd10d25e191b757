"""The site of the documentation builds without a warning, and a browser shows its pages, wide and narrow, offline."""

import functools
import html
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from importlib.util import find_spec

import pytest

from support import browser
from support.browser import needs_browser
from support.repository import ROOT

NEEDED = ("mkdocs", "material", "mkdocstrings_handlers", "latex2mathml")
MISSING = [package for package in NEEDED if find_spec(package) is None]
WIDTHS = (400, 1280)
pytestmark = [
    pytest.mark.spawns,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install 'gnomon[docs]'"),
]

MEASURE = """<body style="margin:0">%s<script>
const brokenNumber = cell => {
  const page = cell.ownerDocument, range = page.createRange();
  const texts = page.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode())
    for (const number of text.data.matchAll(/\\d[\\d.,]+(?:e-\\d+)?/g)) {
      range.setStart(text, number.index);
      range.setEnd(text, number.index + number[0].length);
      if ([...range.getClientRects()].filter(line => line.width > 0).length > 1) return number[0];
    }
};
const measure = frame => {
  const page = frame.contentDocument, wide = [...page.querySelectorAll(".md-content table:not([class])")];
  const shown = [...page.querySelectorAll(".md-content math")].filter(m => m.getBoundingClientRect().width > 5);
  return {
    name: frame.dataset.name, width: frame.clientWidth, page: page.documentElement.scrollWidth,
    formulas: shown.length, tables: wide.filter(t => t.getBoundingClientRect().height > 20).length,
    scrolled: wide.map(t => t.closest(".md-typeset__scrollwrap")).filter(w => w.scrollWidth > w.clientWidth + 1).length,
    pictures: [...page.querySelectorAll(".md-content img")].map(i => [i.naturalWidth, i.clientWidth]),
    cut: wide.flatMap(t => [...t.querySelectorAll("td, th")]).filter(c => c.scrollWidth > c.clientWidth + 1).length,
    broken: wide.flatMap(t => [...t.querySelectorAll("td")]).map(brokenNumber).filter(n => n),
    highlighted: page.querySelectorAll(".highlight span.kn").length,
    requests: frame.contentWindow.performance.getEntriesByType("resource").map(r => r.name)};
};
onload = () => {
  const frames = [...document.querySelectorAll("iframe[data-name]")];
  document.body.dataset.measures = JSON.stringify(frames.map(measure));
};
</script>"""
SEARCH = """<iframe id="search" src="index.html"></iframe><img src="/found"><script>
const frame = document.getElementById("search");
frame.onload = () => {
  const page = frame.contentDocument, input = page.querySelector(".md-search__input");
  input.focus();
  input.value = "heisenberg";
  input.dispatchEvent(new Event("keyup", {bubbles: true}));
  setInterval(() => {
    const names = [...page.querySelectorAll(".md-search-result__item a")].map(a => a.pathname);
    if (names.length) { document.body.dataset.found = names.join(" "); fetch("/tell"); }
  }, 100);
};
</script>"""
"""Types a word into the search box of the first page. The picture holds the page open until something is found."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as ``make docs`` does."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files, and ``/found``, which answers when somebody has asked for ``/tell``."""

    told = threading.Event()

    def do_GET(self):
        if self.path not in ("/found", "/tell"):
            return super().do_GET()
        self.told.set() if self.path == "/tell" else self.told.wait(30)
        return self.send_error(404)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture(scope="module")
def address(site):
    """Where a server of this machine has the site."""
    handler = functools.partial(Handler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def browse(address, profile):
    """The page at an address as a browser has it in the end; no machine but this one has a name there."""
    options = [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    return browser.browse(*options, "--timeout=90000", "--dump-dom", address, timeout=150)


@pytest.fixture(scope="module")
def measures(site, address, tmp_path_factory):
    """What a browser shows of each page at each width, by (page, width).

    The pages are in frames as wide as the device: a headless window is never narrower than 500 pixels.
    """
    frames = "".join(
        f'<iframe src="{page}" data-name="{page}" style="border:0;height:900px;width:{width}px"></iframe>'
        for page in pages(site)
        for width in WIDTHS
    )
    (site / "measure.html").write_text(MEASURE % frames)
    dump = browse(f"{address}/measure.html", tmp_path_factory.mktemp("profile"))
    found = re.search(r'data-measures="([^"]*)"', dump.stdout)
    assert found, dump.stderr
    return {(each["name"], each["width"]): each for each in json.loads(html.unescape(found[1]))}


def pages(site):
    ours = {site / name for name in ("404.html", "measure.html", "search.html")}
    return sorted(str(page.relative_to(site)) for page in {*site.rglob("*.html")} - ours)


def test_pages_name_no_asset_of_another_machine(site):
    for name in pages(site):
        text = re.sub(r"<pre.*?</pre>", "", (site / name).read_text(), flags=re.DOTALL)
        assets = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"?([^\" >]+)", text)
        assets += re.findall(r"<link[^>]* rel=\"?(?:stylesheet|preconnect|icon)[^>]* href=\"?([^\" >]+)", text)
        assert assets
        assert not [asset for asset in assets if re.match(r"(?:https?:)?//", asset)], name


@needs_browser
def test_search_works(site, address, tmp_path):
    (site / "search.html").write_text(SEARCH)
    dump = browse(f"{address}/search.html", tmp_path)
    found = re.search(r'data-found="([^"]*)"', dump.stdout)
    assert found, dump.stderr
    assert "/which-structure.html" in found[1].split()


def test_search_knows_every_page(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert {entry["location"].partition("#")[0] for entry in index["docs"]} >= {*pages(site)}


def test_the_reference_has_each_entry_once():
    entries = re.findall(r"^::: (.+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert sorted(entries) == sorted(set(entries))


def test_the_reference_shows_no_raw_role_and_every_public_name(site):
    import inspect
    from importlib import import_module

    text = (site / "reference.html").read_text()
    assert not re.search(r":(?:class|func|meth|attr|mod|data|exc|obj):", text)
    entries = set(re.findall(r'id="(gnomon[^"]*)"', text))
    packages = (
        *("", ".optim", ".groups", ".riemannian", ".baselines", ".covariance", ".manifolds", ".mixture"),
        *(".problems", ".testing", ".vi"),
    )
    for package in ("gnomon" + name for name in packages):
        module = import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                places = {f"{package}.{name}", f"{thing.__module__}.{thing.__name__}", f"gnomon.{name}"}
                assert places & entries, f"docs/reference.md has no entry for {package}.{name}"


@needs_browser
def test_no_page_asks_another_machine_for_anything(measures, address):
    for measure in measures.values():
        assert not [name for name in measure["requests"] if not name.startswith(address)], measure["name"]


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows(measures, width):
    wide = {name: m["page"] for (name, at), m in measures.items() if at == width and m["page"] > width}
    assert not wide, f"pages wider than {width} pixels: {wide}"


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_tables_are_neither_cut_nor_scrolled_and_keep_numbers_in_one_line(measures, width):
    found = [measure for (_, at), measure in measures.items() if at == width]
    assert not {m["name"]: m["broken"] for m in found if m["broken"]}
    assert not [m["name"] for m in found if m["cut"] or m["scrolled"]]


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_formulas_tables_figures_and_code_are_there(measures, width):
    assert measures["geometry.html", width]["formulas"] >= 10
    assert measures["which-structure.html", width]["tables"] >= 1
    assert measures["groups.html", width]["tables"] >= 3
    assert measures["start.html", width]["highlighted"] >= 3
    assert len(measures["gallery.html", width]["pictures"]) >= 6
    for (name, at), measure in measures.items():
        for natural, shown in measure["pictures"]:
            assert natural > 0, f"a picture of {name} is missing"
            assert at != width or 100 < shown <= width
