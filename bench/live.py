"""Whole runs with `--plan auto`, beside the best fixed plan in hindsight, the default plan and the tutorial's loop.

    python -m bench.live --record                     W1 to W5, runs of about 1 and 2 minutes, 6 rounds
    python -m bench.live W1 W3 --minutes 10 --rounds 6
    python -m bench.live --quick                      one short round of W4: shows that the command works

A run's time is that of its process, from its start to the end of training. Each run begins with an empty cache, so the
time of a fixed compiled plan includes its compilation. All lanes of a round run one after the other, in the opposite order
in each second round; ratios are of runs of the same round, with the 95 % interval from 6 rounds on. The best fixed plan is
the one with the lowest median of all rounds. Needs a quiet machine; Ctrl-C, and the same command goes on.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.claim import circumstances, write_claim
from bench.speed.caching import own_cache
from bench.speed.data import lay_down, samples
from bench.speed.journal import Journal, Row
from bench.speed.lanes import PEERS, TRAIN_AUTO, TUTORIAL, Lane, ours
from bench.speed.running import Failed, command
from bench.speed.start import lay_down_start
from bench.speed.table import ratio_text, rows
from bench.speed.whole import LONGEST, epochs_for, run_once
from bench.speed.workloads import HOME, WORKLOADS, Workload
from hotloop.core.files.atomic_files import write_atomic
from hotloop.errors import HotloopError
from hotloop.tuning.races.statistics import Ratio, ratio_of

LIVE, DEFAULT = TRAIN_AUTO, "unasked"

_WHOLE = "compile=package,allocator=keep"

FIXED = {
    "W1": (f"{_WHOLE},rewrites=all", f"{_WHOLE},rewrites=all,layout=channels_last", _WHOLE),
    "W2": (f"{_WHOLE},rewrites=all", f"{_WHOLE},rewrites=all,layout=channels_last", _WHOLE),
    "W3": (f"{_WHOLE},rewrites=all", f"{_WHOLE},rewrites=all,layout=channels_last", _WHOLE),
    "W4": (f"{_WHOLE},rewrites=mm_by_onednn", _WHOLE),
    "W5": (f"{_WHOLE},rewrites=mm_by_onednn", _WHOLE),
}
"""Plans that a user would choose from by hand, beside the baseline and the default."""

_MOST_LOSS = {"short": 1.15, "long": 1.05}
"""Goals: seconds of a live run over those of the best fixed plan, of runs below and from 10 minutes."""

_LONG_MINUTES = 10.0

_ROUNDS_OF_INTERVAL = 6
_LOWEST = 0.97
_COLD_GOAL, _COLD_MINUTES = 1.9, 2.0


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.live", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help="some of " + ", ".join(FIXED))
    parser.add_argument("--minutes", default="1,2", help="of the tutorial's loop, separated by commas; default 1,2")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--fixed", type=int, default=3, help="compiled plans to measure, the likely fastest first")
    parser.add_argument("--quick", action="store_true", help="one round of W4 of 20 s")
    parser.add_argument("--fresh", action="store_true", help="forget what the journal has")
    parser.add_argument("--journal", type=Path, default=HOME / "live.jsonl")
    parser.add_argument("--record", action="store_true", help="write a claim")
    options = parser.parse_args(arguments)
    if options.quick:
        options.workloads, options.minutes, options.rounds = options.workloads or ["W4"], "0.33", 1
        options.journal, options.fresh = HOME / "live-quick.jsonl", True
    if unknown := [name for name in options.workloads if name not in FIXED]:
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(FIXED)}")
    try:
        options.lengths = [float(part) for part in options.minutes.split(",")]
    except ValueError:
        parser.error(f"--minutes {options.minutes}: expected numbers, separated by commas")
    if options.rounds < 1 or min(options.lengths) <= 0:
        parser.error("--rounds and --minutes: expected numbers above 0")
    return options


def lanes_of(workload: Workload, rounds: int, fixed: int) -> list[Lane]:
    """The tutorial's loop, the live run, the default plan, fixed plans, and the baseline if its interval can be known."""
    baseline = ("baseline",) if rounds >= _ROUNDS_OF_INTERVAL else ()
    plans = (LIVE, DEFAULT, *baseline, *FIXED[workload.name][:fixed])
    return [next(peer for peer in PEERS if peer.name == TUTORIAL), *(ours(plan, plan) for plan in plans)]


def measure(options: argparse.Namespace, journal: Journal) -> None:
    for minutes in options.lengths:
        for name in options.workloads or FIXED:
            workload = WORKLOADS[name]
            lay_down(workload.data)
            lay_down_start(workload, samples(workload.data))
            known = journal.of(workload=name, minutes=minutes)
            epochs = known[0]["epochs"] if known else epochs_for(workload, 60 * minutes, HOME, "cpu")
            print(f"{name}, {minutes:g} min: {epochs} epochs", file=sys.stderr, flush=True)
            for number in range(options.rounds):
                for lane in lanes_of(workload, options.rounds, options.fixed)[:: -1 if number % 2 else 1]:
                    key = {"workload": name, "minutes": minutes, "round": number, "lane": lane.name}
                    if not journal.has(key):
                        _measure_run(workload, lane, epochs, 60 * minutes, key, journal)


