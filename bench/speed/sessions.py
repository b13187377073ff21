"""Sessions of workloads, one after the other, with what is searched and compiled before them."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.speed.caching import begun, filled, own_cache
from bench.speed.data import samples
from bench.speed.journal import Journal
from bench.speed.lanes import OURS, UNSEARCHED, Lane
from bench.speed.running import Marked, Peer, command
from bench.speed.searching import search
from bench.speed.timetable import Timetable
from bench.speed.turns import Session, grouped, in_turns
from bench.speed.workloads import HOME, Workload
from hotloop.core.hardware import machine
from hotloop.core.hardware.machine_load import CpuUsage, cores_used_by_others

Tell = Callable[[str], None]

STEPS = 10_000_000
"""Of the run that hotloop's `auto` is asked to plan: a long one, since its steady state is compared; the bench ends it
before. What it plans for a run of minutes shows in `--whole-run`."""

_LEAST = 0.5
"""Of what a search should take: with less time left it isn't begun."""


def absent(lane: Lane) -> str:
    lacking = [name for name in lane.needs if importlib.util.find_spec(name) is None]
    return f"{', '.join(lacking)} isn't installed: pip install -e .[bench]" if lacking else ""


@dataclass
class Bench:
    """What is measured, and where that is kept.

    Attributes:
        device: where all of them train.
        short: whether peers may be left out for lack of time.
        table: of the sessions under way.
        failed: (workload, peer) -> why its search came to nothing.
    """

    workloads: Sequence[Workload]
    lanes: Sequence[Lane]
    journal: Journal
    tell: Tell
    device: str = "cpu"
    short: bool = False
    table: Timetable = field(default_factory=lambda: Timetable(None, {}, {}))
    failed: dict[tuple[str, str], str] = field(default_factory=dict)

    def able(self, workload: Workload) -> list[Lane]:
        """Those that can run it; who compiles is measured last."""
        able = [lane for lane in self.lanes if not self.missing(workload, lane)]
        return sorted(able, key=lambda lane: lane.compiles)

    def missing(self, workload: Workload, lane: Lane) -> str:
        """Why it isn't run there; empty if it is."""
        return lane.missing(workload, self.device, short=self.short) or absent(lane)

    def plan(self, seconds: float | None, share: float) -> None:
        """Shares the time out, for one session of each workload and the searches that are due.

        Args:
            seconds: for everything; None without a limit.
            share: of the workloads' own budgets.
        """
        due = [(workload, lane) for workload in self.workloads for lane in self._due(workload)]
        due.sort(
            key=lambda one: one[1].name != OURS
        )  # without its search hotloop is measured as it never runs for long
        windows_s = {workload.name: share * workload.budget_s for workload in self.workloads}
        searches_s = {(workload.name, lane.name): lane.search_s(workload) for workload, lane in due}
        self.table = Timetable(seconds, windows_s, searches_s)
        brief = {lane.name for lane in self.lanes if lane.brief}
        for workload, name in self.table.left_out:
            why = (
                "no time to start it beforehand: its cache is cold"
                if name in brief
                else self.unsearched(workload, name)
            )
            self.tell(f"{workload} {name}: {why}")

    def unsearched(self, workload: str, name: str) -> str:
        """Why there was no search; empty if there was, or none is needed."""
        needs_s = self.table.left_out.get((workload, name))
        if needs_s is not None:
            takes = f"{needs_s:.0f} s" if needs_s < 90 else f"{needs_s / 60:.0f} min"
            return f"no time for its search, which takes about {takes}: left to --search, or to --full"
        return self.failed.get((workload, name), "")

    def search(self, workload: Workload) -> None:
        """Has all who search or compile do so, each into its own cache, unless they did before."""
        for lane in self._due(workload):
            if self.unsearched(workload.name, lane.name):
                continue
            limit_s = self.table.search_s(workload.name, lane.name)
            if limit_s is not None and limit_s < _LEAST * lane.search_s(workload):
                self.failed[workload.name, lane.name] = "no time was left for its search"
                continue
            self.tell(f"{workload.name} {lane.name}: starts alone, to search and compile")
            script = command(lane.module, workload.name, lane.options, _epochs(workload, STEPS), self.device)
            why = search(f"{workload.name} {lane.name}", script, self._folder(workload, lane), limit_s, self.tell)
            if why:
                self.failed[workload.name, lane.name] = f"its search came to nothing: {why}"

    def left(self, workload: Workload, number: int) -> dict[str, Lane]:
        """Who wasn't in that session yet, and whom they are compared with; nobody if all were."""
        known = {name for row in self.journal.of(**_session(workload, number)) for name in row["lanes"]}
        able = {lane.name: lane for lane in self.able(workload)}
        return {} if known >= able.keys() else {n: lane for n, lane in able.items() if n == OURS or n not in known}

    def measure(self, workload: Workload, session: Session, number: int) -> None:
        """One session of a workload, in as many groups as memory needs, of those that weren't in it yet."""
        which, left = _session(workload, number), self.left(workload, number)
        done = len(self.journal.of(**which))
        free_bytes = machine.device_free_bytes(torch.device("cpu")) or 0  # within the container's limits
        groups = grouped(list(left), workload.together(free_bytes), OURS)
        until = time.monotonic() + session.budget_s
        for place, group in enumerate(groups):
            self.tell(f"{workload.name}: {workload.title} ({', '.join(group)})")
            used = CpuUsage.now()
            budget_s = (until - time.monotonic()) / (len(groups) - place)
            found = self._in_turns(workload, [left[name] for name in group], replace(session, budget_s=budget_s))
            others = cores_used_by_others(used, CpuUsage.now())
            self.journal.add(
                {**which, "group": done + place},
                lanes={name: asdict(marked) for name, marked in found.items()},
                cores_of_others=round(others, 2),
            )

    def _in_turns(self, workload: Workload, group: Sequence[Lane], session: Session) -> dict[str, Marked]:
        """Without those that have to search or compile first, and could not."""
        why = {lane.name: self.unsearched(workload.name, lane.name) for lane in group}
        able = {lane.name: lane for lane in group if lane.goes_on_unsearched or not why[lane.name]}

        def begin(name: str) -> Peer:
            return self._begun(workload, able[name], searched=not why[name])

        found = in_turns(list(able), begin, session, self.tell)
        for name, marked in found.items():
            marked.unsearched = "" if able[name].brief else why[name]
        return found | {name: Marked(failure=why[name]) for name in why if name not in able}

    def _begun(self, workload: Workload, lane: Lane, *, searched: bool) -> Peer:
        """Its process, with its own cache."""
        folder = self._folder(workload, lane)
        options = lane.options if searched or lane.brief else UNSEARCHED
        script = command(lane.module, workload.name, options, _epochs(workload, STEPS), self.device)
        environment, found_as = begun(folder)
        peer = Peer(script, environment)
        if lane.compiles and (searched or lane.brief):
            peer.marked.cache, peer.marked.first_start = found_as, filled(folder)
        return peer

    def _folder(self, workload: Workload, lane: Lane) -> Path:
        return own_cache(HOME, workload.name, lane.module, *lane.options, self.device)

    def _due(self, workload: Workload) -> list[Lane]:
        """Those that have to search or compile, and didn't yet."""
        return [one for one in self.able(workload) if one.compiles and filled(self._folder(workload, one)) is None]


def _session(workload: Workload, number: int) -> dict[str, Any]:
    return {"kind": "session", "workload": workload.name, "session": number}


def _epochs(workload: Workload, steps: int) -> int:
    return math.ceil(steps * workload.batch / samples(workload.data))


def sessions(bench: Bench, rounds: int, count: int, seconds: float | None, share: float) -> None:
    """So many sessions of each workload that weren't measured yet; see `Bench.plan`."""
    for number in range(count):
        bench.plan(seconds, share)
        for workload in bench.workloads:
            if bench.left(workload, number):
                bench.search(workload)
                bench.measure(workload, Session(bench.table.session_s(workload.name), rounds), number)


def searches(bench: Bench) -> None:
    """The searches alone, as long as they take."""
    bench.plan(None, 1.0)
    for workload in bench.workloads:
        bench.search(workload)
