"""Every error that hotloop raises on purpose, as one tree.

Catch `HotloopError` to catch them all. Each message is one line in three parts: what was given, what was
expected, what to do about it.

    HotloopError
    ├── TaskError             the Task, or the file that should hold it, can't be used
    ├── DataError             the data can't be used: unequal lengths, NaN, labels out of range, empty, not found
    ├── PlanError             an axis, a value or a combination that doesn't exist
    │   ├── DeviceError       the device isn't there, or tensors live on different devices
    │   ├── PartsDifferError  the parts of a later batch come to something else than the batch
    │   ├── InsufficientMemoryError  there isn't memory enough now for what a plan keeps there
    │   └── TimeOverError     a time limit is over before a plan is prepared, measured or proven
    ├── RunError              a folder that isn't a run, is one already, is in use, or can't be written
    │   ├── CheckpointError   a checkpoint that is torn, tampered with, or of another model
    │   └── DiskError         the disk is full, or files may not grow any more
    ├── TrainingError         training can't go on
    │   ├── NonFiniteError    a loss, output, gradient or parameter became NaN or infinite
    │   ├── MemoryExhausted   the device or the machine ran out of memory
    │   ├── RankLostError     another rank ended while this one waited for it
    │   └── OutOfStepError    ranks that should hold the same hold different numbers
    └── ExportError           the model can't be written in the form asked for
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, marks that reverse text direction, and surrogates of invalid UTF-8."""

_MAX_CHARACTERS = 160
"""Largest number of characters of a value in a message."""


def escape_control_characters(text: str) -> str:
    """Returns the text with escapes such as `\\x1b` in place of control characters."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `did you mean 'epochs'?` for a name that resembles a known name; empty for other names."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def shorten(value: object) -> str:
    """Returns a value's `repr`, or a path, shortened for a message."""
    text = repr(value) if not isinstance(value, os.PathLike) else os.fspath(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}... ({len(text):,} characters)"


_FRAME = re.compile(r'  File "(.+)", line (\d+), in ')

_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|Cannot allocate memory|DefaultCPUAllocator: not enough memory|std::bad_alloc"
    r"|_ALLOC_FAILED|Invalid buffer size",
    re.IGNORECASE,
)

_RETRYABLE = re.compile(
    "No space left on device|Disk quota exceeded|Killed|terminated abruptly"
    r"|fatal error: \S+ (No such file or directory|file not found)|cannot find -l|library not found for -l|cannot execute"
)
"""What compilers say of a full disk, of a process of theirs that was killed, or of parts of theirs that aren't installed."""

_DISK_FULL = re.compile("No space left on device|Disk quota exceeded")

_MIN_FREE_BYTES = 16e6
"""A disk with less room than this is full, as far as a compiler goes."""

_SIGKILL = 9

_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), str(Path(__file__).parent))


class HotloopError(Exception):
    """Base of all errors raised on purpose.

    Args:
        given: what was found, in plain words, without a full stop at the end.
        expected: what would have been right.
        fix: what the user can do now, beginning with a verb.

    Attributes:
        detail: lines to be shown above, such as the place in a file; mostly empty.
    """

    detail: str = ""

    def __init__(self, given: str, *, expected: str = "", fix: str = "") -> None:
        given, expected, fix = (
            escape_control_characters(given),
            escape_control_characters(expected),
            escape_control_characters(fix),
        )
        self.given, self.expected, self.fix = given, expected, fix
        parts = [given + (f"; expected {expected}" if expected else ""), fix[:1].upper() + fix[1:]]
        super().__init__(". ".join(" ".join(part.split()).rstrip(".") for part in parts if part))

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the one line."""
        return [f"{type(self).__name__}: {self}"]


class TaskError(HotloopError):
    """The Task, or the file that should hold it, can't be used."""


class DataError(HotloopError):
    """The data can't be used as given."""


class PlanError(HotloopError):
    """An axis, a value, or a combination of values that a Plan can't have."""


class PartsDifferError(PlanError):
    """The parts of a batch come to something else than the batch; training ends before its step, with the State saved."""


class DeviceError(PlanError):
    """A device that isn't there, or tensors on different devices in one operation."""


class InsufficientMemoryError(PlanError):
    """There isn't memory enough now for what a plan keeps in it; another time there may be."""


RoomError = InsufficientMemoryError
"""The former name."""


class TimeOverError(PlanError):
    """A time limit is over before a plan is prepared, measured or proven; with more time the plan may be."""


class RunError(HotloopError):
    """A folder that isn't a run, already is one, is in use, or can't be written."""


class CheckpointError(RunError):
    """A checkpoint that is torn, tampered with, or belongs to another model."""


class DiskError(RunError):
    """The disk is full, or a quota or file-size limit was reached."""


class TrainingError(HotloopError):
    """Training can't go on."""


class NonFiniteError(TrainingError):
    """A loss, output, gradient or parameter became NaN or infinite."""


class MemoryExhausted(TrainingError):
    """The device or the machine ran out of memory."""


class RankLostError(TrainingError):
    """Another rank ended while this one waited for it."""


class OutOfStepError(TrainingError):
    """Ranks that should hold the same parameters or buffers hold different ones."""


class ExportError(HotloopError):
    """The model can't be written in the form asked for."""


