"""Runs inside the process of a script: the start before the script, notice of imports, tracebacks without hotloop's frames.

Imports nothing expensive: the script may be short, without torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType, TracebackType
from typing import Any

from hotloop.core.patches import Patches
from hotloop.core.processes import end_with_parent

HIDDEN = "<hotloop, left out as importlib._bootstrap is>"
"""File name of hotloop's functions that a script's code calls unknowingly."""

_HOTLOOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def begin(settings: dict[str, Any]) -> None:
    """Calls the function that `run_script` was given.

    Args:
        settings: `parent`, the process that waits for the script; `inside`, the function as `module:name`, which
            receives `settings`; `out`, the file for `write_result`; and the function's own settings.
    """
    end_with_parent(settings["parent"], signal.SIGKILL)  # a script can't handle SIGKILL
    module, _, name = settings["inside"].partition(":")
    getattr(import_module(module), name)(settings)


def mark_stop(path: str) -> None:
    """Says that hotloop stops the script by Ctrl-C, whose traceback tells the user nothing.

    Args:
        path: the file of `write_result`.
    """
    with open(f"{path}.stopped", "w", encoding="utf-8"):
        pass


def hide_stops(path: str) -> None:
    """Leaves out the traceback of a stop that `mark_stop` announced.

    Args:
        path: the file of `write_result`.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (issubclass(kind, KeyboardInterrupt) and os.path.exists(f"{path}.stopped")):
            before(kind, error, trace)

    sys.excepthook = hook


def write_result(path: str, values: dict[str, Any]) -> None:
    """Writes the result that `run_script` reads; the file is replaced atomically."""
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(values, file)
    os.replace(f"{path}.part", path)


class ImportHook(MetaPathFinder):
    """Calls functions before and after the first of some modules is executed, then removes itself.

    A module whose spec is found need not be executed: `importlib.util.find_spec` only makes a spec.

    Args:
        names: of the modules.
        before: receives the module's name before its execution.
        then: is called after the execution.
    """

    def __init__(
        self,
        names: Collection[str],
        *,
        before: Callable[[str], None] = lambda name: None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self._names, self._before, self._then = names, before, then
        self._over = False

    def begin(self) -> None:
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        self._over = True
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        if self._over or name not in self._names or self not in finders:
            return None
        spec = _find_spec(finders[finders.index(self) + 1 :], name, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            patches = Patches()
            patches.patch(spec.loader, "exec_module", lambda execute: partial(self._execute, patches, execute))
        return spec

    def _execute(self, patches: Patches, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Replaces a loader's `exec_module`; the loader may serve other modules too."""
        name = module.__name__
        if name in self._names:
            patches.undo()
        if self._over or name not in self._names:
            execute(module)
        else:
            self._before(name)
            execute(module)
            self.end()
            self._then()


def _find_spec(finders: Iterable[Any], name: str, path: Sequence[str] | None, target: ModuleType | None) -> Any:
    for finder in finders:
        spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None


@contextmanager
def imports_from(path: Sequence[str]) -> Iterator[None]:
    """Imports inside come from `path` where possible; afterwards the script finds the modules it would find alone.

    A file of the script with the name of a Python module is executed for the script only.
    """
    before, script_path = sys.path[:], [entry for entry in sys.path if entry not in path]
    folders = {os.path.realpath(entry) for entry in script_path}
    shadowed = {name for name, module in sys.modules.items() if "." not in name and _is_shadowed(module, folders, path)}
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in shadowed}
    for name in hidden:
        del sys.modules[name]
    known = set(sys.modules)
    sys.path[:] = [*path, *script_path]
    try:
        yield
    finally:
        sys.path[:] = before
        new = {name: name.partition(".")[0] for name in sys.modules if name not in known}
        ours = {name for name in set(new.values()) - known if name in shadowed or _is_file(name, script_path)}
        for name, top in new.items():
            if top in ours:
                del sys.modules[name]
        sys.modules.update(hidden)


def _is_shadowed(module: ModuleType, folders: Collection[str], path: Sequence[str]) -> bool:
    """Returns whether a module is in one of the folders, and another module of its name on the path."""
    spec = getattr(module, "__spec__", None)
    file = getattr(spec, "origin", None) or getattr(module, "__file__", None)
    if not isinstance(file, str) or module.__name__ == "__main__" or getattr(spec, "has_location", True) is False:
        return False  # built-in modules have no location, and "frozen" for a file
    folder, name = os.path.split(os.path.realpath(file))
    lies_in = os.path.dirname(folder) if name.startswith("__init__.") else folder
    return lies_in in folders and _is_file(module.__name__, path)


def _is_file(name: str, path: Sequence[str]) -> bool:
    spec = PathFinder.find_spec(name, list(path))
    return spec is not None and spec.origin is not None


def leave_out_our_frames() -> Callable[[], None]:
    """Shows uncaught errors as if the script ran alone; returns a function that gives `sys.excepthook` back."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, strip_own_frames(error))

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    return undo


def raise_signal_error(error: BaseException) -> None:
    """Raises an error again if a handler of a signal raised it, since the signal may arrive in hotloop's code as well.

    Does nothing with another error.
    """
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    current: BaseException | None = error
    while current is not None:
        trace = current.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in codes:
                raise current
            trace = trace.tb_next
        current = current.__cause__ or current.__context__


def _code(handler: Any) -> CodeType | None:
    function = getattr(handler, "func", handler)  # of a partial
    return getattr(getattr(function, "__func__", function), "__code__", None)


def strip_own_frames(error: BaseException) -> TracebackType | None:
    """Removes hotloop's frames from an error and the errors that it follows; returns its traceback."""
    done: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None and id(current) not in done:
            done.add(id(current))
            current.__traceback__ = _strip_import_frames(current.__traceback__)
            pending += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]
    return error.__traceback__


def _strip_import_frames(trace: TracebackType | None) -> TracebackType | None:
    """Removes Python's import frames before hotloop's, since Python removes only innermost import frames."""
    frames: list[TracebackType] = []
    while trace is not None:
        if not _file(trace).startswith((_HOTLOOP, HIDDEN)):
            frames.append(trace)
        else:
            while frames and _file(frames[-1]).startswith("<frozen importlib"):
                frames.pop()
        trace = trace.tb_next
    for entry, after in zip(frames, [*frames[1:], None], strict=True):
        entry.tb_next = after
    return frames[0] if frames else None


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename
