"""All exchanges of one script's process, their windows, and the facts for the summary."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from hotloop.exchanges.exchange_cache import read_exchanges, script_key, write_exchanges
from hotloop.exchanges.loader_exchange import LoaderExchange
from hotloop.exchanges.modules.module_exchange import ModuleExchange
from hotloop.exchanges.optimizer_exchange import OptimizerExchange
from hotloop.exchanges.options.option_races import OptionPart, OptionRaces
from hotloop.exchanges.options.process_options import ProcessOption, process_options
from hotloop.exchanges.part import Part
from hotloop.exchanges.windows.step_windows import StepWindows
from hotloop.exchanges.workers.worker_exchange import WorkerExchange
from hotloop.profiler.base.transparency import hide_from_compiler
from hotloop.scripts.child import write_result
from hotloop.scripts.traceback_frames import raise_signal_error

_WRITE_INTERVAL_S = 30.0
"""Seconds between two writes of the facts, for scripts that are killed."""


class ExchangeSession:
    """Installs the exchanges after torch's import, in the thread that will train.

    Args:
        settings: as for `wait_for_torch`.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._out, self._exact, self._dry_run = settings["out"], settings["exact"], settings["dry_run"]
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._parts: list[Part] = []
        self._cache, self._key = Path(settings["cache"]), script_key(settings["script"], is_exact=self._exact)
        self._earlier, self._notes = read_exchanges(self._cache, self._key)
        self._is_over = self._is_stored = False
        self._began_s, self._start_s = settings["began_s"], 0.0
        self._written_at = time.monotonic()
        accepts_reduced = settings["accept"] == "reduced-precision"
        options = process_options(exact=self._exact, accepts_reduced=accepts_reduced)
        self._option_parts = [self._option_part(option) for option in options]
        self._options = OptionRaces(self._option_parts)
        self._windows = StepWindows(
            self._can_begin_windows,
            self._report_slower,
            dry_run=self._dry_run,
            switched=self._options.switch,
            races=lambda step_s: self._workers.races_now() or self._options.step_ended(step_s),
        )
        self._modules = ModuleExchange(
            self._make_part,
            self._is_exchanging,
            self._is_enabled,
            exact=self._exact,
            is_waiting=lambda: self._options.is_undecided("threads"),
        )
        self._workers = WorkerExchange(self._make_part, self._is_mine, self._is_enabled)
        self._exchanges: list[OptimizerExchange | LoaderExchange | ModuleExchange | WorkerExchange] = [
            self._modules,
            self._workers,
            OptimizerExchange(self._make_part, self._is_exchanging, self._is_enabled),
            LoaderExchange(self._make_part, self._is_exchanging, self._is_enabled),
        ]

    def install(self) -> None:
        for exchange in self._exchanges:
            exchange.install()
        register_optimizer_step_post_hook(hide_from_compiler(self._update_ended))
        os.register_at_fork(after_in_child=self._abandon)
        atexit.register(self._end)
        self._start_s = time.perf_counter() - self._began_s
        self._write()

    def _option_part(self, option: ProcessOption) -> OptionPart:
        part = OptionPart("process", option.name, [option.exchange], **self._part_settings("process", option.name))
        part.option = option
        return part

    def _make_part(self, kind: str, name: str, exchanges: Sequence[str]) -> Part:
        part = Part(kind, name, exchanges, **self._part_settings(kind, name))
        self._parts.append(part)
        return part

    def _part_settings(self, kind: str, name: str) -> dict[str, Any]:
        earlier = self._earlier.get(f"{kind}: {name}")
        return {"exact": self._exact, "changed": lambda: self._windows.restart(), "earlier": earlier}

    @property
    def _known_parts(self) -> list[Part]:
        """The parts of the summary: options whose race hasn't begun are left out."""
        return [*self._parts, *(part for part in self._option_parts if part.stage != "proof")]

    def _is_mine(self) -> bool:
        return not self._is_over and threading.get_ident() == self._thread

    def _is_exchanging(self) -> bool:
        """Whether a call may be exchanged; a window without exchanges has none of hotloop's own work."""
        return self._is_mine() and not self._windows.is_plain

    def _is_enabled(self) -> bool:
        return self._windows.enabled

    def _abandon(self) -> None:
        """In a forked process: all calls are the script's own."""
        self._is_over = True
        self._workers.abandon()

    def _update_ended(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if not self._is_mine():
            return
        try:
            self._windows.update_ended(optimizer)
            self._modules.step_ended(self._windows.steps)
            if time.monotonic() - self._written_at > _WRITE_INTERVAL_S:
                self._options.check_memory()
                self._write()
        except Exception as error:
            raise_signal_error(error)
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._is_over = True
        self._options.end()
        self._notes.append(f"all exchanges ended by an internal error of hotloop: {type(error).__name__}: {error}")

    def _can_begin_windows(self) -> bool:
        return any(part.stage == "use" for part in self._known_parts)

    def _report_slower(self, line: str) -> None:
        was_busy = self._windows.was_busy()
        for part in self._known_parts:
            if part.stage == "use":
                part.was_busy = part.was_busy or was_busy
                part.take_back(line)

    def _end(self) -> None:
        """Writes the facts for the summary, and the faster exchanges for later runs."""
        if os.getpid() != self._process:
            return
        self._modules.end()
        self._workers.end()
        found = {
            part.title: (part.exchange, ratio)
            for part in self._known_parts
            if part.stage == "use" and not part.was_busy and (ratio := part.ratio) is not None
        }
        slower = {part.title for part in self._known_parts if part.stage == "off" and not part.was_busy}
        stored = {title: known for title, known in self._earlier.items() if title not in slower} | found
        if stored.keys() != self._earlier.keys():
            failed = write_exchanges(self._cache, self._key, stored)
            self._notes += failed
            stored = self._earlier if failed else stored
        used = {part.title for part in self._known_parts if part.stage == "use"}
        self._is_stored = bool(used) and used <= stored.keys()
        self._write()

    def _write(self) -> None:
        if os.getpid() != self._process:
            return
        self._written_at = time.monotonic()
        used = not self._dry_run and not self._is_over
        facts = {
            "steps": self._windows.steps,
            "parts": [part.as_record(used=used) for part in self._known_parts],
            "ratio": self._windows.ratio_record(),
            "own_work_s": self._start_s + sum(part.cost_s for part in self._known_parts),
            "gained_s": self._windows.gained_s,
            "is_stored": self._is_stored,
            "notes": self._notes + [note for part in self._known_parts for note in part.notes],
        }
        with suppress(OSError):
            write_result(self._out, facts)
