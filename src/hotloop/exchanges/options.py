"""Options of the whole process: memory that steps free, threads, subnormal numbers, reduced precision.

An option changes no object of the script. The options are raced one after the other in windows of the script's own steps.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.optim import Optimizer

from hotloop.core.torch_private import dispatch_mode_count

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

from hotloop.core.hardware.limits import active_allocator
from hotloop.exchanges.part import Part
from hotloop.exchanges.races import PairedTimes, TimedStep, WindowPairs
from hotloop.lowering.transforms.allocator import keep_freed_memory, leave_freed_memory
from hotloop.margins import MARGIN

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")

_LONGEST_STEP_S = 0.1
"""Seconds. Threads wait for each other some microseconds per operation, which is little in a longer step."""

_FAULT_S = 2e-6
"""At most about the seconds of a page fault, in which the system zeroes the page."""

_CHECKED_NUMBERS = 2**18
"""Numbers of a large tensor that are checked for subnormal ones: fewer than one in so many cost next to nothing."""

_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""Processors with products in bf16, in the names of `torch.cpu.get_capabilities`."""

_WARM_UP_STEPS = 5

_CHECK_STEPS, _RARER, _LAST_CHECK = 64, 8, 2**15
"""Step of the first check for options that are unneeded so far, the factor to the next such step, and the last one."""

_LEAST_FREE = 0.1
"""Share of the memory that must be free while freed memory stays with the process."""


class ProcessOption:
    """An option that can be switched on and off between two steps.

    Attributes:
        name: what it changes.
        exchange: its value when it is on.
        proof: `bitwise`, `fp32-equivalent` (other sums of the same numbers) or `reduced-precision`.
        longest_step_s: longest step that it may make faster; a race of longer steps would cost too much.
    """

    name: str
    exchange: str
    proof: str
    longest_step_s = math.inf

    def switch(self, on: bool) -> None:
        """Switches it on or off."""
        raise NotImplementedError

    def conflict(self) -> str:
        """Returns why the script's own settings exclude it; empty if they don't."""
        return ""

    def without_gain(self, step_s: float, faults: float) -> str:
        """Returns why steps of so many seconds, with so many page faults each, can't gain; empty if they can."""
        return ""

    def unneeded(self, optimizers: Iterable[Optimizer]) -> str:
        """Returns why a training with these optimizers can't gain so far; empty if it can."""
        return ""

    def leave(self) -> str:
        """Puts the process back after the last use, and returns what stays different; empty if nothing does."""
        return ""


