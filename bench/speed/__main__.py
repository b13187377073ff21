"""hotloop beside what a user would pick instead, on this machine, in one run.

    make bench                                  sets up .venv-bench, then: python -m bench.speed
    python -m bench.speed W1 W4                 a part of the workloads, within their share of the half hour
    python -m bench.speed --peers tutorial,lightning --plans auto/baseline
    python -m bench.speed --search              what hotloop searches, races and proves beforehand, as long as it takes
    python -m bench.speed --full                several sessions each, longer; Ctrl-C, and the same command goes on
    python -m bench.speed --whole-run 120       whole runs that take the tutorial's loop 120 s, everything included
    python -m bench.speed --table FILE          the tables of what was measured before
    python -m bench.speed --record              writes the figures to claims/ as well

Each peer is a process of its own, with the threads that the machine gives it (OMP_NUM_THREADS stays as it is, unset for
a figure worth quoting). All peers of a workload are in memory together and train in turn, a window of the same steps
each, so that every ratio is of two windows that lie side by side. Needs a quiet machine.

Who searches for a fast plan, or compiles, does so alone and before, into a cache of its own in .bench/, and is measured
with what it keeps there; how long that took is shown as its `cold` start. Half an hour has time for the searches of small
networks. Where there is none left, hotloop is measured without, which is said; --search has them made ahead, --full
makes all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.claim import write_claim
from bench.speed.data import lay_down
from bench.speed.journal import Journal
from bench.speed.lanes import OURS, PEERS, TUTORIAL, Lane, ours
from bench.speed.limits import limit_of
from bench.speed.picture import draw
from bench.speed.sessions import STEPS, Bench, absent, searches, sessions
from bench.speed.summary import Summary, summary
from bench.speed.table import markdown
from bench.speed.whole import lanes_of, whole_runs, whole_table
from bench.speed.workloads import HOME, WORKLOADS
from hotloop.errors import HotloopError
from hotloop.files import write_atomic
from hotloop.plan import BASELINE
from hotloop.probe import machine

FULL_SESSIONS = 5
FULL_BUDGET = 3.0
"""Times the short bench's."""

MOST_S = 28 * 60.0
"""Of a short bench, which ends within half an hour."""

AUTO = "auto"
"""hotloop's plan where nothing else is asked for."""

WHOLE_PEERS = (TUTORIAL, "lightning")


def told(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help="some of " + ", ".join(WORKLOADS))
    parser.add_argument("--peers", help="some of " + ", ".join(peer.name for peer in PEERS))
    parser.add_argument(
        "--plans",
        help="of hotloop: auto, tune, baseline or axis=value,...; separated by /; default auto",
    )
    parser.add_argument(
        "--search", action="store_true", help="search and compile ahead of a bench, and measure nothing"
    )
    parser.add_argument("--full", action="store_true", help=f"{FULL_SESSIONS} sessions of each workload, resumable")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier --full or --whole-run measured")
    parser.add_argument("--minutes", type=float, help="of a session of all workloads asked for; default at most 28")
    parser.add_argument("--rounds", type=int, help="of windows, or of whole runs")
    parser.add_argument("--whole-run", type=float, metavar="SECONDS", help="of the tutorial's loop")
    parser.add_argument("--journal", type=Path, help="where to keep what was measured; default .bench/<kind>.jsonl")
    parser.add_argument("--table", type=Path, metavar="JOURNAL", help="measure nothing, print its tables")
    parser.add_argument("--record", action="store_true", help="write a claim")
    parser.add_argument("--name", default="speed-cpu", help="of the claim")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.workloads if name not in WORKLOADS]
    unknown += [name for name in (options.peers or "").split(",") if name and name not in {p.name for p in PEERS}]
    if unknown:
        parser.error(f"{', '.join(unknown)}: neither a workload nor a peer; see --help")
    return options


def chosen_peers(names: str | None, default: Sequence[str]) -> list[Lane]:
    """In the order of `PEERS`; the tutorial's loop is always one, since it says how long windows are."""
    asked = {TUTORIAL, *(names.split(",") if names else default)}
    return [peer for peer in PEERS if peer.name in asked]


def own_lanes(plans: str | None) -> list[Lane]:
    """hotloop's lanes; the first is what the others are compared with."""
    asked = (plans or AUTO).split("/")
    return [ours(plan, OURS if not number else f"{OURS}:{plan}") for number, plan in enumerate(asked)]


def seconds_of(options: argparse.Namespace, bench: Bench) -> tuple[float | None, float]:
    """Of a session of all workloads, and the share of their own budgets that this leaves them."""
    windows_s = sum(workload.budget_s for workload in bench.workloads)
    if options.minutes:
        return 60 * options.minutes, min(1.0, 60 * options.minutes / windows_s)
    if options.full:
        return None, FULL_BUDGET
    searches_s = sum(lane.search_s(one) for one in bench.workloads for lane in bench.able(one) if lane.compiles)
    return min(MOST_S, windows_s + searches_s), 1.0


