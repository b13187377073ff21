"""A real browser without a window that stays open: live pages, reloads, sizes, colour schemes, requests.

The browser is driven by the DevTools protocol through a pipe, which needs no library.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.processes.chromium import BROWSER

_OPTIONS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update"
    " --disable-sync --disable-dev-shm-usage --disable-quic --remote-debugging-pipe --proxy-server=127.0.0.1:9"
    " --proxy-bypass-list=127.0.0.1"
)

CONTRAST = """
(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  function background(element) {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  }
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest("svg, script, style, .skip, .js-plotly-plot")) continue;
    const style = getComputedStyle(element), a = light(parse(style.color)), b = light(background(element));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    if (ratio < least) low.push(`${element.tagName} ${element.className} ${ratio.toFixed(2)}: ${element.textContent.slice(0, 40)}`);
  }
  return low;
})()
"""
"""Texts with a contrast below WCAG's level AA: 4.5, and 3 for large text."""


class Page:
    """An open page.

    Attributes:
        requests: addresses that were requested.
        errors: what scripts and the console reported.
    """

    def __init__(self, send: Any, receive: Any) -> None:
        self._send, self._receive = send, receive
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **arguments: Any) -> Any:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        self._send.flush()
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        content = bytearray()
        while (byte := self._receive.read(1)) != b"\0":
            assert byte, "the browser ended"
            content += byte
        message = json.loads(content)
        arguments = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(arguments["request"]["url"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(arguments["exceptionDetails"].get("exception", arguments)))
        if message.get("method") == "Log.entryAdded" and arguments["entry"]["level"] == "error":
            self.errors.append(arguments["entry"]["text"])
        return message

    def open(self, address: str) -> None:
        self.command("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        found = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, *, timeout_s: float = 60.0) -> Any:
        """Returns the expression's value once it is true."""
        deadline = time.monotonic() + timeout_s
        while not (found := self._value_or_none(expression)):
            assert time.monotonic() < deadline, f"{expression} stays {found!r}; the page: {self.text()[:2000]}"
            time.sleep(0.05)
        return found

    def _value_or_none(self, expression: str) -> Any:
        try:
            return self.value(expression)
        except AssertionError:  # while a page is being replaced
            return None

    def text(self) -> str:
        return str(self.value("document.body.innerText"))

    def colours(self, scheme: str) -> None:
        """Sets `dark` or `light`."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def width(self, pixels: int, height: int = 900) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=pixels, height=height, deviceScaleFactor=1, mobile=pixels < 600
        )

    def draw_all(self) -> None:
        """Scrolls through the page, since figures are drawn as they come into view."""
        self.value("document.querySelectorAll('[data-figure]').forEach(e => e.scrollIntoView())")
        self.until(
            "(() => { for (const e of document.querySelectorAll('[data-figure]')) if (!e.dataset.drawn)"
            " { e.scrollIntoView(); return false; } return true; })()"
        )

    def outside(self) -> list[str]:
        """Requests that left this machine."""
        return [
            one
            for one in self.requests
            if not one.startswith(("file:", "data:", "blob:", "about:", "http://127.0.0.1:"))
        ]


@contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    """Starts a browser and opens an empty page."""
    assert BROWSER is not None
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    script = f'exec "$0" {_OPTIONS} --user-data-dir="$1" about:blank 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["bash", "-c", script, BROWSER, str(profile)],
        pass_fds=[to_browser, from_browser],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        with os.fdopen(from_us, "wb") as send, os.fdopen(to_us, "rb") as receive:
            yield Page(send, receive)
    finally:
        process.terminate()
        process.wait(30)
