"""Shared options, output and error handling of the commands.

Text for people goes to stderr through `console`; the JSON document goes to stdout through `print_json`. Exit codes: 0
success, 1 an error that the user can fix (`HotloopError`, one line), 2 a wrong call (one line), 130 Ctrl-C, 143
SIGTERM. Other errors are bugs in hotloop and print their traceback.
"""

from __future__ import annotations

import atexit
import errno
import functools
import gc
import inspect
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import RenderableType

from hotloop.core.processes import LAUNCHER, Terminated, end_with_parent, raise_on_signals
from hotloop.core.terminal import Terminal
from hotloop.errors import REMOVED, DiskError, HotloopError, shorten, translate_worker_death

if TYPE_CHECKING:
    from hotloop.plan import Plan

P = ParamSpec("P")
R = TypeVar("R")

FAILED = 1
INTERRUPTED = 130  # what shells report for SIGINT
READER_GONE = 141  # what shells report for SIGPIPE

UsageError: Any = typer.BadParameter.__mro__[1]  # typer exports no name

console = Terminal()

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, for programs.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, mps or xpu.", show_default="the accelerator, else cpu")
]
ParamOption = Annotated[
    list[str] | None,
    typer.Option("--param", "-p", help="name=value for a task(...) that is a function; repeatable."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="axis=value of the plan, such as compile=step; repeatable."),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust", help="Trust the code in the folder of a run that you didn't start, for this and later commands."
    ),
]


class WeightsName(StrEnum):
    best = "best"
    last = "last"


WeightsOption = Annotated[
    WeightsName,
    typer.Option(
        help="Weights of the best epoch by validation (without validation data: of the last), or of the last epoch."
    ),
]


def say(line: str) -> None:
    """Prints a line on stderr, without markup."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def progress_bar(doing: str, of: str = "samples") -> AbstractContextManager[Callable[[int, int | None], None]]:
    """Returns a progress bar; the context's value takes `(done, total)`."""
    from hotloop.report import progress

    return progress.progress_bar(console, doing, of)


def print_json(document: dict[str, Any]) -> None:
    """Prints the JSON document of a command on stdout, with null in place of NaN and infinity.

    Raises:
        DiskError: stdout can't be written.
    """
    text = json.dumps(_finite(document), indent=2, allow_nan=False)
    if sys.stdout is None:
        raise DiskError(
            "stdout is closed", expected="an open stdout for the JSON document", fix="open it, or omit --json"
        )
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence_stdout()
        raise DiskError(
            f"stdout can't be written: {error.strerror}", fix="free some space, or write elsewhere"
        ) from error


def print_result(as_json: bool, document: dict[str, Any], page: Callable[[], RenderableType]) -> None:
    """Prints the JSON document on stdout, or the page on stderr."""
    if as_json:
        print_json(document)
    else:
        console.print(page())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def stdout_for(as_json: bool) -> Iterator[None]:
    """Redirects prints of user code to stderr with `--json`: stdout is for the document alone."""
    if not as_json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def run_app(app: typer.Typer) -> None:
    """Runs the command line in `sys.argv`; a wrong call ends with one line."""
    _open_streams()
    sys.unraisablehook = _report_unraisable
    try:
        code = app(prog_name="hotloop", standalone_mode=False)
    except UsageError as error:
        if not sys.argv[1:]:
            error.show()  # `hotloop` without arguments prints its help
        else:
            _report_error("UsageError", _usage(error), "--json" in sys.argv)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # a further Ctrl-C after the command's own handlers are gone
        code = INTERRUPTED
    ended = code if isinstance(code, int) else 0
    if ended == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a held key would interrupt Python's exit
    atexit.register(gc.freeze)  # without it Python's exit searches all objects for garbage, which takes 0.3 s
    sys.exit(ended)


