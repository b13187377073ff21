"""Takes the pictures of pages in docs/images from real runs: report, live page, comparison, study.

make screenshots

Needs Chromium. The pictures are PNG files below 200 kB.
"""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.support.processes.chromium_session import Page, browser_page

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 200_000

WIDTH, HEIGHT = 1200, 900

DIGITS = """
import time

import hotloop
from torch import nn, optim


def task(lr=0.1, hidden=32, wait_s=0.0):
    def wait(view):
        if view.event == "epoch":
            time.sleep(float(wait_s))

    wait.read_only = True
    return hotloop.Task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, int(hidden)), nn.ReLU(), nn.Linear(int(hidden), 10)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: optim.SGD(parameters, lr=float(lr), momentum=0.9),
        schedule=lambda optimizer: optim.lr_scheduler.CosineAnnealingLR(optimizer, 500),
        data=hotloop.data.digits(),
        batch_size=32,
        epochs=12,
        callbacks=[wait] if float(wait_s) else [],
    )
"""

STUDY_PAGE = ROOT / "docs" / "how-to" / "study.md"
"""The study's Task and command are those of this page."""


def hotloop(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "hotloop", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hotloop", *arguments]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def picture(page: Page, name: str, top: str = "") -> None:
    """Stores what a window shows, beginning at the element `top`, with 256 colours."""
    page.draw_all()
    page.value(f"document.querySelector({top!r}).scrollIntoView()" if top else "window.scrollTo(0, 0)")
    page.until("new Promise(done => setTimeout(() => done(true), 500))")
    content = base64.b64decode(page.command("Page.captureScreenshot", format="png")["data"])
    path = IMAGES / f"{name}.png"
    Image.open(io.BytesIO(content)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{path} has {size:,} bytes, expected at most {MOST_BYTES:,}")
    print(f"{path.relative_to(ROOT)} {size:,} bytes")


def picture_live_page(page: Page, folder: Path) -> None:
    training = start(folder, "train", "digits.py", "--run", "runs/live", "-p", "lr=0.02", "-p", "wait_s=1", "--watch")
    try:
        assert training.stderr is not None
        line = next(line for line in training.stderr if "live page" in line)
        page.open(line.split()[-1])
        page.until("parseInt(document.querySelector('#runs tr')?.cells[2].innerText) >= 6", timeout_s=300)
        picture(page, "live-page")
    finally:
        training.kill()
        training.communicate()


def main() -> None:
    with tempfile.TemporaryDirectory() as name, browser_page(Path(name) / "browser") as page:
        folder = Path(name)
        (folder / "digits.py").write_text(DIGITS)
        code = re.search(r'```python title="task.py"\n(.*?)```', STUDY_PAGE.read_text(encoding="utf-8"), re.S)
        assert code is not None
        (folder / "task.py").write_text(code[1])
        page.width(WIDTH, HEIGHT)
        page.colours("light")
        hotloop(folder, "train", "digits.py", "--run", "runs/first")
        hotloop(folder, "evaluate", "runs/first")
        hotloop(folder, "report", "runs/first")
        page.open((folder / "runs/first/report.html").as_uri())
        picture(page, "report-summary")
        picture(page, "report-evaluation", "#evaluation")
        hotloop(folder, "train", "digits.py", "--run", "runs/second", "-p", "lr=0.02")
        hotloop(folder, "compare", "runs/first", "runs/second", "--out", "comparison.html")
        page.open((folder / "comparison.html").as_uri())
        picture(page, "comparison")
        space = ("-p", "lr=1e-3..1:log", "-p", "width=4,8,16")
        hotloop(folder, "study", "task.py", *space, "--trials", "12", "--study", "studies/first")
        page.open((folder / "studies/first/study.html").as_uri())
        picture(page, "study", "#figures")
        page.colours("dark")
        picture_live_page(page, folder)


if __name__ == "__main__":
    main()
