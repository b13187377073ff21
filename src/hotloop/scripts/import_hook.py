"""Imports in a script's process: notification of a module's import, and imports without side effects for the script."""

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