def type_name(value: object) -> str:
    """`None`, `an int`, `a Linear`: what a value is, for a message."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def describe_error(error: BaseException) -> str:
    """`ValueError: message (file.py:12)`: an error of the user's own code in one line, with the user's innermost line.

    A worker process sends its traceback as text; then the original error is what follows that text's last frame.
    """
    text = (error.given if isinstance(error, HotloopError) else str(error)).strip() or "no message"
    if text.startswith("Caught ") and "Traceback (" in text:
        summary, frames = _parse_traceback(text)
    else:
        summary = f"{type(error).__name__}: {text.splitlines()[0]}"
        frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(path, line) for path, line in frames if not is_library_file(path)]
    if (full := full_disk_path(error)) is not None and full not in summary:
        summary += f" [the disk of {full} is full]"
    return f"{summary} ({Path(own[-1][0]).name}:{own[-1][1]})" if own else summary


def call_user_code(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of the user's; its error becomes one line that shows it.

    Raises:
        TaskError: it raised something; running out of memory passes as it is, since that's not the function's fault.
    """
    try:
        return function(*arguments)
    except HotloopError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise TaskError(f"{what} raised {describe_error(error)}", fix="correct that line") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the machine or a device had no memory left: Python's error, torch's, or the words of an allocator."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch isn't imported here
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def full_disk_path(error: BaseException) -> str | None:
    """The path on a disk that an error says is full; None if none does.

    A compiler's error names no path: then it is where compilers write, or else the first of such folders whose disk
    is full.
    """
    full = [
        one
        for one in _error_chain(error)
        if (isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT)) or _DISK_FULL.search(str(one))
    ]
    if not full:
        return None
    named = next((str(one.filename) for one in full if isinstance(one, OSError) and one.filename), None)
    given = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    folders = [folder for folder in [*given, tempfile.gettempdir()] if folder and os.path.isdir(folder)]
    return named or next((one for one in folders if shutil.disk_usage(one).free < _MIN_FREE_BYTES), folders[0])


def dead_dataloader_worker(error: BaseException) -> DataError | None:
    """What to say if what it came from is that a process that loads data died, or found no shared memory for a batch."""
    if any(_NO_SHARED_MEMORY.search(str(one)) for one in _error_chain(error)):
        return DataError(
            "a worker process that loads the data found no room for a batch in shared memory (/dev/shm)",
            expected="room for several batches of each worker",
            fix="use --workers 0, or give more shared memory, of which docker gives 64 MB without --shm-size",
        )
    if not any(map(_is_worker_death, _error_chain(error))):
        return None
    return DataError(
        "a worker process that loads the data died",
        expected="workers that live until training ends",
        fix="see what happens with --workers 0; lack of memory is a common cause",
    )


_NO_SHARED_MEMORY = re.compile(r"unable to \w+ shared memory|<?/torch_\d+_\w+>?.*No space left|out of shared memory")
"""As torch's allocator of shared memory says it, and its DataLoader of a worker that the system killed by SIGBUS."""


@contextmanager
def translate_worker_death() -> Iterator[None]:
    """Says so whatever was under way: torch raises it from a signal's handler, wherever the program happens to be."""
    try:
        yield
    except (HotloopError, RuntimeError) as error:
        if (lost := dead_dataloader_worker(error)) is None:
            raise
        raise lost from error


def _is_worker_death(error: BaseException) -> bool:
    """Whether torch found one dead, or a batch broke off on its way from one, while its tensors were being fetched."""
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        return True
    broke = isinstance(error, ConnectionError | EOFError | FileNotFoundError)
    return broke and any(frame.name == "_try_get_data" for frame in traceback.extract_tb(error.__traceback__))


def error_summary(error: BaseException) -> tuple[str, bool]:
    """What to say of an error that doesn't end all, in one line; and whether all may do another time.

    So it may where memory or room on the disk was lacking, or a compiler was killed, as the system does where memory is short,
    or lacked parts of its own, such as headers.
    """
    text = error.given if isinstance(error, HotloopError) else describe_error(error)
    return text, any(map(_is_retryable, _error_chain(error)))


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """What it came from too; torch's compiler hides its own causes from tracebacks. One may be its own cause."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _is_retryable(error: BaseException) -> bool:
    if isinstance(error, MemoryExhausted | InsufficientMemoryError | DiskError | TimeOverError) or is_out_of_memory(
        error
    ):
        return True
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode == -_SIGKILL
    return _RETRYABLE.search(str(error)) is not None


def _parse_traceback(text: str) -> tuple[str, list[tuple[str, int]]]:
    """The last line that names an error, and the frames, of a traceback's text."""
    lines = text.splitlines()
    matches = [(number, _FRAME.match(line)) for number, line in enumerate(lines)]
    frames = [(number, match) for number, match in matches if match]
    after = [line for line in lines[frames[-1][0] + 1 :] if line[:1].strip()] if frames else lines[-1:]
    return (after or lines[-1:])[0], [(match[1], int(match[2])) for _, match in frames]


def is_library_file(path: str) -> bool:
    """Whether a file belongs to Python, to an installed package, or to hotloop."""
    return path.startswith(("<frozen", "<string>", "<eval_with_key>")) or any(part in path for part in _LIBRARIES)