def rounds_of(options: argparse.Namespace) -> int:
    return options.rounds or (24 if options.full else 12)


def is_short(options: argparse.Namespace) -> bool:
    """Whether peers may be left out for lack of time."""
    return not (options.full or options.peers)


def summarised(journal: Journal, lanes: Sequence[Lane], short: bool) -> Summary:
    rows = journal.of(kind="session")
    measured = dict.fromkeys(row["workload"] for row in rows)
    missing = {
        (name, lane.name): why
        for name in measured
        for lane in lanes
        if (why := lane.missing(WORKLOADS[name], short=short) or absent(lane))
    }
    return summary(rows, {name: limit_of(WORKLOADS[name]) for name in measured}, missing, OURS)


def opened(options: argparse.Namespace) -> Journal:
    kind = "whole" if options.whole_run else "search" if options.search else "full" if options.full else "quick"
    path = options.table or options.journal or HOME / f"{kind}.jsonl"
    if options.table:
        if not path.is_file():
            given = f"no journal at {path}"
            raise HotloopError(given, expected="one that the bench wrote", fix=f"see {HOME} for those there are")
        return Journal(path, resume=True)
    setup = {
        "versions": {**machine.versions(None), **versions_of_peers()},
        "processor": machine.processor().model,
        "plans": options.plans,
        "whole_run_s": options.whole_run,
    }
    if not options.whole_run:  # of whole runs more may be asked for: each counts by itself
        peers = chosen_peers(options.peers, [peer.name for peer in PEERS])
        setup |= {"peers": [peer.name for peer in peers], "rounds": rounds_of(options), "minutes": options.minutes}
    journal = Journal(path, resume=kind in ("whole", "full") and not options.fresh, setup=setup)
    if journal.rows:
        told(f"going on with {path}, {len(journal.rows)} measured before; --fresh begins anew")
    return journal


def tables(found: Summary | None, journal: Journal) -> str:
    planned = f"hotloop planned for a run of {STEPS:,} steps; for a shorter one `auto` may choose another plan.\n\n"
    return (planned + markdown(found) if found else "") + whole_table(journal.of(kind="whole"))


def write_record(options: argparse.Namespace, journal: Journal, found: Summary | None, text: str) -> None:
    figures: dict[str, Any] = {
        "threads": f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}",
        "peers": versions_of_peers(),
        "rows": journal.rows,
    }
    if found is not None:
        figures["limits"] = found.limits
    spoken = " ".join(["python -m bench.speed", *sys.argv[1:]])
    folder = write_claim(options.name, spoken, BASELINE, figures)
    write_atomic(folder / "README.md", text)
    if found is not None:
        draw(found, folder / "speed.html")
    told(str(folder))


def versions_of_peers() -> dict[str, str]:
    from importlib.metadata import version

    names = sorted({name for peer in PEERS for name in peer.needs} | {"torch", "numpy"})
    return {name: version(name) for name in names if importlib.util.find_spec(name) is not None}


def main() -> int:
    options = parsed()
    try:
        journal = opened(options)
    except HotloopError as error:
        raise SystemExit(str(error)) from None
    names = options.workloads or [w for w in WORKLOADS if WORKLOADS[w].grey or not options.whole_run]
    workloads = [WORKLOADS[name] for name in names]
    own = own_lanes(options.plans)
    peers = chosen_peers(options.peers, WHOLE_PEERS if options.whole_run else [peer.name for peer in PEERS])
    lanes = [peers[0], *own, *peers[1:]]
    bench = Bench(workloads, lanes, journal, told, is_short(options))
    try:
        if not options.table:
            for workload in workloads:
                lay_down(workload.data)
        if options.whole_run:
            whole = lanes_of(peers, (options.plans or AUTO).split("/"))
            for workload in workloads:
                whole_runs(workload, whole, options.whole_run, options.rounds or 3, HOME, journal, told)
        elif options.search:
            searches(bench)
            return 1 if bench.failed else 0
        elif not options.table:
            seconds, share = seconds_of(options, bench)
            sessions(bench, rounds_of(options), FULL_SESSIONS if options.full else 1, seconds, share)
    except KeyboardInterrupt:
        told(f"stopped; what was measured is in {journal.path}")
        if options.full or options.whole_run or options.search:
            told("the same command goes on")
        return 130
    found = summarised(journal, lanes, is_short(options)) if journal.of(kind="session") else None
    text = tables(found, journal)
    print(text)
    if found is not None and not options.table:
        draw(found, HOME / "speed.html")
    if options.record:
        write_record(options, journal, found, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
