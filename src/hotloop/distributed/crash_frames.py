"""Finds the place at which a rank aborted itself, in the frames that Python's faulthandler writes."""

from __future__ import annotations

import faulthandler
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotloop.errors import is_library_file

FILE = "frames.txt"
"""File with a rank's frames, beside the error file of torch's agent."""


@contextmanager
def recording_frames() -> Iterator[None]:
    """Within the context, a fatal signal writes the frames of all threads into the folder of torch's agent, if any."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        yield
        return
    was_enabled = faulthandler.is_enabled()
    with Path(error_file).with_name(FILE).open("w") as file:
        file.write(f"main thread: 0x{threading.main_thread().ident:016x}\n")
        file.flush()
        faulthandler.enable(file)
        try:
            yield
        finally:
            faulthandler.disable()
            if was_enabled:
                faulthandler.enable()


def read_frames(folder: Path, rank: int) -> str:
    """Returns the frames that a rank wrote last; empty if the rank wrote none.

    Args:
        folder: the log folder of torch's agent, in which rank r of each start has `*/attempt_*/r`.
    """
    files = sorted(folder.glob(f"*/attempt_*/{rank}/{FILE}"), key=lambda file: file.stat().st_mtime)
    text = files[-1].read_text(errors="replace") if files else ""
    return text if "Fatal Python error" in text else ""


def find_place(frames: str) -> str:
    """Returns the place of the main thread, such as `in all_reduce (task.py:33)`; empty outside the user's code."""
    main = re.match("main thread: (0x[0-9a-f]+)", frames)
    threads = re.split(r"^(?:Current thread|Thread) ", frames, flags=re.MULTILINE)
    main_text = next((text for text in threads if main and text.startswith(main[1])), "")
    places = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main_text, flags=re.MULTILINE)
    operation = next((function for path, _, function in places[:3] if "/torch/distributed/" in path), "")
    line = next((f"{Path(path).name}:{number}" for path, number, _ in places if is_user_code(path)), "")
    return f"in {operation or 'no collective operation'} ({line})" if line else ""


def is_user_code(path: str) -> bool:
    return path.endswith(".py") and not is_library_file(path)
