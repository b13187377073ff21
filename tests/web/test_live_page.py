"""The live page in a real browser, beside a real training."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.chromium import needs_browser
from tests.support.processes.chromium_session import CONTRAST, Page, browser_page
from tests.support.processes.forked_server import Process, Server
from tests.support.processes.live_pages import address_in, watching
from tests.support.stored_runs import write_run

pytestmark = needs_browser

HOSTILE = "<img src=x onerror=window.hacked=1>"

TASK = """
import time, torch, hotloop
x = torch.randn(40, 4)
def slow(view):
    if view.event == "epoch":
        time.sleep(0.2)
slow.read_only = True
task = hotloop.Task(name="live", model=lambda: torch.nn.Linear(4, 2), data=(x, (x[:, 0] > 0).long()),
    loss=torch.nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=10, epochs=5000, callbacks=[slow])
"""

ROWS = "[...document.querySelectorAll('#runs tr')]"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def trainings() -> Iterator[list[Process]]:
    """Processes that end with the test."""
    started: list[Process] = []
    yield started
    for training in started:
        training.kill()
        training.communicate()


def cell(run: str, column: int) -> str:
    return f"{ROWS}.find(r => r.dataset.run.endsWith('{run}'))?.cells[{column}].innerText"


def epochs(page: Page, run: str) -> int:
    return int(page.until(cell(run, 2)).split("/")[0])


def test_it_follows_trainings_through_reload_kill_resume_and_end(
    page: Page, server: Server, trainings: list[Process], tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "runs").mkdir()
    page.errors.clear()
    page.requests.clear()
    with watching(tmp_path, "runs") as watch:
        page.open(watch.address)
        page.until("document.getElementById('connection').textContent === 'no run yet'")
        first = server.start("train", "task.py", "--run", "runs/a", "--checkpoint-every", "20", cwd=tmp_path)
        trainings.append(first)
        page.until(f"{cell('a', 1)} === 'training'")
        before = epochs(page, "a")
        page.until(f"parseInt({cell('a', 2)}) > {before}")  # updates while training goes on
        page.value("location.reload()")
        page.until(f"parseInt({cell('a', 2)}) > {before + 1}")  # and after a reload
        trainings.append(server.start("train", "task.py", "--run", "runs/b", cwd=tmp_path))
        page.until(f"{cell('b', 1)} === 'training'")
        page.until("document.querySelector('[data-figure]')?.data?.length === 2")  # a curve for each run
        first.send_signal(signal.SIGKILL)
        page.until(f"{cell('a', 1)} === 'killed'")
        reached = epochs(page, "a")
        trainings.append(server.start("train", "--resume", "runs/a", cwd=tmp_path))
        page.until(f"{cell('a', 1)} === 'training' && parseInt({cell('a', 2)}) > {reached}")
        for training in trainings[1:]:
            training.send_signal(signal.SIGTERM)
        page.until(f"{cell('a', 1)} === 'stopped' && {cell('b', 1)} === 'stopped'")
        assert page.value(CONTRAST) == []
        page.value(f"{ROWS}[0].querySelector('a').click()")
        page.until("document.querySelector('h2')?.textContent === 'Summary'")  # the report of one run
        assert page.errors == [] and page.outside() == []
        code, said = watch.end(signal.SIGINT)
    assert code == 130, said


def test_the_page_of_a_training_updates_and_stays_after_the_end(
    page: Page, server: Server, trainings: list[Process], tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(TASK)
    with (tmp_path / "said").open("w") as said:
        training = server.start("train", "task.py", "--run", "run", "--watch", cwd=tmp_path, stderr=said)
    trainings.append(training)
    page.errors.clear()
    page.requests.clear()
    page.open(address_in(tmp_path / "said"))
    before = epochs(page, "run")
    began = time.monotonic()
    page.until(f"parseInt({cell('run', 2)}) > {before}")
    print(f"a new epoch was shown after {time.monotonic() - began:.2f} s")
    training.send_signal(signal.SIGTERM)
    training.wait(60)
    page.until(f"{cell('run', 1)} === 'stopped'")
    page.value("location.reload()")
    page.until(f"{cell('run', 1)} === 'stopped'")
    assert page.errors == [] and page.outside() == []


def test_hostile_names_stay_text(page: Page, tmp_path: Path) -> None:
    message = f"the loss is nan. {HOSTILE}<script>window.hacked=2</script>"
    events = [{"event": "start", "time": 1.0, "step": 0}, {"event": "failure", "time": 2.0, "message": message}]
    rows = [{"epoch": n, "step": n, f"train_{HOSTILE}": 0.5 / n, "train_loss": 1.0 / n} for n in (1, 2)]
    for name in (HOSTILE, "'\"><svg onload=window.hacked=3>"):
        write_run(tmp_path / "runs" / name, events=events, epochs=rows, name=HOSTILE)
    with watching(tmp_path, "runs") as watch:
        page.open(watch.address)
        page.until(f"{ROWS}.length === 2")
        page.draw_all()
        page.until("document.querySelectorAll('.main-svg').length >= 4")
        assert page.text().count(message) == 2 and f"runs/{HOSTILE}" in page.text()
        for number in (0, 1):
            page.value(f"{ROWS}[{number}].querySelector('a').click()")
            page.until("document.querySelector('h2')?.textContent === 'Summary'")
            page.draw_all()
            assert HOSTILE in page.value("document.querySelector('h1').textContent")
            assert page.value("window.hacked === undefined")
            page.open(watch.address)
            page.until(f"{ROWS}.length === 2")
        assert page.value("window.hacked === undefined")
        assert page.value('document.querySelectorAll(\'img[src="x"], image[href="x"], svg[onload]\').length') == 0


def test_an_address_without_its_token_shows_no_run(page: Page, tmp_path: Path) -> None:
    write_run(tmp_path / "runs/first")
    with watching(tmp_path, "runs") as watch:
        page.open(watch.address[:-1])
        assert "token" in page.text() and "first" not in page.text()
    page.errors.clear()
