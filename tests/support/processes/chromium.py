"""A real browser without a window: what a page looks like once its scripts have run."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here to draw pages with")

_OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1200,1000",
    "--enable-logging=stderr",
    "--virtual-time-budget=10000",
    "--proxy-server=127.0.0.1:9",
]


@dataclass(frozen=True)
class Drawn:
    """A page after its scripts ran.

    Attributes:
        html: the document as it then is.
        texts: what its SVG shows as text, in order.
        pictures: addresses of the images in its SVG.
        shapes: how often each class of SVG element occurs.
        errors: what the scripts complained of.
    """

    html: str
    texts: list[str]
    pictures: list[str]
    shapes: dict[str, int]
    errors: list[str]


def draw(page: Path, profile: Path, query: str = "") -> Drawn:
    """Opens a page, with a query such as `?q=word`, in a browser that has no network to use."""
    assert BROWSER is not None
    command = [BROWSER, *_OPTIONS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri() + query]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=180, check=True)
    reader = _Reader()
    reader.feed(done.stdout)
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Drawn(done.stdout, reader.texts, reader.pictures, reader.shapes, errors)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.pictures: list[str] = []
        self.shapes: dict[str, int] = {}
        self._inside: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "image":
            self.pictures.append(given.get("xlink:href") or given.get("href") or "")
        if tag == "text":
            self.texts.append("")
        for name in (given.get("class") or "").split():
            self.shapes[name] = self.shapes.get(name, 0) + 1
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "text" in self._inside and "script" not in self._inside:
            self.texts[-1] += data
