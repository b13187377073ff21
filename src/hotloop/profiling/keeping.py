"""At which line what has a graph is put into a list, told by Python's calls of the list's methods."""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch import Tensor

from hotloop.profiling.hooks import safe
from hotloop.profiling.sites import Sites
from hotloop.profiling.tensors import tensors_in

_PUTTING = {"append": -1, "extend": -1, "appendleft": 0, "extendleft": 0}
"""Methods of lists and deques, and where what was put last stands then."""

_MOST = 1000


class Keeping:
    """Hears all calls while it listens, which slows Python down: for steps whose times are worth nothing.

    Args:
        fail: is told of an error of its own in the midst of the script.
    """

    def __init__(self, sites: Sites, fail: Callable[[Exception], Any]) -> None:
        self.fail, self._sites = fail, sites
        self._process = os.getpid()
        self._kept: list[tuple[int, str, weakref.ref[Tensor]]] = []
        self._step, self._mine = 0, self._heard

    def listen(self, step: int) -> None:
        """A profiler of the script's own, of which there can be but one, comes first."""
        if sys.getprofile() is None:
            self._step = step
            sys.setprofile(self._mine)

    def stop(self) -> None:
        if sys.getprofile() is self._mine:
            sys.setprofile(None)

    def still_there(self, step: int) -> set[str]:
        """Lines at which something was put into a list in a step that is alive; forgets that step and those before."""
        found = {where for at, where, tensor in self._kept if at == step and tensor() is not None}
        self._kept = [one for one in self._kept if one[0] > step]
        return found

    @safe
    def _heard(self, frame: FrameType, event: str, called: Any) -> None:
        if os.getpid() != self._process:  # a fork, of whose threads this one is alive
            self.stop()
            return
        if event != "c_return" or (name := getattr(called, "__name__", "")) not in _PUTTING:
            return
        holder = getattr(called, "__self__", None)
        if not isinstance(holder, list | deque) or not holder or len(self._kept) >= _MOST:
            return
        for tensor in tensors_in(holder[_PUTTING[name]], depth=1):
            if tensor.grad_fn is not None:
                self._kept.append((self._step, self._sites.above(frame), weakref.ref(tensor)))


def matched(backwards: Sequence[str], lines: Counter[str]) -> dict[str, str]:
    """Which line keeps the graph that each backward went through; one that nobody knows of is left out.

    Args:
        backwards: where those are whose graphs are kept.
        lines: where something is put into a list, with how often.
    """
    if len(lines) == 1 or len(backwards) == 1:
        return dict.fromkeys(backwards, lines.most_common(1)[0][0]) if lines else {}
    if len(lines) != len(backwards):
        return {}
    return dict(zip(sorted(backwards, key=_order), sorted(lines, key=_order), strict=True))


def _order(where: str) -> tuple[str, int]:
    file, _, line = where.rpartition(":")
    return file, int(line or 0)
