"""What reports and live pages cost: sizes, times to open, delays, and time taken from the training.

    OMP_NUM_THREADS=1 python -m bench.report_pages
    OMP_NUM_THREADS=1 python -m bench.report_pages --record

Five figures, with Chromium where it is installed:

report       bytes of the report of a run of 5,000 epochs, seconds to write the file, and seconds until the browser shows it
live         seconds between the end of an epoch and the page's new number, while a real training goes on
monitor      time of `fit` with the files for reports over the time without them, in interleaved pairs
accuracy     the same for the accuracy on training data alone
watch        time of the epochs of `hotloop train --watch` while the page is read, over the time while the page's process is stopped
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import scipy.stats
import torch
from torch import nn

import hotloop
from bench.claim import write_claim
from hotloop.core.files.run_folder import StoredRun
from hotloop.plan import BASELINE
from hotloop.report.run_report import run_report
from hotloop.training.monitor import RunMonitor
from tests.support.processes.chromium import BROWSER
from tests.support.processes.chromium_session import Page, browser_page

TASK = """
import os, time, torch, hotloop
SAMPLES, BATCH = {samples}, 128
x = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(0))
y = x[:, :10].argmax(1)
def note(view):
    if view.event == "epoch":
        time.sleep({pause_s})
        with open("ends", "a") as file:
            file.write(f"{{view.epoch}} {{time.time()}}\\n")
note.read_only = True
def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(),
        torch.nn.Linear(256, 10))
task = hotloop.Task(name="pages", model=model, loss=torch.nn.CrossEntropyLoss(), data=(x, y), validation=0.1,
    optimizer=lambda p: torch.optim.Adam(p, lr=1e-3), batch_size=BATCH, epochs={epochs}, callbacks=[note])
