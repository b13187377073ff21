"""Races of the process's options, one after the other, in windows of the script's own steps."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psutil
from torch.optim import Optimizer

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

from hotloop.exchanges.options.process_options import ProcessOption
from hotloop.exchanges.part import Part
from hotloop.exchanges.windows.paired_times import PairedTimes
from hotloop.exchanges.windows.step_times import TimedStep
from hotloop.exchanges.windows.window_pairs import WindowPairs, is_over

_WARM_UP_STEPS = 5

_CHECK_STEPS, _RARER, _LAST_CHECK = 64, 8, 2**15
"""Step of the first check for options that are unneeded so far, the factor to the next such step, and the last one."""

_LEAST_FREE = 0.1
"""Share of the memory that must be free while freed memory stays with the process."""


class OptionPart(Part):
    """An option as a part; its proof is that torch computes the same operations, in the same or another order."""

    option: ProcessOption
    had_nothing_to_gain = is_unneeded = False
    pairs: WindowPairs | None = None

    @property
    def times(self) -> PairedTimes:
        return super().times if self.pairs is None else self.pairs.times

    def switch(self, on: bool) -> None:
        """Switches the option on or off."""
        self._has_run |= on
        self.option.switch(on)

    def refuse(self, reason: str) -> None:
        self.leave()
        super().refuse(reason)

    def leave(self) -> None:
        """Puts the process back to what it was, and notes what stays different."""
        self.option.switch(False)
        if self._has_run and (rest := self.option.leave()):
            self.notes.append(f"{self.title}: {rest}")

    @property
    def rounded(self) -> list[str]:
        return [self.exchange] * (self._has_run and self.option.proof != "bitwise")

    def as_record(self, *, used: bool) -> dict[str, Any]:
        return super().as_record(used=used) | {"proof": self.option.proof}


class OptionRaces:
    """Races options, and switches those in use on and off.

    Args:
        parts: one for each option, in the order of the races.
        optimizers: returns those of the script so far.
    """

    def __init__(self, parts: Sequence[OptionPart], optimizers: Callable[[], Iterable[Optimizer]] = lambda: ()) -> None:
        self._parts, self._optimizers = list(parts), optimizers
        self._check_at = _CHECK_STEPS
        self._steps = 0
        self._recent: deque[float] = deque(maxlen=_WARM_UP_STEPS)
        self._faults: deque[int] = deque(maxlen=_WARM_UP_STEPS + 1)
        self._racing: tuple[OptionPart, WindowPairs] | None = None

    def step_ended(self, step: TimedStep) -> bool:
        """Records a step; returns whether a race needed this step."""
        if self._racing is None and not self.is_busy:
            return False
        self._steps += 1
        self._recent.append(step.seconds.wall_s)
        if self._racing is None:
            self._faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0)
        if self._steps <= _WARM_UP_STEPS:
            return False
        if self._racing is None and not self._begin(statistics.median(self._recent)):  # one step may have an evaluation
            return False
        assert self._racing is not None
        part, pairs = self._racing
        if not pairs.is_open:
            pairs.begin()
        elif pairs.step_ended(step) is not None:
            self._judge(part, pairs)
        return True

    def is_undecided(self, name: str) -> bool:
        """Whether an option is neither in use nor off."""
        return any(part.name == name and part.stage in ("proof", "race") for part in self._parts)

    def switch(self, enabled: bool) -> None:
        """Switches all options in use; the last one goes first when switching off."""
        for part in self._parts if enabled else reversed(self._parts):
            if part.stage == "use" and (why := part.option.conflict()):
                part.take_back(why)
            elif part.stage == "use":
                part.switch(enabled)

    @property
    def is_busy(self) -> bool:
        """Whether the next steps are needed for a race."""
        return any(part.stage in ("proof", "race") for part in self._parts)

    def restart(self) -> None:
        """Looks anew for options that had nothing to gain, since the script trains something else."""
        self._steps, self._check_at = 0, _CHECK_STEPS
        for part in self._parts:
            if part.stage == "off" and (part.had_nothing_to_gain or part.is_unneeded):
                part.stage, part.had_nothing_to_gain, part.is_unneeded = "proof", False, False

    @property
    def is_checking(self) -> bool:
        """Whether a later step may show that an option is needed."""
        return self._check_at <= _LAST_CHECK and any(part.is_unneeded for part in self._parts)

    def check(self, steps: int) -> None:
        """Begins the races of options that are needed by now, at ever rarer steps."""
        if steps < self._check_at or not self.is_checking:
            return
        while self._check_at <= steps:
            self._check_at *= _RARER
        for part in self._parts:
            if part.is_unneeded and not part.option.unneeded(self._optimizers()):
                part.stage, part.is_unneeded = "proof", False

    def end_race(self) -> None:
        """Ends a race without a result."""
        if self._racing is not None:
            part, _ = self._racing
            part.reason, self._racing = "its race ended undecided", None
            part.leave()

    def end(self) -> None:
        """Ends a race without a result, and switches all options off."""
        self.end_race()
        for part in self._parts:
            if part.stage == "use":
                part.leave()

    def check_memory(self) -> None:
        """Gives freed memory back to the system if little is left."""
        memory = psutil.virtual_memory()
        if memory.available < memory.total * _LEAST_FREE:
            for part in self._parts:
                if part.name == "allocator" and part.stage == "use":
                    part.take_back("less than a tenth of the memory is free")

    @property
    def _usual_faults(self) -> float:
        """Page faults of a usual step; the first steps have more, in which the heap grows."""
        return statistics.median(after - before for before, after in itertools.pairwise(self._faults))

    def _begin(self, step_s: float) -> bool:
        """Begins the next race; an option that an earlier run proved faster needs none."""
        for part in self._parts:
            if part.stage not in ("proof", "race"):
                continue
            if why := part.option.conflict():
                part.refuse(why)
            elif why := part.option.without_gain(step_s, self._usual_faults):
                part.had_nothing_to_gain = True
                part.refuse(why)
            elif why := part.option.unneeded(self._optimizers()):
                part.is_unneeded = True
                part.refuse(why)
            elif step_s > part.option.longest_step_s:
                part.refuse(f"a step takes {step_s:.2g} s, so its race would cost more than its gain")
            elif part.use_earlier():
                part.switch(True)
            else:
                part.stage, part.pairs = "race", WindowPairs(part.switch)
                self._racing = part, part.pairs
                return True
        return False

    def _judge(self, part: OptionPart, pairs: WindowPairs) -> None:
        if not is_over(pairs):
            return
        self._racing = None
        conflict = part.option.conflict()
        if conflict:
            part.refuse(conflict)
        else:
            part.decide(pairs.times)
        if part.stage == "use":
            part.switch(True)