def process_options(*, exact: bool, accepts_reduced: bool) -> list[ProcessOption]:
    """Returns the options of this process.

    Args:
        exact: only bitwise ones.
        accepts_reduced: the user accepts reduced precision.
    """
    options: list[ProcessOption] = []
    if not exact and not any(
        map(os.environ.get, _THREAD_VARIABLES)
    ):  # first: a network is compiled for a number of threads
        default = torch.get_num_threads()
        options += [_Threads(count) for count in sorted({default // 2, 1} - {0, default}, reverse=True)]
    if active_allocator() is not None:
        options.append(_Allocator())
    if not exact:
        options.append(_Flushing())
    return [*options, _Precision()] if accepts_reduced else options


class _Allocator(ProcessOption):
    name, exchange, proof = "allocator", "memory that a step frees stays with the process", "bitwise"

    def switch(self, on: bool) -> None:
        keep_freed_memory(on)

    def without_gain(self, step_s: float, faults: float) -> str:
        """A step gains the time of its page faults at most; a race would end glibc's dynamic thresholds."""
        is_little = faults * _FAULT_S < MARGIN * step_s
        return f"a step has {faults:.0f} page faults, so there is nothing to gain" if is_little else ""

    def leave(self) -> str:
        if not leave_freed_memory():
            return ""
        return "its race has fixed the limits of glibc's allocator, at their largest values: blocks below 32 MB stay, up to 64 MB"


class _Threads(ProcessOption):
    """Another number of threads; switching off restores the number before."""

    name, proof, longest_step_s = "threads", "fp32-equivalent", _LONGEST_STEP_S

    def __init__(self, count: int) -> None:
        self._count = count
        self._before: int | None = None
        self._default = torch.get_num_threads()
        self.exchange = f"{count} instead of {self._default}"

    def switch(self, on: bool) -> None:
        if on and self._before is None:
            self._before = torch.get_num_threads()
            torch.set_num_threads(self._count)
        elif not on and self._before is not None:
            if torch.get_num_threads() == self._count:  # else the script has set its own number since
                torch.set_num_threads(self._before)
            self._before = None

    def conflict(self) -> str:
        known = {self._count, self._default, self._default // 2}
        return "" if torch.get_num_threads() in known else "the script sets the number of threads"


class _Flushing(ProcessOption):
    """Flushes subnormal numbers to zero, unless the script does so itself."""

    name, exchange, proof = "numbers below 1.2e-38", "flushed to zero", "fp32-equivalent"

    def __init__(self) -> None:
        self._is_on = False

    def switch(self, on: bool) -> None:
        if on != self._is_on:
            self._is_on = on
            torch.set_flush_denormal(on)

    def conflict(self) -> str:
        """Computes without torch, whose modes the script may have changed; the processor's setting is the same."""
        is_flushing = sys.float_info.min * 0.5 == 0
        return "the script sets this itself" if is_flushing != self._is_on else ""

    def unneeded(self, optimizers: Iterable[Optimizer]) -> str:
        """Reads the numbers after an update; subnormal activations alone, without subnormal gradients, are not found."""
        if dispatch_mode_count():
            return "a torch mode is active"
        with torch.no_grad():
            is_found = any(_has_subnormal(value) for optimizer in optimizers for value in _numbers_of(optimizer))
        return "" if is_found else "parameters, gradients and optimizer state have no such number"


def _numbers_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yields parameters, gradients and the optimizer's state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _has_subnormal(value: Tensor) -> bool:
    if not value.ndim:  # a factor that falls with the steps, such as NAdam's
        return False
    if value.device.type != "cpu" or value.layout != torch.strided or not value.is_floating_point():
        return False
    sizes = value.detach().reshape(-1)[:: max(1, value.numel() // _CHECKED_NUMBERS)].abs()
    return bool(((sizes > 0) & (sizes < torch.finfo(value.dtype).tiny)).any())


def _reduced_level() -> str:
    """Returns the level of `set_float32_matmul_precision` that this machine computes faster; empty without one.

    The level is read at the race: asking for GPUs at torch's import would start CUDA, which forbids forks.
    """
    if torch.cuda.is_initialized():
        return "high"  # TF32
    capabilities = torch.cpu.get_capabilities()
    return "medium" if any(map(capabilities.get, _BF16_INSTRUCTIONS)) else ""


class _Precision(ProcessOption):
    """The number format of products; switching off restores the script's own."""

    name, exchange, proof = "products of fp32 numbers", "TF32 or bf16", "reduced-precision"

    def __init__(self) -> None:
        self._before: str | None = None

    def switch(self, on: bool) -> None:
        if on and self._before is None:
            self._before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(_reduced_level())
        elif not on and self._before is not None:
            if not self.conflict():
                torch.set_float32_matmul_precision(self._before)
            self._before = None

    def conflict(self) -> str:
        if not _reduced_level():
            return "this processor has no bf16 instructions, and the script uses no CUDA GPU"
        try:
            expected = "highest" if self._before is None else _reduced_level()
            is_own = torch.get_float32_matmul_precision() != expected
        except RuntimeError:  # the script uses another interface of torch for the same setting
            is_own = True
        return "the script sets the precision of products" if is_own else ""


class OptionPart(Part):
    """An option as a part; its proof is that torch computes the same operations, in the same or another order."""

    had_nothing_to_gain = is_unneeded = False
    pairs: WindowPairs | None = None

    def __init__(self, option: ProcessOption, **settings: Any) -> None:
        self.option = option
        super().__init__("process", option.name, [option.exchange], **settings)

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

    def _begin(self, step_s: float) -> bool:
        """Begins the next race; an option that an earlier run proved faster needs none."""
        # Of a usual step: the first steps have more page faults, in which the heap grows.
        faults = statistics.median(after - before for before, after in itertools.pairwise(self._faults))
        for part in self._parts:
            if part.stage not in ("proof", "race"):
                continue
            if why := part.option.conflict():
                part.refuse(why)
            elif why := part.option.without_gain(step_s, faults):
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
        if not pairs.is_over:
            return
        self._racing = None
        conflict = part.option.conflict()
        if conflict:
            part.refuse(conflict)
        else:
            part.decide(pairs.times)
        if part.stage == "use":
            part.switch(True)