"""

CHANGES = """
window.changes = [];
new MutationObserver(() => {
  const shown = parseInt(document.querySelector('#runs tr')?.cells[2]?.innerText);
  if (shown && shown !== window.changes.at(-1)?.[0]) window.changes.push([shown, Date.now() / 1000]);
}).observe(document.getElementById('runs'), {childList: true});
"""

ADDRESS = re.compile(r"http://\S+/\?token=\S+")


def small_task(samples: int, epochs: int) -> hotloop.Task:
    x = torch.randn(samples, 64, generator=torch.Generator().manual_seed(0))
    return hotloop.Task(
        model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        data=(x, x[:, :10].argmax(1)),
        validation=0.1,
        batch_size=128,
        epochs=epochs,
    )


def long_run(folder: Path, epochs: int) -> StoredRun:
    """Returns a run whose real first epochs are repeated with random losses, in all its files."""
    run = StoredRun.read(hotloop.fit(small_task(4096, 2), run=folder, device="cpu", progress=False).path)
    draws, step = np.random.default_rng(0), run.epochs[-1]["step"] // 2
    noise = draws.random(epochs)
    rows = [run.epochs[-1] | {"epoch": n, "step": step * n, "train_loss": noise[n - 1]} for n in range(1, epochs + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    progress = [run.progress[-1] | {"step": step * n, "epoch": n, "batch": 0} for n in range(1, 2 * epochs)]
    (folder / "progress.jsonl").write_text("".join(json.dumps(row) + "\n" for row in progress))
    began = time.time()
    system = [run.system[-1] if run.system else {"cpu_percent": 50.0}] * epochs
    lines = (json.dumps(row | {"time": began + n}) + "\n" for n, row in enumerate(system))
    (folder / "system.jsonl").write_text("".join(lines))
    return StoredRun.read(folder)


def measure_report(page: Page | None, folder: Path, epochs: int, repetitions: int) -> dict[str, Any]:
    long_run(folder / "long", epochs)
    written_s, opened_s, path = [], [], folder / "long.html"
    for _ in range(repetitions):
        began = time.perf_counter()
        path.write_text(run_report(StoredRun.read(folder / "long")), encoding="utf-8")
        written_s.append(time.perf_counter() - began)
        if page is not None:
            page.open("about:blank")
            began = time.perf_counter()
            page.open(path.as_uri())
            page.until("document.querySelector('.main-svg')")
            opened_s.append(time.perf_counter() - began)
    return {
        "epochs": epochs,
        "bytes": path.stat().st_size,
        "write_s": _rounded(written_s),
        "open_s": _rounded(opened_s),
    }


@contextlib.contextmanager
def training(folder: Path, *arguments: str, epochs: int, samples: int, pause_s: float) -> Iterator[tuple[Any, str]]:
    """Starts `hotloop train`; yields the process, and the address of its page or an empty text."""
    folder.mkdir()
    (folder / "task.py").write_text(TASK.format(samples=samples, epochs=epochs, pause_s=pause_s))
    command = [sys.executable, "-m", "hotloop", "train", "task.py", "--run", "run", "--plan", "baseline", *arguments]
    environment = os.environ | {"HOTLOOP_WATCH_IDLE": "1s"}
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=folder, stderr=said, stdin=subprocess.DEVNULL, env=environment)
    try:
        found = None
        while "--watch" in arguments and found is None and process.poll() is None:
            time.sleep(0.1)
            found = ADDRESS.search((folder / "said").read_text())
        yield process, found[0] if found else ""
    finally:
        process.kill()
        process.wait()


def measure_live(page: Page | None, folder: Path, epochs: int) -> dict[str, Any]:
    if page is None:
        return {}
    with training(folder / "live", "--watch", epochs=100_000, samples=1280, pause_s=0.7) as (process, address):
        page.open(address)
        page.until("document.querySelectorAll('#runs tr').length")
        page.value(CHANGES)
        page.until(f"window.changes.length > {epochs}", timeout_s=60 + 3 * epochs)
        changes = page.value("window.changes")[1:]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    ends = dict(map(float, line.split()) for line in (folder / "live/ends").read_text().splitlines())
    delays = sorted(
        shown - ends[epoch - 1] for epoch, shown in changes if epoch - 1 in ends
    )  # the running epoch is shown
    return {"n_epochs": len(delays), "median_s": round(statistics.median(delays), 3), "largest_s": round(delays[-1], 3)}


def measure_in_process(folder: Path, pairs: int, epochs: int, patched: str) -> dict[str, Any]:
    """Returns the ratio of times of `fit` with and without one part of the monitor."""
    task = small_task(32_768, epochs)

    def fit_s(name: str) -> float:
        began = time.perf_counter()
        hotloop.fit(task, run=folder / name, plan="baseline", device="cpu", progress=False)
        return time.perf_counter() - began

    def without_s(name: str) -> float:
        with patch.object(RunMonitor, patched, lambda self, view: {}):
            return fit_s(name)

    found = []
    for number in range(pairs + 1):  # the first pair warms up
        order = (fit_s, without_s) if number % 2 else (without_s, fit_s)
        times = {one: one(f"{patched}-{number}-{place}") for place, one in enumerate(order)}
        found.append((times[fit_s], times[without_s]))
    return _ratio(found[1:])


def measure_watch(folder: Path, blocks: int, block_s: float) -> dict[str, Any]:
    """Returns the ratio of times of epochs while the page's process works, over those while the process is stopped.

    One training alternates between blocks with the page, which is read, and blocks in which SIGSTOP stops the page's process.
    """
    changes: list[float] = []
    with training(folder / "watch", "--watch", epochs=100_000, samples=8192, pause_s=0.0) as (process, address):
        threading.Thread(target=_read_events, args=(address,), daemon=True).start()
        time.sleep(block_s)
        page = psutil.Process(process.pid).children()[0]
        began_cpu_s = sum(page.cpu_times()[:2])
        for number in range(2 * blocks):
            (page.suspend if number % 2 else page.resume)()
            changes.append(time.time())
            time.sleep(block_s)
        page.resume()
        changes.append(time.time())
        page_cpu_s = sum(page.cpu_times()[:2]) - began_cpu_s
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    ends = [float(line.split()[1]) for line in (folder / "watch/ends").read_text().splitlines()]
    epochs = [
        [end - start for start, end in itertools.pairwise(ends) if began < start and end < ended]
        for began, ended in itertools.pairwise(changes)
    ]
    means = [statistics.mean(seconds) for seconds in epochs]
    share = page_cpu_s / (blocks * block_s)
    return _ratio(list(zip(means[::2], means[1::2], strict=True))) | {
        "page_cpu_share": round(share, 4),
        "block_s": block_s,
    }


def _read_events(address: str) -> None:
    with contextlib.suppress(OSError), urllib.request.urlopen(address.replace("/?", "/events?")) as answer:
        while answer.readline():
            pass


def _ratio(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = [one / other for one, other in pairs]
    figures = {"n_pairs": len(pairs), "ratio": round(statistics.median(ratios), 4), "ratios": _rounded(ratios)}
    if len(ratios) > 1:
        interval = scipy.stats.bootstrap((np.array(ratios),), np.median, rng=0, method="percentile").confidence_interval
        figures["interval_95"] = [round(float(interval.low), 4), round(float(interval.high), 4)]
    return figures | {"seconds": [_rounded(list(pair)) for pair in pairs]}


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5000, help="epochs of the long run")
    parser.add_argument("--repetitions", type=int, default=10, help="of writing and opening the report")
    parser.add_argument("--live-epochs", type=int, default=60, help="epochs whose delay is measured")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--pair-epochs", type=int, default=10, help="epochs of each training of a pair")
    parser.add_argument(
        "--blocks", type=int, default=60, help="of a training with a page, and as many with the page stopped"
    )
    parser.add_argument("--block-s", type=float, default=2.0)
    parser.add_argument("--record", action="store_true", help="write a claim")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        page = stack.enter_context(browser_page(folder / "browser")) if BROWSER else None
        figures: dict[str, Any] = {"report": measure_report(page, folder, options.epochs, options.repetitions)}
        figures["live"] = measure_live(page, folder, options.live_epochs)
        if page is not None:
            page.open("about:blank")
        for name, patched in (("monitor", "__call__"), ("accuracy", "_measure_epoch")):
            figures[name] = measure_in_process(folder, options.pairs, options.pair_epochs, patched)
        figures["watch"] = measure_watch(folder, options.blocks, options.block_s)
    figures["load_average"] = [round(load, 2) for load in os.getloadavg()]
    print(json.dumps(figures, indent=2))
    if options.record:
        command = f"OMP_NUM_THREADS=1 python -m bench.report_pages {' '.join(sys.argv[1:])}"
        print(write_claim("report-pages", command, BASELINE, figures), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
