"""hotloop beside what a user would pick instead, on this machine, in one run.

    make bench                                  sets up .venv-bench, then: python -m bench.speed
    .venv-bench/bin/hotloop-bench W1            the same from anywhere, with the options below
    python -m bench.speed W1 W4                 a part of the workloads, within their share of the half hour
    python -m bench.speed --peers tutorial,lightning --plans auto/baseline
    python -m bench.speed --search              what hotloop searches, races and proves beforehand, as long as it takes
    python -m bench.speed --full                several sessions each, longer; Ctrl-C, and the same command goes on
    python -m bench.speed --whole-run 120       whole runs that take the tutorial's loop 120 s, everything included
    python -m bench.speed --table FILE          the tables of what was measured before
    python -m bench.speed --record              writes the figures to claims/ as well
    python -m bench.speed --table FILE --readme puts a small table of them into README.md
    python -m bench.speed --device cuda         everybody on the GPU; the default is the CPU, also where there is one

The exit code is 1 where a mistake was made, and where hotloop failed on a workload.

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
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.claim import ROOT, circumstances, write_claim
from bench.speed.data import lay_down, samples
from bench.speed.journal import Journal
from bench.speed.lanes import (
    OURS,
    PEERS,
    REDUCED,
    SEARCHING,
    TUTORIAL,
    Lane,
    axes_of,
    base_of,
    default_plans,
    ours,
    versions_of_peers,
)
from bench.speed.limits import limit_of
from bench.speed.picture import draw
from bench.speed.readme import overview, put_between
from bench.speed.running import Failed
from bench.speed.sessions import STEPS, Bench, searches, sessions
from bench.speed.start import lay_down_start
from bench.speed.summary import Summary, summary
from bench.speed.table import markdown, targets_table
from bench.speed.targets import Target, targets
from bench.speed.whole import lanes_of, whole_runs, whole_table, whole_targets
from bench.speed.workloads import HOME, WORKLOADS
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.hardware import machine
from hotloop.core.hardware.devices import check_device
from hotloop.core.plan_request import PlanRequest
from hotloop.errors import DeviceError, HotloopError, PlanError

FULL_SESSIONS = 5
FULL_BUDGET = 3.0
"""Times the short bench's."""

MOST_S = 28 * 60.0
"""Of a short bench, which ends within half an hour."""

EXPECTED = "auto, tune, baseline, axis=value,..., or one of them with axes behind it"

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
        help=f"of hotloop: {EXPECTED}; separated by /; default tune, and {REDUCED} beside it on a GPU",
    )
    parser.add_argument("--device", default="cpu", help="where all of them train, such as cuda; default cpu")
    parser.add_argument(
        "--search", action="store_true", help="search and compile ahead of a bench, and measure nothing"
    )
    parser.add_argument("--full", action="store_true", help=f"{FULL_SESSIONS} sessions of each workload, resumable")
    parser.add_argument("--fresh", action="store_true", help="forget what the journal holds")
    parser.add_argument(
        "--minutes", type=_above_zero(float), help="of a session of all workloads asked for; default at most 28"
    )
    parser.add_argument("--rounds", type=_above_zero(int), help="of windows, or of whole runs")
    parser.add_argument("--whole-run", type=_above_zero(float), metavar="SECONDS", help="of the tutorial's loop")
    parser.add_argument(
        "--journal",
        type=Path,
        help="where to keep what was measured; default .bench/<kind>.jsonl, of which quick.jsonl begins anew each time",
    )
    parser.add_argument("--table", type=Path, metavar="JOURNAL", help="measure nothing, print its tables")
    parser.add_argument("--record", action="store_true", help="write a claim")
    readme = "put a small table between the comments of README.md, or of FILE"
    parser.add_argument("--readme", type=Path, nargs="?", const=ROOT / "README.md", metavar="FILE", help=readme)
    parser.add_argument("--name", help="of the claim; default speed-<device>")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.workloads if name not in WORKLOADS]
    unknown += [name for name in (options.peers or "").split(",") if name and name not in {p.name for p in PEERS}]
    if unknown:
        parser.error(f"{', '.join(unknown)}: neither a workload nor a peer; see --help")
    try:
        check_plans(plans_of(options))
        check_kind(options.device)
    except HotloopError as error:
        parser.error(str(error))
    return options


def _above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
    """What reads an option's number, and refuses those that leave no time for anything."""

    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not 0 < number < math.inf:
            whole = "whole " if kind is int else ""
            raise argparse.ArgumentTypeError(f"{text}; expected a {whole}number above 0")
        return number

    return read


def plans_of(options: argparse.Namespace) -> list[str]:
    return str(options.plans or default_plans(options.device)).split("/")


def check_plans(plans: Sequence[str]) -> None:
    """That each is one that `bench/peers/with_hotloop.py` understands: before anything is measured.

    Raises:
        PlanError: one isn't.
    """
    for plan in plans:
        bare = [part for part in plan.split(",")[1:] if "=" not in part]
        if base_of(plan) not in (*SEARCHING, "auto", "baseline") or bare:
            raise PlanError(f"--plans {plan}", expected=f"{EXPECTED}, separated by /")
        PlanRequest.from_value("baseline", axes_of(plan))
    if axes_of(plans[0]).get("precision", "default") not in ("default", "fp32"):
        fix = f"put another before it, as in tune/{plans[0]}"
        raise PlanError(
            f"--plans {plans[0]}", expected="first what others are compared with, in no reduced precision", fix=fix
        )


def check_kind(device: str) -> None:
    """That this machine has it, and that all peers can be told it.

    Raises:
        DeviceError: it hasn't, or they can't.
    """
    if ":" in device:
        fix = "leave the number out; CUDA_VISIBLE_DEVICES says which one a process sees"
        raise DeviceError(f"--device {device}", expected=f"a kind, such as {device.partition(':')[0]}", fix=fix)
    check_device(device)


def chosen_peers(names: str | None, default: Sequence[str]) -> list[Lane]:
    """In the order of `PEERS`; the tutorial's loop is always one, since it says how long windows are."""
    asked = {TUTORIAL, *(names.split(",") if names else default)}
    return [peer for peer in PEERS if peer.name in asked]


def own_lanes(plans: Sequence[str]) -> list[Lane]:
    """hotloop's lanes; the first is what the others are compared with."""
    return [ours(plan, OURS if not number else f"{OURS}:{plan}") for number, plan in enumerate(plans)]


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


def note_workloads(bench: Bench) -> None:
    """Writes down what the tables need beside windows: how near the machine comes, and who wasn't run."""
    measured = dict.fromkeys(row["workload"] for row in bench.journal.of(kind="session"))
    for workload in bench.workloads:
        key = {"kind": "workload", "workload": workload.name}
        if workload.name in measured and not bench.journal.has(key):
            missing = {lane.name: why for lane in bench.lanes if (why := bench.missing(workload, lane))}
            bench.journal.add(key, limit=limit_of(workload, bench.device), missing=missing)


def summarised(journal: Journal) -> Summary | None:
    """None where no session was measured."""
    if not journal.of(kind="session"):
        return None
    about = {row["workload"]: row for row in journal.of(kind="workload")}
    missing = {(name, lane): why for name, row in about.items() for lane, why in row["missing"].items()}
    limits = {name: row["limit"] for name, row in about.items()}
    return summary(journal.of(kind="session"), limits, missing, OURS)


def opened(options: argparse.Namespace) -> Journal:
    kind = "whole" if options.whole_run else "search" if options.search else "full" if options.full else "quick"
    path = options.table or options.journal or HOME / f"{kind}.jsonl"
    if options.table:
        if not path.is_file():
            given = f"no journal at {path}"
            raise HotloopError(given, expected="one that the bench wrote", fix=f"see {HOME} for those there are")
        return Journal(path, resume=True)
    now = circumstances()
    setup = {
        "device": options.device,
        "versions": {**now["versions"], **versions_of_peers()},
        "processor": machine.read_processor().model,
        "cores": machine.read_processor().allowed_cores,
        "accelerators": now["machine"]["accelerators"],
        "threads": now["threads"],
        "plans": options.plans,
        "whole_run_s": options.whole_run,
    }
    if not options.whole_run:  # of whole runs more may be asked for: each counts by itself
        peers = chosen_peers(options.peers, [peer.name for peer in PEERS])
        setup |= {"peers": [peer.name for peer in peers], "rounds": rounds_of(options), "minutes": options.minutes}
    goes_on = kind in ("whole", "full")
    fresh = options.fresh or not (goes_on or options.journal)
    spoken = " ".join(["python -m bench.speed", *sys.argv[1:]])
    journal = Journal(path, resume=goes_on, fresh=fresh, setup=setup, measured={"command": spoken, **now})
    if journal.rows:
        told(f"going on with {path}, {len(journal.rows)} measured before; --fresh begins anew")
    return journal


def tables(found: Summary | None, journal: Journal) -> str:
    planned = f"hotloop planned for a run of {STEPS:,} steps; for a shorter one `auto` may choose another plan.\n\n"
    steps = planned + markdown(found) + "\n" if found else ""
    return (
        titled(journal.setup) + steps + whole_table(journal.of(kind="whole")) + targets_table(promised(found, journal))
    )


