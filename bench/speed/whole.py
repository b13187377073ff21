"""A whole run, from the process's start to the end of training: the tutorial's loop, its rivals, and hotloop with an empty
cache, again until it has compiled, and with the cache that these runs have filled, in turn."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from bench.speed.caching import Filled, begun, caches, note_filled, own_cache
from bench.speed.data import samples
from bench.speed.journal import Journal, Row
from bench.speed.lanes import OURS, TUTORIAL, Lane, ours
from bench.speed.running import Failed, Marked, Peer, command
from bench.speed.table import ratio_text, rows
from bench.speed.targets import RUN_GOALS, SMALL, Target, mean_of
from bench.speed.turns import Session, in_turns, step_times
from bench.speed.workloads import Workload
from hotloop.tuning.races.statistics import Ratio, ratio_of

Tell = Callable[[str], None]

LONGEST = 20.0
"""Times what the tutorial's loop should take, after which a run is ended."""

COLD, WARM = "cold", "warm"


def lanes_of(peers: Sequence[Lane], plans: Sequence[str]) -> list[Lane]:
    """Those who take part; see `_states`."""
    return [*peers, *(ours(plan, f"{OURS} {plan}") for plan in plans)]


def epochs_for(workload: Workload, seconds: float, home: Path, device: str) -> int:
    """So many that the tutorial's loop takes that long here."""

    def begin(name: str) -> Peer:
        return Peer(
            command(name, workload.name, (), 1000, device), caches(own_cache(home, workload.name, name, device))
        )

    marked = in_turns([TUTORIAL], begin, Session(60.0, rounds=4))[TUTORIAL]
    if not marked.windows:
        raise Failed(f"{TUTORIAL}: {marked.failure}")
    step_s = statistics.median(step_times(vars(marked)))
    return max(1, round(seconds / (step_s * samples(workload.data) / workload.batch)))


def whole_runs(
    workload: Workload,
    lanes: Sequence[Lane],
    seconds: float,
    rounds: int,
    home: Path,
    journal: Journal,
    tell: Tell,
    device: str = "cpu",
) -> None:
    """Runs each lane so many times, and writes each run to the journal as it ends."""
    begun = journal.of(kind="whole", workload=workload.name)
    epochs = begun[0]["epochs"] if begun else epochs_for(workload, seconds, home, device)
    tell(f"{workload.name}: {epochs} epochs")
    limit_s = LONGEST * seconds
    for number in range(rounds):
        for lane in lanes[:: -1 if number % 2 else 1]:
            if lane.missing(workload, device):
                continue
            folder = own_cache(home, workload.name, "whole", lane.module, *lane.options, device, f"{epochs} epochs")
            script = command(lane.module, workload.name, lane.options, epochs, device)
            key = {"kind": "whole", "workload": workload.name, "round": number}
            last = f"{lane.name}, {WARM}" if lane.compiles else lane.name
            known = [row for row in journal.of(**key) if row["lane"].partition(", ")[0] == lane.name]
            if any(row["failure"] or row["lane"] == last for row in known):
                continue
            for name, marked in _states(lane, folder, partial(run_once, script, folder, limit_s)):
                journal.add({**key, "lane": name}, epochs=epochs, **asdict(marked))
                tell(f"{workload.name} {name}: {marked.failure or f'{marked.total_s:.1f} s'}")


def _states(lane: Lane, folder: Path, run: Callable[[], Marked]) -> Iterator[tuple[str, Marked]]:
    """Runs of a peer, each with its name; one that compiles begins with an empty cache, and goes on with what that leaves.

    Where runs were stopped before the `warm` run, both are made again, and of rows with the same name the last counts.
    """
    if not lane.compiles:
        yield lane.name, run()
        return
    shutil.rmtree(folder, ignore_errors=True)
    for state in (COLD, WARM):
        marked = run()
        yield f"{lane.name}, {state}", marked
        if marked.failure:
            return


