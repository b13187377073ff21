"""Records a real session as docs/images/session.svg: a training that Ctrl-C stops, its resume, and its evaluation.

make screenshots
"""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "session.svg"

COLUMNS = 120
LONGEST_OUTPUT = 14
"""Lines of one command that the picture shows; `[...]` replaces the others in the middle."""

FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.S)
"""Rich's fonts of an outside address; without them the picture has the reader's own monospaced font."""

SESSION = (
    ("train examples/fashion.py -p width=0.25 --epochs 3 --run runs/first", "epoch 1/3"),
    ("train --resume runs/first", ""),
    ("evaluate runs/first", ""),
)
"""Commands, and the beginning of the line after which the command gets Ctrl-C."""


def run(command: str, stop_after: str, folder: Path) -> Iterator[str]:
    """Yields the lines that a command prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hotloop", *command.split()],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    assert process.stdout is not None
    for line in process.stdout:
        yield line.rstrip("\n")
        if stop_after and line.startswith(stop_after):
            process.send_signal(signal.SIGINT)
            yield "^C"
            stop_after = ""
    process.wait()


def shorten(lines: list[str]) -> list[str]:
    """Returns the first and the last lines of a long output."""
    if len(lines) <= LONGEST_OUTPUT:
        return lines
    half = LONGEST_OUTPUT // 2
    return [*lines[:half], "[...]", *lines[-half:]]


def record(folder: Path) -> str:
    """Runs the session in a folder, and returns the picture as SVG."""
    (folder / "examples").symlink_to(ROOT / "examples")
    console = Console(record=True, width=COLUMNS, force_terminal=True, file=io.StringIO())
    for command, stop_after in SESSION:
        console.print(Text.assemble(("$ ", "bold green"), (f"hotloop {command}", "bold")))
        for line in shorten(list(run(command, stop_after, folder))):
            console.print(Text(line), soft_wrap=False)
        console.print()
    return FONT_FACE.sub("", console.export_svg(title="hotloop", unique_id="session"))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        picture = record(Path(folder))
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture, encoding="utf-8")
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
