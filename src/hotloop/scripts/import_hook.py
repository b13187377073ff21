"""Imports in a process that is somebody else's: hears of the first of a module, and does its own without a trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from hotloop.core.patches import Patches


class ImportHook(MetaPathFinder):
    """Calls functions right before and after the first of some modules is executed, and is gone then.

    A module that is looked for need not be executed: `importlib.util.find_spec` makes a spec, too, and throws it away.

    Args:
        names: of the modules.
        before: gets the name of the module that will be executed.
        then: is called once it was.
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
        """Calls nothing any more."""
        self._over = True
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        if self._over or name not in self._names or self not in finders:
            return None
        spec = _find_spec(finders[finders.index(self) + 1 :], name, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            heard = Patches()
            heard.patch(spec.loader, "exec_module", lambda execute: partial(self._execute, heard, execute))
        return spec

    def _execute(self, heard: Patches, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        """Runs in place of a loader's own `exec_module`; a loader may serve other modules as well."""
        name = module.__name__
        if name in self._names:
            heard.undo()
        if self._over or name not in self._names:
            execute(module)
        else:
            self._before(name)
            execute(module)
            self.end()
            self._then()


def _find_spec(finders: Iterable[Any], name: str, path: Sequence[str] | None, target: ModuleType | None) -> Any:
    """What the first that knows the module says of it."""
    for finder in finders:
        spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None


@contextmanager
def imports_from(path: Sequence[str]) -> Iterator[None]:
    """What is imported in here comes from a path as long as it can; afterwards the script finds what it would alone.

    A file beside the script may have the name of a module of Python's: it is run for the script alone, and for nobody else.
    """
    before, theirs = sys.path[:], [entry for entry in sys.path if entry not in path]
    folders = {os.path.realpath(entry) for entry in theirs}
    hiding = {name for name, module in sys.modules.items() if "." not in name and _is_shadowed(module, folders, path)}
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in hiding}
    for name in hidden:
        del sys.modules[name]
    known = set(sys.modules)
    sys.path[:] = [*path, *theirs]
    try:
        yield
    finally:
        sys.path[:] = before
        new = {name: name.partition(".")[0] for name in sys.modules if name not in known}
        ours = {name for name in set(new.values()) - known if name in hiding or _is_file(name, theirs)}
        for name, top in new.items():
            if top in ours:
                del sys.modules[name]
        sys.modules.update(hidden)


def _is_shadowed(module: ModuleType, folders: Collection[str], path: Sequence[str]) -> bool:
    """Whether a module lies in one of these folders, and another one of its name on the path."""
    spec = getattr(module, "__spec__", None)
    file = getattr(spec, "origin", None) or getattr(module, "__file__", None)
    if not isinstance(file, str) or module.__name__ == "__main__" or getattr(spec, "has_location", True) is False:
        return False  # one without a location is built into Python, and says "frozen" for its file
    folder, name = os.path.split(os.path.realpath(file))
    lies_in = os.path.dirname(folder) if name.startswith("__init__.") else folder
    return lies_in in folders and _is_file(module.__name__, path)


def _is_file(name: str, path: Sequence[str]) -> bool:
    spec = PathFinder.find_spec(name, list(path))
    return spec is not None and spec.origin is not None
