"""The live page in a real browser, beside a real training."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.chromium import needs_browser
from tests.support.processes.chromium_session import CONTRAST, Page, browser_page

pytestmark = needs_browser

TASK = """
import time, torch, hotloop
x = torch.randn(40, 4)
def slow(view):
    if view.event == "epoch":
        time.sleep(0.2)
slow.read_only = True
task = hotloop.Task(name="live", model=lambda: torch.nn.Linear(4, 2), data=(x, (x[:, 0] > 0).long()),
    loss=torch.nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=10, epochs=500, callbacks=[slow])
"""

ROWS = "[...document.querySelectorAll('#runs tr')]"


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "hotloop", *map(str, arguments)]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser_page(tmp_path / "browser") as opened:
        yield opened


def cell(run: str, column: int) -> str:
    return f"{ROWS}.find(r => r.dataset.run.endsWith('{run}'))?.cells[{column}].innerText"


def epochs(page: Page, run: str) -> int:
    return int(page.until(cell(run, 2)).split("/")[0])


def start(folder: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("train", *arguments), cwd=folder, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )


@pytest.mark.more
def test_it_follows_trainings_through_reload_kill_resume_and_end(page: Page, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "runs").mkdir()
    watch = subprocess.Popen(command("watch", "runs"), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    trainings = []
    try:
        assert watch.stderr is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", watch.stderr.readline())
        assert address is not None
        page.open(address[0])
        page.until("document.getElementById('connection').textContent === 'no run yet'")
        trainings.append(start(tmp_path, "task.py", "--run", "runs/a"))
        page.until(f"{cell('a', 1)} === 'training'")
        before = epochs(page, "a")
        page.until(f"parseInt({cell('a', 2)}) > {before}", timeout_s=10)  # updates while training goes on
        page.value("location.reload()")
        page.until(f"parseInt({cell('a', 2)}) > {before + 1}", timeout_s=20)  # and after a reload
        trainings.append(start(tmp_path, "task.py", "--run", "runs/b"))
        page.until(f"{cell('b', 1)} === 'training'")
        page.until("document.querySelector('[data-figure]')?.data?.length === 2")  # a curve for each run
        trainings[0].send_signal(signal.SIGKILL)
        page.until(f"{cell('a', 1)} === 'killed'", timeout_s=20)
        reached = epochs(page, "a")
        trainings.append(start(tmp_path, "--resume", "runs/a"))
        page.until(f"{cell('a', 1)} === 'training' && parseInt({cell('a', 2)}) > {reached}")
        for training in trainings[1:]:
            training.send_signal(signal.SIGTERM)
        page.until(f"{cell('a', 1)} === 'stopped' && {cell('b', 1)} === 'stopped'")
        assert page.value(CONTRAST) == []
        assert page.errors == [] and page.outside() == []
        page.value(f"{ROWS}[0].querySelector('a').click()")
        page.until("document.querySelector('h2')?.textContent === 'Summary'")  # the report of one run
    finally:
        for training in trainings:
            training.kill()
            training.communicate()
        watch.send_signal(signal.SIGINT)
        _, said = watch.communicate(timeout=60)
    assert watch.returncode == 130, said


def test_the_page_of_a_training_updates_and_stays_after_the_end(page: Page, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    training = start(tmp_path, "task.py", "--run", "run", "--watch")
    try:
        assert training.stderr is not None
        line = next(line for line in training.stderr if "live page" in line)
        page.open(line.split()[-1])
        before = epochs(page, "run")
        began = time.monotonic()
        page.until(f"parseInt({cell('run', 2)}) > {before}", timeout_s=20)
        print(f"a new epoch was shown after {time.monotonic() - began:.2f} s")
        training.send_signal(signal.SIGINT)
        training.communicate(timeout=60)
        page.until(f"{cell('run', 1)} === 'stopped'")
        page.value("location.reload()")
        page.until(f"{cell('run', 1)} === 'stopped'")
        assert page.errors == [] and page.outside() == []
    finally:
        training.kill()
        training.communicate()
