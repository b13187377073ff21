"""The errors that hotloop raises on purpose. Each message is one line: what was given, what was expected, what to do.

HotloopError
├── TaskError             the Task, or its file, can't be used
├── DataError             the data can't be used: unequal lengths, NaN, labels out of range, empty, not found
├── PlanError             an axis, a value or a combination that doesn't exist
│   ├── DeviceError       the device is missing, or tensors are on different devices
│   ├── PartsDifferError  the parts of a later batch have another result than the batch
│   ├── InsufficientMemoryError  a plan needs more memory than is free now
│   └── TimeOverError     a time limit ended the preparation, measurement or proof of a plan
├── RunError              a folder is no run, is a run already, is in use, or can't be written
│   ├── CheckpointError   a checkpoint is damaged, changed, or of another model
│   └── DiskError         the disk is full, or a file-size limit is reached
├── TrainingError         training can't continue
│   ├── NonFiniteError    a loss, output, gradient or parameter became NaN or infinite
│   ├── MemoryExhausted   the device or the machine ran out of memory
│   ├── RankLostError     another rank ended while this rank waited for it
│   └── OutOfStepError    ranks have different numbers where they should have the same
├── StudyError            the space, the settings or the folder of a study can't be used
└── ExportError           the model can't be written in the requested format
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
"""Control characters except tab and newline, marks of text direction, and surrogates of invalid UTF-8."""

_MAX_CHARACTERS = 160
"""Largest length of a value in a message."""


def escape_control_characters(text: str) -> str:
    """Returns the text with escapes such as `\\x1b` in place of control characters."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `did you mean 'epochs'?` for a name that resembles a known name; empty for other names."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


REMOVED = {
    "hotloop study --pack": "use --jobs 2 to train trials at the same time",
    "engine": "leave engine out: PyTorch computes each step, and hotloop.arrays.Network trains array layers by itself",
    "rewrites=conv_as_gemm": "use rewrites=all, or leave the axis out",
    "rewrites=pool_first": "use rewrites=all, or leave the axis out",
    "outer": "leave it out: ranks of parallel=local continue from their average",
    "correction": "leave it out: parallel=async divides the step size by the updates in between",
    "pipeline=interleaved": "use pipeline=1f1b",
    "plan=arrays": "use baseline: PyTorch computes each step, and hotloop.arrays.Network trains array layers by itself",
}
"""What to use in place of what was removed: an option, an axis, a value such as `rewrites=pool_first`, a plan by name."""


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
"""Compilers' messages about a full disk, a killed process, or missing parts of the compiler."""

_DISK_FULL = re.compile("No space left on device|Disk quota exceeded")

_MIN_FREE_BYTES = 16e6
"""Free bytes below which a disk counts as full for a compiler."""

_SIGKILL = 9

_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), str(Path(__file__).parent))


class HotloopError(Exception):
    """Base of all errors raised on purpose.

    Args:
        given: what was found, without a full stop.
        expected: what would be correct.
        fix: an instruction, beginning with a verb.

    Attributes:
        detail: lines to print above the message, such as a place in a file; usually empty.
    """

    detail: str = ""

    def __init__(self, given: str, *, expected: str = "", fix: str = "") -> None:
        given, expected, fix = map(escape_control_characters, (given, expected, fix))
        self.given, self.expected, self.fix = given, expected, fix
        parts = [given + (f"; expected {expected}" if expected else ""), fix[:1].upper() + fix[1:]]
        super().__init__(". ".join(" ".join(part.split()).rstrip(".") for part in parts if part))

    def _render_traceback_(self) -> list[str]:
        """What a notebook prints in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class TaskError(HotloopError):
    """The Task, or its file, can't be used."""


class DataError(HotloopError):
    """The data can't be used."""


class PlanError(HotloopError):
    """An axis, a value, or a combination of values that a Plan can't have."""


class PartsDifferError(PlanError):
    """The parts of a batch have another result than the batch; training ends before the step, with the State saved."""


class DeviceError(PlanError):
    """The device is missing, or an operation has tensors on different devices."""


class InsufficientMemoryError(PlanError):
    """A plan needs more memory than is free now."""


class TimeOverError(PlanError):
    """A time limit ended the preparation, measurement or proof of a plan."""


class RunError(HotloopError):
    """A folder is no run, is a run already, is in use, or can't be written."""


class CheckpointError(RunError):
    """A checkpoint is damaged, changed, or belongs to another model."""


class DiskError(RunError):
    """The disk is full, or a quota or file-size limit is reached."""


class TrainingError(HotloopError):
    """Training can't continue."""


class NonFiniteError(TrainingError):
    """A loss, output, gradient or parameter became NaN or infinite."""


class MemoryExhausted(TrainingError):
    """The device or the machine ran out of memory."""


