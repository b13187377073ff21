"""Hears that a module is imported for the first time, in a process that may only ask whether it could be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hotloop.patches import Patches


class AtImport(MetaPathFinder):
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
        spec = _found(finders[finders.index(self) + 1 :], name, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            heard = Patches()
            heard.put(spec.loader, "exec_module", lambda execute: partial(self._execute, heard, execute))
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


def _found(finders: Iterable[Any], name: str, path: Sequence[str] | None, target: ModuleType | None) -> Any:
    """What the first that knows the module says of it."""
    for finder in finders:
        spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None