def _measure_run(
    workload: Workload, lane: Lane, epochs: int, seconds: float, key: dict[str, Any], journal: Journal
) -> None:
    folder = own_cache(HOME, workload.name, "live", lane.module, *lane.options)
    shutil.rmtree(folder, ignore_errors=True)
    script = command(lane.module, workload.name, lane.options, epochs, "cpu")
    marked = run_once(script, folder, LONGEST * seconds + 600)
    journal.add(key, epochs=epochs, **asdict(marked))
    took = marked.failure or f"{marked.total_s:.1f} s, {marked.plan or ''}"
    print(f"  round {key['round']}, {lane.name}: {took}", file=sys.stderr, flush=True)


def compared(own: Sequence[Row]) -> dict[str, Any] | None:
    """Compares the live runs of one workload and length with the others; None without a live run.

    Returns:
        `best`, the fixed plan with the lowest median; and how many times as fast the live run is as `best_fixed`,
        `default`, `baseline` and `tutorial`, each with its interval.
    """
    seconds: dict[str, dict[int, float]] = {}
    for row in own:
        if row["total_s"] and not row["failure"]:
            seconds.setdefault(row["lane"], {})[row["round"]] = row["total_s"]
    fixed = {lane: each for lane, each in seconds.items() if lane not in (LIVE, TUTORIAL)}
    if LIVE not in seconds or not fixed:
        return None
    best = min(fixed, key=lambda lane: statistics.median(fixed[lane].values()))
    others = {"best_fixed": best, "default": DEFAULT, "baseline": "baseline", "tutorial": TUTORIAL}
    ratios = {name: _ratio(seconds[lane], seconds[LIVE]) for name, lane in others.items() if lane in seconds}
    medians = {lane: statistics.median(each.values()) for lane, each in seconds.items()}
    return {"best": best, "median_s": medians, "times_as_fast": {name: asdict(one) for name, one in ratios.items()}}


def _ratio(other: dict[int, float], live: dict[int, float]) -> Ratio:
    common = sorted(other.keys() & live.keys())
    return ratio_of([other[number] for number in common], [live[number] for number in common], 0.95)


def figures(journal: Journal) -> list[dict[str, Any]]:
    """The comparison of each workload and length, and whether its goals are reached."""
    found = []
    for workload, minutes in dict.fromkeys((row["workload"], row["minutes"]) for row in journal.rows):
        own = journal.of(workload=workload, minutes=minutes)
        if (one := compared(own)) is None:
            continue
        ratios = {name: Ratio(**ratio) for name, ratio in one["times_as_fast"].items()}
        allowed = _MOST_LOSS["long" if minutes >= _LONG_MINUTES else "short"]
        goals = {f"within {allowed - 1:.0%} of the best fixed plan": 1 / ratios["best_fixed"].median <= allowed}
        if "baseline" in ratios and ratios["baseline"].high is not None:
            goals[f"not surely below {_LOWEST} of the baseline"] = ratios["baseline"].high >= _LOWEST
        if minutes == _COLD_MINUTES and "tutorial" in ratios:
            goals[f"{_COLD_GOAL} times the tutorial's loop"] = ratios["tutorial"].median >= _COLD_GOAL
        found.append({"workload": workload, "minutes": minutes, **one, "goals": goals})
    return found


def table(found: Sequence[dict[str, Any]], failed: Sequence[Row]) -> str:
    head = (
        "network",
        "run",
        "best fixed plan",
        "times as fast as it",
        "as the default",
        "as the tutorial's loop",
        "goals",
    )
    lines = list(rows(head, [_cells(one) for one in found]))
    lines += [
        f"- **failed**: {row['workload']}, {row['lane']}, round {row['round']}: {row['failure']}" for row in failed
    ]
    return "\n".join(["# Whole runs with `--plan auto`", "", *lines, ""])


def _cells(one: dict[str, Any]) -> list[str]:
    ratios = {name: Ratio(**ratio) for name, ratio in one["times_as_fast"].items()}
    shown = [ratio_text(ratios[name]) if name in ratios else "" for name in ("best_fixed", "default", "tutorial")]
    goals = "; ".join(f"{name}: {'yes' if reached else '**no**'}" for name, reached in one["goals"].items())
    return [one["workload"], f"{one['minutes']:g} min", one["best"], *shown, goals]


def failures(journal: Journal) -> Iterator[Row]:
    return (row for row in journal.rows if row["failure"])


def main() -> int:
    options = parsed()
    now = circumstances()
    spoken = " ".join(["python -m bench.live", *sys.argv[1:]])
    setup = {"versions": now["versions"], "machine": now["machine"], "threads": now["threads"]}
    try:
        measured = {"command": spoken, **now}
        journal = Journal(options.journal, resume=True, fresh=options.fresh, setup=setup, measured=measured)
        measure(options, journal)
    except (HotloopError, Failed) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on with {options.journal}", file=sys.stderr)
        return 130
    found, failed = figures(journal), list(failures(journal))
    text = table(found, failed)
    print(text)
    if options.record:
        then = dict(journal.measured or {"command": spoken, **now})
        folder = write_claim("live", then.pop("command"), None, {"figures": found, "rows": journal.rows}, then)
        write_atomic(folder / "README.md", text)
        print(folder, file=sys.stderr)
    return int(any(row["lane"] == LIVE for row in failed))


if __name__ == "__main__":
    sys.exit(main())
