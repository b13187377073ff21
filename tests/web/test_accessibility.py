"""The pages checked by axe-core in a real browser, in light and dark, on a wide screen and on a phone."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotloop.core.files.run_folder import StoredRun
from hotloop.report.live_server import LiveServer, listen, page_address
from hotloop.report.run_comparison import compare_runs, comparison_report
from hotloop.report.run_report import run_report
from hotloop.report.study import study_page
from tests.support.processes.chromium import needs_browser
from tests.support.processes.chromium_session import Page, browser_page
from tests.support.profiler.handmade_profiles import made
from tests.support.reported_run import example_study, reported_run, trained

AXE_PACKAGE = "axe_playwright_python"
"""Package that has axe-core's script; the package itself isn't imported, as the tests have a browser of their own."""

SEVERE = ("serious", "critical")

_RUN = """
axe.run(document, {resultTypes: ["violations"]}).then(found => found.violations.map(one => [
  one.impact, `${one.id}: ${one.help}: ${one.nodes.slice(0, 5).map(node => node.html.slice(0, 150)).join(" | ")}`]))
"""


def axe_script() -> Path | None:
    spec = importlib.util.find_spec(AXE_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    return next((path for path in (Path(folder) / "axe.min.js" for folder in folders) if path.is_file()), None)


pytestmark = [
    needs_browser,
    pytest.mark.skipif(axe_script() is None, reason="needs axe-core (the dev extra)"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def addresses(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Addresses of the pages: three files, and a live page of two runs."""
    folder = tmp_path_factory.mktemp("pages")
    reported_run(folder / "runs" / "first")
    trained(folder / "runs" / "second", epochs=2, batch_size=20)
    runs = [StoredRun.read(path) for path in sorted((folder / "runs").iterdir())]
    contents = {
        "report": run_report(runs[0], [made()]),
        "comparison": comparison_report(compare_runs(runs), runs),
        "study": study_page(*example_study()),
    }
    for name, content in contents.items():
        (folder / f"{name}.html").write_text(content, encoding="utf-8")
    listener = listen()
    server = LiveServer(listener, "secret", folder / "runs", idle_s=600.0)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    files = {name: (folder / f"{name}.html").as_uri() for name in contents}
    yield {**files, "live": page_address(listener, "secret")}


def violations(page: Page) -> list[Any]:
    script = axe_script()
    assert script is not None
    page.value(f"{script.read_text(encoding='utf-8')}\n;undefined")
    return page.value(_RUN)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["report", "comparison", "study", "live"])
def test_no_violation(page: Page, addresses: dict[str, str], name: str, scheme: str, width: int) -> None:
    page.width(width)
    page.colours(scheme)
    page.open(addresses[name])
    if name == "live":
        page.until("document.querySelectorAll('#runs tr').length === 2 && !!document.querySelector('.main-svg')")
    page.value("document.querySelectorAll('details').forEach(e => e.open = true)")
    page.draw_all()
    assert violations(page) == []
    assert page.value("document.documentElement.scrollWidth") <= width
    page.open("about:blank")


def test_a_severe_violation_is_found(page: Page, tmp_path: Path) -> None:
    body = "<html lang='en'><title>t</title><main><h1>t</h1><img src='data:,'><p style='color:#bbb'>pale</p></main>"
    (tmp_path / "bad.html").write_text(body)
    page.colours("light")
    page.open((tmp_path / "bad.html").as_uri())
    found = violations(page)
    assert {text.split(":")[0] for impact, text in found if impact in SEVERE} >= {"image-alt", "color-contrast"}