def _report_unraisable(error: sys.UnraisableHookArgs) -> None:
    """Reports an error in a finalizer like Python, except for KeyboardInterrupt: Ctrl-C may arrive in a finalizer."""
    if error.exc_type is None or not issubclass(error.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(error)


def _open_streams() -> None:
    """Opens the null device in place of closed standard streams, whose numbers later files would get."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _usage(error: Any) -> str:
    message = error.format_message().removeprefix("Invalid value: ").rstrip(".")
    command = error.ctx.command_path if error.ctx is not None else "hotloop"
    if instead := REMOVED.get(f"{command} {getattr(error, 'option_name', '')}"):
        return f"{error.option_name} was removed: {instead}. See: {command} --help"
    stop = "" if message.endswith("?") else "."
    takes_arguments = error.ctx is not None and any(one.name == "arguments" for one in error.ctx.command.params)
    hint = " Put the script's own options after --." if takes_arguments and hasattr(error, "option_name") else ""
    return f"{message[:1].lower()}{message[1:]}{stop}{hint} See: {command} --help"


def exit_on_error(command: Callable[P, R]) -> Callable[P, R]:
    """Decorates a command: errors that the user can fix become one line and an exit code.

    The command must take `as_json: JsonOption = False`; with `--json` the error is also the document on stdout,
    `{"error": {"kind": ..., "message": ...}}`.
    """
    if "as_json" not in inspect.signature(command).parameters:
        raise TypeError(f"the command {command.__name__} must take `as_json: AsJson = False`")

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        as_json = bool(kwargs.get("as_json"))
        with raise_on_signals():  # also during error reports
            return _run_or_exit(command, as_json, *args, **kwargs)

    return run


def _run_or_exit(command: Callable[P, R], as_json: bool, /, *args: P.args, **kwargs: P.kwargs) -> R:
    try:
        try:
            with translate_worker_death():
                return command(*args, **kwargs)
        except HotloopError as error:
            if error.detail:
                say(error.detail)
            _report_error(type(error).__name__, str(error), as_json)
            raise typer.Exit(FAILED) from error
        except Terminated as error:
            if not _is_launched():  # the launcher reports the reason
                _report_error("Interrupted", f"stopped by {signal.Signals(error.number).name}", as_json)
            raise typer.Exit(128 + error.number) from error
        except KeyboardInterrupt as error:
            _report_error("Interrupted", "stopped by Ctrl-C", as_json)
            raise typer.Exit(INTERRUPTED) from error
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            _report_error("RunError", f"a name is too long for the system: {shorten(error.filename)}", as_json)
            raise typer.Exit(FAILED) from error
    except BrokenPipeError as error:
        _silence_stdout()
        raise typer.Exit(READER_GONE) from error


def try_write(write: Callable[[], R]) -> tuple[R | None, HotloopError | None]:
    """Returns the result of writing additional files, or the error, which `exit_if_failed` reports after the output."""
    try:
        return write(), None
    except HotloopError as error:
        return None, error


def exit_if_failed(error: HotloopError | None) -> None:
    """Ends a command after its output if writing a file failed."""
    if error is not None:
        say(f"error: {error}")
        raise typer.Exit(FAILED)


def exit_early(by: str | None, reason: str) -> None:
    """Ends a command that printed partial results, after a `failure` or a signal."""
    say(f"{'error: ' if by == 'failure' else ''}{reason}")
    raise typer.Exit(128 + signal.Signals[by] if by and by in signal.Signals.__members__ else FAILED)


def exit_with_launcher() -> None:
    """Makes a rank end when its launcher is killed, also before training."""
    if _is_launched():
        end_with_parent(int(os.environ.get(LAUNCHER, os.getppid())))


def _is_launched() -> bool:
    """Returns whether a launcher started this process (`LAUNCH_ID_PREFIX` in distributed/join.py)."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith("hotloop-")


def _report_error(kind: str, message: str, as_json: bool) -> None:
    say(f"error: {message}")
    if as_json:
        with suppress(DiskError):
            print_json({"error": {"kind": kind, "message": message}})


def _silence_stdout() -> None:
    """Redirects stdout to the null device, since Python's flush at exit would fail on a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse_pairs(texts: list[str]) -> dict[str, str]:
    """Returns `["a=1", "b=x"]` as a dict.

    Raises:
        typer.BadParameter: a text has no equals sign.
    """
    for text in texts:
        if "=" not in text:
            raise typer.BadParameter(f"{text!r} is not of the form name=value")
    return {name.strip(): value.strip() for name, _, value in (text.partition("=") for text in texts)}


def is_data_parallel_default(ranks: int | None, plan: Plan) -> bool:
    """Returns whether several ranks without a choice of `parallel` imply `parallel=data`."""
    return (launched_ranks() if ranks is None else ranks) > 1 and "parallel" not in plan.model_fields_set


def launched_ranks() -> int:
    """Returns the number of processes that torchrun or a similar launcher started; 1 without a launcher."""
    number = os.environ.get("WORLD_SIZE", "")
    return int(number) if number.isdecimal() else 1


def axes_of_options(settings: list[str] | None, **short: object) -> dict[str, str]:
    """Returns the plan axes from `--set` and from separate options (None: not given).

    Raises:
        typer.BadParameter: an axis has two different values.
    """
    found: dict[str, str] = {}
    given = [f"{axis}={value}" for axis, value in short.items() if value is not None]
    for text in [*(settings or []), *given]:
        for axis, value in parse_pairs([text]).items():
            if found.setdefault(axis, value) != value:
                raise typer.BadParameter(f"{axis} is given as {found[axis]} and as {value}")
    return found
