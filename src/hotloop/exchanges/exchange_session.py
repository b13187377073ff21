"""All exchanges of one script's process, their windows, and the facts for the summary.

The session installs as little as the script's next steps need. Once each part is decided and none is in use, nothing stays
installed until the script frees an optimizer, after which it may train something else.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotloop.exchanges.exchange_cache import Decisions, write_decisions
from hotloop.exchanges.loader_exchange import LoaderExchange
from hotloop.exchanges.modules import ModuleExchange
from hotloop.exchanges.optimizer_exchange import OptimizerExchange
from hotloop.exchanges.options import OptionPart, OptionRaces, ProcessOption, process_options
from hotloop.exchanges.part import Part
from hotloop.exchanges.windows import StepWindows, UpdateHook
from hotloop.exchanges.workers import WorkerExchange
from hotloop.scripts.child import leave_out_our_frames, raise_signal_error, write_result

_WRITE_INTERVAL_S = 30.0
"""Seconds between two writes of the facts, for scripts that are killed."""


_REST_S = 0.1
"""Seconds for which the hook rests while no exchange needs the next steps."""

_LOOK_S = 0.005
"""Seconds between two decisions about a rest, each of which takes some microseconds."""

_SEEN_STEPS = 100
"""Steps after which all optimizers and loaders of a training have likely been seen."""

_FOREIGN_UPDATES = 1000
"""Updates of other threads before the first one of this thread, after which this thread trains nothing."""

_MOST_OPTIMIZERS = 64

_MOST_RETURNS = 8
"""How often the exchanges return after an optimizer was freed."""

_RECORDING_S = 60.0
"""Seconds for which windows wait for a loader whose samples are recorded: a window without exchanges would leave samples out."""


class ExchangeSession:
    """Installs the exchanges after torch's import, in the thread that will train.

    Args:
        settings: as for `wait_for_torch`.
        key: of the stored decisions.
        decisions: of earlier runs of the script.
        notes: on the stored decisions.
        show_all_frames: ends the call of `leave_out_our_frames`.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        key: dict[str, Any],
        decisions: Decisions,
        notes: list[str],
        show_all_frames: Callable[[], None],
    ) -> None:
        self._show_all_frames: Callable[[], None] | None = show_all_frames
        self._out, self.exact, self._dry_run = settings["out"], settings["exact"], settings["dry_run"]
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._parts: list[Part] = []
        self._cache, self._key, self._arguments = Path(settings["cache"]), key, settings["arguments"]
        self._earlier, self._notes = decisions, notes
        self._is_over = self._is_other_training = self._is_installed = self._is_stored = False
        self._began_s, self._start_s = settings["began_s"], 0.0
        self._written_at = time.monotonic()
        self._look_at_s = 0.0
        self._last_optimizer: weakref.ref[Any] | None = None
        self._foreign_updates = self._returns = self._first_step = 0
        self._optimizers: list[weakref.ref[Any]] = []
        self._kinds, self._searched_kinds = set[Any](), set[Any]()
        self._hook = UpdateHook(self._update_ended)
        accepts_reduced = settings["accept"] == "reduced-precision"
        options = process_options(exact=self.exact, accepts_reduced=accepts_reduced)
        self._option_parts = [self._option_part(option) for option in options]
        self._options = OptionRaces(
            self._option_parts, lambda: [one for known in self._optimizers if (one := known()) is not None]
        )
        self._windows = StepWindows(
            self._can_begin_windows,
            self._report_slower,
            dry_run=self._dry_run,
            switched=self._options.switch,
            races=lambda step_s: self._workers.races_now() or self._options.step_ended(step_s),
        )
        self._modules, self._workers = ModuleExchange(self), WorkerExchange(self)
        self._optimizer_exchange, self._loaders = OptimizerExchange(self), LoaderExchange(self)
        exchanges = (self._modules, self._workers, self._optimizer_exchange, self._loaders)
        self._exchanges: tuple[ModuleExchange | WorkerExchange | OptimizerExchange | LoaderExchange, ...] = exchanges

    def install(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._abandon)
        atexit.register(self._end)
        self._start_s = time.perf_counter() - self._began_s
        self._write()

    def _begin(self) -> None:
        """Installs all that finds and tries exchanges."""
        if self._show_all_frames is None:
            self._show_all_frames = leave_out_our_frames()
        for exchange in self._exchanges:
            exchange.install()
        self._hook.install()
        self._is_installed = True

    def _leave(self) -> None:
        """Takes everything out, so that the script runs as under python."""
        for exchange in reversed(self._exchanges):  # two of them replace the same function
            exchange.remove()
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        self._is_installed = False
        self._hook.remove()
        if self._show_all_frames is not None:
            self._show_all_frames()
            self._show_all_frames = None

    def _option_part(self, option: ProcessOption) -> OptionPart:
        part = OptionPart(option, **self._part_settings("process", option.name))
        self._use_earlier_refusal(part)
        return part

    def make_part(self, kind: str, name: str, exchanges: Sequence[str]) -> Part:
        part = Part(kind, name, exchanges, **self._part_settings(kind, name))
        self._parts.append(part)
        self._use_earlier_refusal(part)
        return part

    def _part_settings(self, kind: str, name: str) -> dict[str, Any]:
        earlier = self._earlier.faster.get(f"{kind}: {name}")
        return {"exact": self.exact, "changed": self._part_changed, "earlier": earlier}

    def _part_changed(self) -> None:
        if hasattr(self, "_windows"):  # else an earlier run's refusal, before the first step
            self._windows.restart()

    def _use_earlier_refusal(self, part: Part) -> None:
        if reason := self._earlier.refused.get(self._refusal_title(part)):
            part.refuse(f"an earlier run of this script found: {reason}")

    def _refusal_title(self, part: Part) -> str:
        return f"{part.title}, {self._arguments}" if part.kind == "process" else part.title

    @property
    def _known_parts(self) -> list[Part]:
        """The parts of the summary: options whose race hasn't begun are left out."""
        return [*self._parts, *(part for part in self._option_parts if part.stage != "proof")]

    def is_mine(self) -> bool:
        return not self._is_over and threading.get_ident() == self._thread

    def is_exchanging(self) -> bool:
        """Whether a call may be exchanged; a window without exchanges has none of hotloop's own work."""
        return self.is_mine() and not self._windows.is_plain

    @property
    def is_enabled(self) -> bool:
        return self._windows.enabled

    def is_choosing_threads(self) -> bool:
        return self._options.is_undecided("threads")

    def _abandon(self) -> None:
        """In a forked process: all calls are the script's own."""
        self._is_over = True
        for exchange in reversed(self._exchanges):
            exchange.abandon()
        self._remove_hooks()

    def _update_ended(self, optimizer: Any) -> None:
        if not self.is_mine():
            self._foreign_updates += 1
            if self._foreign_updates == _FOREIGN_UPDATES and not self._windows.steps:
                self._leave()
            return
        try:
            self._count_rested()
            if self._is_other_training:
                self._is_other_training = False
                if not self._is_installed:
                    if _kind(optimizer) in self._searched_kinds:
                        self._note_optimizer(optimizer)
                        self._hook.remove()
                        return
                    self._begin()
                self._returns += 1
                self._windows.search_step()
                self._options.restart()
            self._windows.update_ended(optimizer)
            now_s = time.monotonic()
            if self._modules.is_busy or now_s >= self._look_at_s:
                self._modules.step_ended(self._windows.steps)
            if self._last_optimizer is None or self._last_optimizer() is not optimizer:
                self._note_optimizer(optimizer)
            if now_s >= self._look_at_s:
                self._look_at_s = now_s + _LOOK_S
                self._options.check(self._windows.steps - self._first_step)
                self._choose_rest()
                if now_s - self._written_at > _WRITE_INTERVAL_S:
                    self._options.check_memory()
                    self._write()
        except Exception as error:
            raise_signal_error(error)
            self._fail(error)

    def _count_rested(self) -> None:
        updates, seconds = self._hook.rested()
        if updates:
            self._windows.rested(updates, seconds)

    def _note_optimizer(self, optimizer: Any) -> None:
        self._last_optimizer = weakref.ref(optimizer)
        if len(self._optimizers) < _MOST_OPTIMIZERS and all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer, self._optimizer_ended))
            self._kinds.add(_kind(optimizer))

    def _choose_rest(self) -> None:
        """Rests while no exchange needs the next steps, and leaves once nothing is used or undecided."""
        if self._windows.needs_steps or self._options.is_busy or self._workers.is_busy or self._modules.is_busy:
            return
        if self._windows.steps - self._first_step >= _SEEN_STEPS:
            self._optimizer_exchange.leave_refused()
            is_needed = self._options.is_checking or any(part.stage == "use" for part in self._option_parts)
            if not is_needed and all(exchange.is_over for exchange in self._exchanges):
                if all(part.stage == "off" for part in self._parts if part.kind != "module"):  # else freed undecided
                    self._searched_kinds |= self._kinds
                self._leave()
                return
        self._hook.rest(_REST_S)

    def _optimizer_ended(self, known: weakref.ref[Any]) -> None:
        """Begins anew after the script has freed an optimizer, since the next one may train something else.

        An optimizer of the same class with parameters of the same shapes, such as the next fold's, begins no new search.

        Python may call this at any time, so the next update does the work; the hook alone waits for one.
        """
        self._optimizers.remove(known)
        if self._is_over or self._returns >= _MOST_RETURNS or os.getpid() != self._process:
            return
        self._is_other_training = True
        self._first_step = self._windows.steps
        self._hook.install()

    def _fail(self, error: Exception) -> None:
        self._is_over = True
        self._options.end()
        self._leave()
        self._notes.append(f"all exchanges ended by an internal error of hotloop: {type(error).__name__}: {error}")

    def _can_begin_windows(self) -> bool:
        is_recording = self._loaders.is_recording and time.perf_counter() - self._began_s < _RECORDING_S
        is_used = any(part.stage == "use" for part in self._known_parts)
        return is_used and not is_recording and not self._modules.is_busy

    def _report_slower(self, line: str) -> None:
        was_busy = self._windows.was_busy()
        for part in self._known_parts:
            if part.stage == "use":
                part.was_busy = part.was_busy or was_busy
                part.is_decided = True
                part.take_back(line)

    def _end(self) -> None:
        """Writes the facts for the summary, and the faster exchanges for later runs."""
        if os.getpid() != self._process:
            return
        self._modules.end()
        self._workers.end()
        self._options.end_race()
        if not self._is_over:
            self._store()
        self._write()
        self._is_over = True

    def _store(self) -> None:
        """Stores the decisions for later runs."""
        parts, earlier = self._known_parts, self._earlier
        sure = [part for part in parts if not part.was_busy]
        used = {one.title: (one.exchange, one.ratio) for one in sure if one.stage == "use" and one.ratio is not None}
        slower = {part.title for part in sure if part.stage == "off"}
        found = Decisions(
            {title: known for title, known in earlier.faster.items() if title not in slower} | used,
            earlier.refused | {self._refusal_title(part): part.reason for part in sure if part.is_decided},
            earlier.plain | ({self._arguments: why} if (why := self._why_plain()) else {}),
        )
        failed: list[str] = []
        if _names(found) != _names(earlier):
            failed = write_decisions(self._cache, self._key, found)
        self._notes += failed
        in_use = {part.title for part in parts if part.stage == "use"}
        is_known = in_use <= found.faster.keys() if in_use else self._arguments in found.plain
        self._is_stored = is_known and not failed

    def _why_plain(self) -> str:
        """Returns why the next run of the script with the same arguments needs no hook; empty if an exchange may pay."""
        parts = self._known_parts
        has_failed = getattr(sys, "last_type", None) is not None  # an error of the script; the next run may be longer
        if has_failed or not self._windows.steps or any(part.stage == "use" or part.was_busy for part in parts):
            return ""
        if any("taken back" in note for part in parts if not part.is_decided for note in part.notes):
            return ""  # such as by a lack of memory
        undecided = [part.title for part in parts if part.stage in ("proof", "race")]
        if undecided:
            return f"an earlier run was too short for a decision on {undecided[0]}, so this one ran as under python"
        return "an earlier run found no faster exchange, so this one ran as under python"

    def _write(self) -> None:
        if os.getpid() != self._process:
            return
        self._written_at = time.monotonic()
        self._count_rested()
        used = not self._dry_run and not self._is_over
        facts = {
            "steps": self._windows.steps,
            "parts": [part.as_record(used=used) for part in self._known_parts],
            "ratio": self._windows.ratio_record(),
            "own_work_s": self._start_s + sum(part.cost_s for part in self._known_parts),
            "gained_s": self._windows.gained_s,
            "is_stored": self._is_stored,
            "notes": self._notes + [note for part in self._known_parts for note in [*part.notes, *_rounded(part)]],
        }
        with suppress(OSError):
            write_result(self._out, facts)


def _kind(optimizer: Any) -> Any:
    """Returns what equal trainings have in common: the optimizer's class, and the shapes and dtypes of its parameters."""
    groups = ([(value.shape, value.dtype) for value in group["params"]] for group in optimizer.param_groups)
    return type(optimizer), tuple(map(tuple, groups))


def _rounded(part: Part) -> list[str]:
    """Names the exchanges that changed results by rounding before they were refused."""
    if part.stage == "use" or not part.rounded:
        return []
    return [f"{part.title}: {' and '.join(part.rounded)} computed some of the steps, so results can differ by rounding"]


def _names(decisions: Decisions) -> tuple[Any, ...]:
    return decisions.faster.keys(), decisions.refused.keys(), decisions.plain.keys()