def run_once(script: Sequence[str], folder: Path, limit_s: float) -> Marked:
    """Runs a peer's script to its end, with the cache in `folder`."""
    environment, found_as = begun(folder)
    peer = Peer(script, environment, in_turns=False)
    try:
        peer.begin(limit_s)
        peer.end(limit_s, ordered=False)
        if found_as != WARM:
            note_filled(folder, Filled(peer.marked.startup_s or 0.0, found_as, peer.marked.start_peak_bytes))
    except Failed as error:
        peer.marked.failure = str(error)
    finally:
        peer.close()
    return peer.marked


def whole_table(found: Sequence[Row]) -> str:
    """Seconds of whole runs, and how many times as fast as the tutorial's loop they were, round by round."""
    return "\n".join(
        line for workload in dict.fromkeys(row["workload"] for row in found) for line in _of(workload, found)
    )


def _of(workload: str, found: Sequence[Row]) -> Iterator[str]:
    own = [row for row in found if row["workload"] == workload]
    runs: dict[str, list[Row]] = {row["lane"]: [] for row in own}
    for row in own:
        runs[row["lane"]].append(row)
    yield f"## {workload}, whole runs of {own[0]['epochs']} epochs\n"
    tutorial = _seconds(runs.get(TUTORIAL, []))
    yield from rows(
        ("peer", "whole run", "times as fast as the tutorial's loop", "first step after", "test accuracy", "plan"),
        [_cells(lane, each, tutorial) for lane, each in runs.items()],
    )
    yield ""
    yield from (f"- **failed**: {row['lane']}, run {row['round']}: {row['failure']}" for row in own if row["failure"])


def whole_targets(found: Sequence[Row], device: str) -> list[Target]:
    """What a whole run on a CPU is to reach with each of hotloop's lanes, in the mean and for each workload."""
    lanes = dict.fromkeys(row["lane"] for row in found if device == "cpu" and row["lane"].startswith(OURS))
    goals = [(lane, goal) for lane in lanes for state, goal in RUN_GOALS.items() if lane.endswith(f", {state}")]
    workloads = dict.fromkeys(row["workload"] for row in found)
    single = [
        Target(f"{workload}, whole run over tutorial, {lane}", goal, _reached(found, lane, workload))
        for lane, goal in goals
        for workload in workloads
    ]
    means = [(lane, goal, mean_of(SMALL, partial(_reached, found, lane))) for lane, goal in goals]
    return [
        *(Target(f"W1 to W5, whole run, mean over tutorial, {lane}", goal, mean) for lane, goal, mean in means if mean),
        *(one for one in single if one.reached is not None),
    ]


def _reached(found: Sequence[Row], lane: str, workload: str) -> float | None:
    """How many times as fast as the tutorial's loop; None where one of them didn't go through."""
    own, tutorial = (
        _seconds([row for row in found if (row["workload"], row["lane"]) == (workload, name)])
        for name in (lane, TUTORIAL)
    )
    against = _against(own, tutorial)
    return against and against.median


def _against(seconds: Mapping[int, float], tutorial: Mapping[int, float]) -> Ratio | None:
    """How many times as fast as the tutorial's loop, of rounds in which both went through."""
    common = sorted(seconds.keys() & tutorial.keys())
    return ratio_of([tutorial[n] for n in common], [seconds[n] for n in common], 0.95) if common else None


def _seconds(each: Sequence[Row]) -> dict[int, float]:
    """By round, of runs that went through."""
    return {row["round"]: row["total_s"] for row in each if row["total_s"] and not row["failure"]}


def _cells(lane: str, each: Sequence[Row], tutorial: Mapping[int, float]) -> list[str]:
    seconds = _seconds(each)
    if not seconds:
        return [lane, "", "", "", "", ""]
    last = next(row for row in reversed(each) if row["round"] in seconds)
    against = _against(seconds, tutorial)
    return [
        lane,
        f"{statistics.median(seconds.values()):.1f} s",
        ratio_text(against) if against else "",
        f"{last['startup_s']:.1f} s",
        f"{last['test_accuracy']:.4f}",
        last["plan"] or "",
    ]