class RankLostError(TrainingError):
    """Another rank ended while this rank waited for it."""


class OutOfStepError(TrainingError):
    """Ranks have different parameters or buffers where they should have the same."""


class StudyError(HotloopError):
    """The space, the settings or the folder of a study can't be used."""


class ExportError(HotloopError):
    """The model can't be written in the requested format."""


def type_name(value: object) -> str:
    """Returns a value's type for a message: `None`, `an int`, `a Linear`."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def describe_error(error: BaseException) -> str:
    """Returns an error of user code in one line with the user's innermost line: `ValueError: message (file.py:12)`.

    The error of a worker process contains the original traceback as text, whose last lines name the original error.
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
    """Calls a user's function; an error becomes one line.

    Raises:
        TaskError: the function raised an error. Out-of-memory errors pass unchanged.
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
    """Returns whether the machine or a device ran out of memory, by the type or text of the error."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch isn't imported here
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def full_disk_path(error: BaseException) -> str | None:
    """Returns a path on the full disk that an error reports; None without one.

    A compiler's error names no path: then the first compiler folder on a full disk is returned.
    """
    full = [
        cause
        for cause in _error_chain(error)
        if (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)) or _DISK_FULL.search(str(cause))
    ]
    if not full:
        return None
    named = next((str(cause.filename) for cause in full if isinstance(cause, OSError) and cause.filename), None)
    given = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    folders = [folder for folder in [*given, tempfile.gettempdir()] if folder and os.path.isdir(folder)]
    return named or next((path for path in folders if shutil.disk_usage(path).free < _MIN_FREE_BYTES), folders[0])


def dead_dataloader_worker(error: BaseException) -> DataError | None:
    """Returns the error to raise if the cause is a dead data-loading process or a lack of shared memory."""
    if any(_NO_SHARED_MEMORY.search(str(cause)) for cause in _error_chain(error)):
        return DataError(
            "a worker process that loads the data has no shared memory (/dev/shm) left for a batch",
            expected="shared memory for several batches of each worker",
            fix="use --workers 0, or give more shared memory: docker gives 64 MB without --shm-size",
        )
    if not any(map(_is_worker_death, _error_chain(error))):
        return None
    return DataError(
        "a worker process that loads the data died",
        expected="workers that live until training ends",
        fix="try --workers 0; lack of memory is a common cause",
    )


_NO_SHARED_MEMORY = re.compile(r"unable to \w+ shared memory|<?/torch_\d+_\w+>?.*No space left|out of shared memory")
"""Messages of torch's shared-memory allocator, and of its DataLoader about a worker killed by SIGBUS."""


@contextmanager
def translate_worker_death() -> Iterator[None]:
    """Translates a worker's death, which torch raises from a signal handler at any point of the program."""
    try:
        yield
    except (HotloopError, RuntimeError) as error:
        if (death := dead_dataloader_worker(error)) is None:
            raise
        raise death from error


def _is_worker_death(error: BaseException) -> bool:
    """Returns whether torch found a dead worker, or the transfer of a batch from a worker broke."""
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        return True
    broke = isinstance(error, ConnectionError | EOFError | FileNotFoundError)
    return broke and any(frame.name == "_try_get_data" for frame in traceback.extract_tb(error.__traceback__))


def error_summary(error: BaseException) -> tuple[str, bool]:
    """Returns a line on a survivable error, and whether a retry may succeed.

    A retry may succeed after a lack of memory or disk space, and with a compiler that was killed or lacked parts.
    """
    text = error.given if isinstance(error, HotloopError) else describe_error(error)
    return text, any(map(_is_retryable, _error_chain(error)))


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error and its causes, also those hidden from tracebacks; a chain may be circular."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _is_retryable(error: BaseException) -> bool:
    passing = MemoryExhausted | InsufficientMemoryError | DiskError | TimeOverError
    if isinstance(error, passing) or is_out_of_memory(error):
        return True
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode == -_SIGKILL
    return _RETRYABLE.search(str(error)) is not None


def _parse_traceback(text: str) -> tuple[str, list[tuple[str, int]]]:
    """Returns the line that names the error, and the frames, of a traceback's text."""
    lines = text.splitlines()
    frames = [(number, match) for number, line in enumerate(lines) if (match := _FRAME.match(line))]
    after = [line for line in lines[frames[-1][0] + 1 :] if line[:1].strip()] if frames else lines[-1:]
    return (after or lines[-1:])[0], [(match[1], int(match[2])) for _, match in frames]


def is_library_file(path: str) -> bool:
    """Returns whether a file belongs to Python, an installed package, or hotloop."""
    return path.startswith(("<frozen", "<string>", "<eval_with_key>")) or any(part in path for part in _LIBRARIES)
