"""How long an optimizer takes for each of its parameter groups: torch's go through their groups one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

from hotloop.profiling.unseen import unseen


@unseen
class _Watched(list):
    """The groups of an optimizer, which note when each is asked for."""

    def __init__(self, groups: list[dict[str, Any]], asked: Callable[[int | None], None]) -> None:
        super().__init__(groups)
        self.groups, self._asked = groups, asked

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, group in enumerate(self.groups):
            self._asked(number)
            yield group
        self._asked(None)


@unseen
class GroupClock:
    """Times one update at a time: a group has the clock from when the optimizer asks for it to when it asks for the next."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._spent: dict[int, float] = {}
        self._group: int | None = None
        self._since = 0.0

    def begin(self, optimizer: Optimizer) -> None:
        """An update begins; its groups stand in a list that is watched until `end`."""
        self._spent, self._group = {}, None
        compiled = hasattr(optimizer.step, "_torchdynamo_orig_callable")  # it would be compiled again for another list
        if len(optimizer.param_groups) > 1 and not compiled:
            optimizer.param_groups = _Watched(_plain(optimizer.param_groups), self._asked)

    def end(self, optimizer: Optimizer) -> dict[int, float]:
        """Seconds by the number of the group; empty where the optimizer has one, or doesn't take them one by one."""
        self._asked(None)
        optimizer.param_groups = _plain(optimizer.param_groups)
        return self._spent

    def _asked(self, group: int | None) -> None:
        now = self._now()
        if self._group is not None:
            self._spent[self._group] = self._spent.get(self._group, 0.0) + now - self._since
        self._group, self._since = group, now


def _plain(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's own list, also after an update that an error ended."""
    return groups.groups if isinstance(groups, _Watched) else groups
