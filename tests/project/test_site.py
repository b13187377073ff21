"""The site builds strictly, and its pages need neither a network nor a file that is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.document_blocks import ROOT
from tests.support.processes.chromium import draw, needs_browser

DOCS = ROOT / "docs"
NAVIGATION = re.compile(r"^\s+- .*?:\s+(\S+\.md)$", re.M)

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
"""Attributes of HTML elements that a browser loads with the page."""


class Page(HTMLParser):
    """Collects what a page loads, where it links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attributes if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])


def outside_addresses(page: Page) -> Iterator[str]:
    """Yields the addresses on other hosts that a browser loads with the page."""
    yield from (address for address in page.loaded if urlsplit(address).netloc)


def missing_targets(path: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Yields loaded files and links whose file or anchor doesn't exist."""
    for address in pages[path].loaded + pages[path].links:
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        anchors = pages[target].anchors if target in pages else None
        if not target.is_file() or (anchors is not None and parts.fragment and unquote(parts.fragment) not in anchors):
            yield address


def test_the_navigation_has_each_page() -> None:
    named = {name for name in NAVIGATION.findall((ROOT / "mkdocs.yml").read_text()) if name != "CHANGELOG.md"}
    here = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(here ^ {name for name in named if not name.startswith("claims/")}) == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages of the built site by their paths."""
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs isn't installed: it belongs to the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html") if path.name != "404.html"}


def test_no_page_needs_an_outside_address(site: dict[Path, Page]) -> None:
    assert {str(path): found for path, page in site.items() if (found := list(outside_addresses(page)))} == {}


def test_each_link_has_its_file_and_its_anchor(site: dict[Path, Page]) -> None:
    assert len(site) > 30
    assert {str(path): found for path in site if (found := list(missing_targets(path, site)))} == {}


@needs_browser
def test_the_search_works_without_a_server(site: dict[Path, Page], tmp_path: Path) -> None:
    (start,) = (path for path in site if (path.parent / "search").is_dir() and path.name == "index.html")
    found = re.search(r'md-search-result__meta">\s*(\d+) matching', draw(start, tmp_path, "?q=checkpoint").html)
    assert found is not None and int(found[1]) > 3


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://unpkg.com/mermaid"></script>',
        '<link rel="stylesheet" href="//fonts.googleapis.com/css">',
        '<img src="http://example.org/badge.svg">',
    ],
)
def test_a_planted_outside_address_is_caught(text: str) -> None:
    assert list(outside_addresses(Page(text)))
    assert not list(outside_addresses(Page('<script src="assets/a.js"></script><a href="https://pytorch.org">x</a>')))


def test_a_planted_broken_link_is_caught(tmp_path: Path) -> None:
    path, other = tmp_path / "a.html", tmp_path / "b.html"
    path.touch()
    other.touch()
    text = '<a href="b.html#here">x</a> <a href="{}">x</a> <a href="https://pytorch.org">x</a>'
    for link, found in {"c.html": ["c.html"], "b.html#gone": ["b.html#gone"], "b.html": [], "#top": ["#top"]}.items():
        pages = {path: Page(text.format(link)), other: Page('<h2 id="here">x</h2>')}
        assert list(missing_targets(path, pages)) == found
