"""How many processes of Python a script starts: training in them isn't watched."""

from __future__ import annotations

import os
import subprocess
import sys

from hotloop.core.patches import Patches
from hotloop.profiler.hooks.torch_hooks import around


class Children:
    """Counts those of `multiprocessing`, forks, and programs that are Python."""

    def __init__(self) -> None:
        self._forks = self._programs = 0
        self._patches = Patches()

    def install(self) -> None:
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_parent=self._forked)
        starting = around(lambda: True, self._started, lambda *ended: None)
        self._patches.put(subprocess.Popen, "_execute_child", starting)

    def remove(self) -> None:
        self._patches.undo()

    @property
    def count(self) -> int:
        """A process of `multiprocessing` may be a fork as well."""
        made = getattr(sys.modules.get("multiprocessing.process"), "_process_counter", None)
        numbered = "".join(filter(str.isdigit, repr(made)))  # `count(3)`; to ask it for a number would take that one
        return max(self._forks, int(numbered or 1) - 1) + self._programs

    def _forked(self) -> None:
        self._forks += 1

    def _started(self, args: tuple, kwargs: dict) -> None:
        command = args[1] if len(args) > 1 else ()
        first = command[0] if isinstance(command, list | tuple) and command else command
        name = os.path.basename(os.fsdecode(first)) if isinstance(first, str | bytes | os.PathLike) else ""
        self._programs += name.startswith("python")