def promised(found: Summary | None, journal: Journal) -> list[Target]:
    """The targets for what was measured, and how near it came."""
    device = (journal.setup or {}).get("device", "cpu")
    return [*(targets(found, device) if found else ()), *whole_targets(journal.of(kind="whole"), device)]


def titled(setup: Mapping[str, Any] | None) -> str:
    """Where it was measured; nothing of a journal that doesn't say."""
    if setup is None or "device" not in setup:
        return ""
    about = "" if setup["device"] == "cpu" else "Peak memory is that of the host.\n\n"
    return f"# On {where(setup)}\n\n{about}"


def where(setup: Mapping[str, Any]) -> str:
    """Device, machine and threads of what was measured."""
    beside = "" if setup["device"] == "cpu" else ", ".join(setup.get("accelerators", [])) + ", beside "
    return f"{setup['device']}: {beside}{setup['processor']}, {setup['cores']} cores, {setup['threads']}"


def write_readme(path: Path, journal: Journal, found: Summary | None) -> None:
    if found is None or "device" not in (journal.setup or {}):
        raise HotloopError(
            f"{journal.path} has no figures for {path}", expected="sessions, and where they were measured"
        )
    put_between(path, overview(found, where(journal.setup or {})))


def write_record(options: argparse.Namespace, journal: Journal, found: Summary | None, text: str) -> None:
    if journal.setup is None or journal.measured is None:
        raise HotloopError(
            f"{journal.path} doesn't say where it was measured",
            expected="a journal of this version of the bench",
            fix="measure again",
        )
    kept = [{**asdict(one), "verdict": one.verdict} for one in promised(found, journal)]
    figures: dict[str, Any] = {"setup": journal.setup, "targets": kept, "rows": journal.rows}
    if found is not None:
        figures["limits"] = found.limits
    circumstances_then = dict(journal.measured)
    spoken = circumstances_then.pop("command")
    name = options.name or f"speed-{journal.setup['device']}"
    folder = write_claim(name, spoken, None, figures, circumstances_then)
    write_atomic(folder / "README.md", text)
    if found is not None:
        draw(found, folder / "speed.html")
    told(str(folder))


def failed(journal: Journal) -> bool:
    """Whether hotloop failed on a workload, or wasn't measured on one."""
    lanes = [lane for row in journal.of(kind="session") for lane in row["lanes"].items()]
    lanes += [(row["lane"], row) for row in journal.of(kind="whole")]
    return any(name.startswith(OURS) and marked["failure"] for name, marked in lanes)


def measured(options: argparse.Namespace, journal: Journal) -> bool:
    """Measures what was asked for, into the journal; whether a search that was asked for by itself came to nothing."""
    names = options.workloads or [w for w in WORKLOADS if WORKLOADS[w].grey or not options.whole_run]
    workloads = [WORKLOADS[name] for name in names]
    peers = chosen_peers(options.peers, WHOLE_PEERS if options.whole_run else [peer.name for peer in PEERS])
    lanes = [peers[0], *own_lanes(plans_of(options)), *peers[1:]]
    bench = Bench(workloads, lanes, journal, told, options.device, is_short(options))
    for workload in workloads:
        lay_down(workload.data)
        lay_down_start(workload, samples(workload.data))
    if options.whole_run:
        whole = lanes_of(peers, plans_of(options))
        for workload in workloads:
            rounds = options.rounds or 3
            whole_runs(workload, whole, options.whole_run, rounds, HOME, journal, told, options.device)
    elif options.search:
        searches(bench)
    else:
        seconds, share = seconds_of(options, bench)
        sessions(bench, rounds_of(options), FULL_SESSIONS if options.full else 1, seconds, share)
        note_workloads(bench)
    return bool(options.search and bench.failed)


def run(options: argparse.Namespace) -> int:
    journal = opened(options)
    try:
        came_to_nothing = not options.table and measured(options, journal)
    except KeyboardInterrupt:
        told(f"stopped; what was measured is in {journal.path}")
        if options.full or options.whole_run or options.search:
            told("the same command goes on")
        return 130
    if options.search:
        return int(came_to_nothing)
    found = summarised(journal)
    text = tables(found, journal)
    print(text)
    if found is not None and not options.table:
        draw(found, HOME / "speed.html")
    if options.record:
        write_record(options, journal, found, text)
    if options.readme:
        write_readme(options.readme, journal, found)
    return int(failed(journal))


def main() -> int:
    options = parsed()
    try:
        return run(options)
    except (HotloopError, Failed) as error:
        told(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
