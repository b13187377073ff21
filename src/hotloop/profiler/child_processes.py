"""Counts the Python processes that a script starts, whose training is not recorded."""

from __future__ import annotations

import os
import subprocess
import sys

from hotloop.core.patches import Patches
from hotloop.profiler.hooks.torch_hooks import with_callbacks


class ChildCounter:
    """Counts processes of `multiprocessing`, forks, and Python programs."""

    def __init__(self) -> None:
        self._forks = self._programs = 0
        self._patches = Patches()

    def install(self) -> None:
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_parent=self._count_fork)
        starting = with_callbacks(lambda: True, self._count_program, lambda *ended: None)
        self._patches.patch(subprocess.Popen, "_execute_child", starting)

    def remove(self) -> None:
        self._patches.undo()

    @property
    def count(self) -> int:
        """Number of processes; a process of `multiprocessing` may be a fork as well."""
        made = getattr(sys.modules.get("multiprocessing.process"), "_process_counter", None)
        numbered = "".join(filter(str.isdigit, repr(made)))  # `count(3)`; `next` would use up a number
        return max(self._forks, int(numbered or 1) - 1) + self._programs

    def _count_fork(self) -> None:
        self._forks += 1

    def _count_program(self, args: tuple, kwargs: dict) -> None:
        command = args[1] if len(args) > 1 else ()
        first = command[0] if isinstance(command, list | tuple) and command else command
        name = os.path.basename(os.fsdecode(first)) if isinstance(first, str | bytes | os.PathLike) else ""
        self._programs += name.startswith("python")
