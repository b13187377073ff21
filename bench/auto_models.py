"""Does `plan="auto"` pay on networks that nobody here had in mind? Those of `bench/zoo.py`, against the baseline, on the CPU.

    .venv-bench/bin/python -m bench.auto_models             hours: up to 25 min a network; Ctrl-C, and the same command goes on
    .venv-bench/bin/python -m bench.auto_models bert vit --seconds 20
    .venv-bench/bin/python -m bench.auto_models --no-search xlnet bart      what `auto` takes alone: a few minutes each

For each network, in a process of its own: `tune` looks for the fastest plan that is proven equal. Then, in another one that
finds nothing compiled, the baseline, what `auto` takes without a training (the plan of its rules),
and what was found race once more, since the winner of a search owes a part of its figure to luck. That race gets more time until it has pairs enough for an
interval. What `tune` raced and left out stands below each. A network, or a plan of that last race, that fails or can't be
measured is named, and so is one whose steps are slower than the baseline's, or whose run takes longer under what `auto`
takes; then the exit code is 1. The same command tries again what failed. `--no-search` leaves out `tune`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.claim import circumstances, write_claim
from bench.speed.caching import caches
from bench.speed.journal import Journal, Row
from bench.speed.table import rows as table
from bench.speed.workloads import HOME
from bench.zoo import FIRST, NAMES
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.format import format_milliseconds
from hotloop.core.hardware import machine
from hotloop.core.records.race import Verdict
from hotloop.errors import HotloopError
from hotloop.margins import MARGIN
from hotloop.plan import BASELINE, Plan
from hotloop.report.progress import format_duration
from hotloop.tuning.races.statistics import MIN_PAIRS

STEPS = 50_000
"""Of the run that plans are chosen for."""

LIMIT_S = 1500
"""For one network."""

_SPARE = 1.25
"""Times the pairs that are needed."""

FOUND, RULES = "tuned", "auto"


def searched(name: str, seconds: float) -> Verdict:
    """What `tune` finds for one network."""
    import hotloop
    from bench.zoo import task

    return hotloop.tune(task(name, _epochs()), device="cpu", time_limit=f"{2 * seconds:g}s", progress=False)


def raced(name: str, seconds: float, plan: Plan) -> Verdict:
    """The baseline, what `auto` takes for itself, and the plan that was found; among its notes is what `auto` says."""
    from bench.zoo import task
    from hotloop.task_file import LoadedTask
    from hotloop.tuning import race as tuning_race

    rivals: list[Any] = ["baseline", RULES, *([plan] if plan != BASELINE else [])]
    contest, said = tuning_race.RaceSpec(rivals, "baseline", ["cpu"]), list[str]()
    loaded = LoadedTask(task(name, _epochs()), None, {})
    verdict = tuning_race.race_loaded(loaded, contest, prove=None, say=said.append, racing_s=seconds)
    return verdict.model_copy(update={"notes": [*verdict.notes, *said]})


def _epochs() -> int:
    from bench.zoo import SAMPLES

    return STEPS * 16 // SAMPLES


def searched_and_raced(name: str, seconds: float, *, search: bool = True) -> dict[str, Any]:
    """One network: the search, unless it is left out, and the race after it; or why it failed."""
    began = time.monotonic()

    def left_s() -> float:
        return max(1.0, began + LIMIT_S - time.monotonic())

    def race(race_s: float) -> Verdict:
        with TemporaryDirectory() as folder:
            return in_own_process(name, race_s, left_s(), plan, caches(Path(folder)))

    try:
        found = in_own_process(name, seconds, left_s()) if search else None
        plan = BASELINE if found is None else found.plan(found.winner or found.baseline).as_plan
        verdict = until_measured(race, seconds, began + 0.9 * LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"failure": f"not done within {LIMIT_S} s"}
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        return {"failure": lines[-1][:300] if lines else f"ended with {error.returncode}"}
    taken = verdict.plan(RULES).as_plan if found is None else plan
    searched = None if found is None else found.model_dump()
    return {"searched": searched, "verdict": verdict.model_dump(), "plan": taken.brief()}


def until_measured(race: Callable[[float], Verdict], seconds: float, until: float) -> Verdict:
    """Races again and longer until each plan has pairs enough for an interval, or there is no time for that.

    Each race makes the plans ready anew, so the next gets the time that it should need, and twice the last one's at least.
    """
    while True:
        began = time.monotonic()
        verdict = race(seconds)
        took_s = time.monotonic() - began
        short = [one.windows for one in verdict.plans if one.failure is None and one.ratio_low is None]
        longer_s = seconds * max(2.0, _SPARE * MIN_PAIRS / max(1, min(short))) if short else seconds
        if not short or time.monotonic() + took_s + longer_s - seconds > until:
            return verdict
        seconds = longer_s


def in_own_process(
    name: str, seconds: float, limit_s: float, plan: Plan | None = None, environment: Mapping[str, str] | None = None
) -> Verdict:
    """The search for a plan; where there is one, the race with it.

    Raises:
        subprocess.CalledProcessError: it failed.
        subprocess.TimeoutExpired: it took longer than `limit_s`.
    """
    command = [sys.executable, "-m", "bench.auto_models", name, "--seconds", str(seconds), "--one"]
    command.append("" if plan is None else plan.model_dump_json())
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, check=True, env={**os.environ, **(environment or {})}
    )
    return Verdict(**json.loads(done.stdout.splitlines()[-1]))


def timings(row: Row) -> dict[str, Row]:
    """What a network's last race found: of `auto`'s rules, and of what `tune` found; of the baseline where it kept that."""
    plans = row["verdict"]["plans"]
    found = next((one for one in plans if one["name"] not in ("baseline", RULES)), None)
    return {RULES: next(one for one in plans if one["name"] == RULES), FOUND: found or plans[0]}


def gain(row: Row, which: str) -> tuple[float, float, float]:
    """Times as fast as the baseline, with the interval; exactly 1 where the baseline was kept, NaN where the plan failed."""
    one = timings(row)[which]
    if one["failure"]:  # which leaves no plan, as the baseline's looks
        return math.nan, math.nan, math.nan
    if one["name"] == row["verdict"]["baseline"] or Plan(**one["plan"]) == BASELINE:
        return 1.0, 1.0, 1.0
    if one["ratio"] is None or one["ratio_low"] is None:
        return math.nan, math.nan, math.nan
    return one["ratio"], one["ratio_low"], one["ratio_high"]


def geometric_mean(found: Sequence[Row], which: str) -> tuple[float, float, float]:
    """Over the networks; its interval from theirs, which are independent, on the scale of logarithms."""
    gains = [each for row in found if not math.isnan((each := gain(row, which))[0])]
    if not gains:
        return math.nan, math.nan, math.nan
    middle = sum(math.log(value) for value, _, _ in gains) / len(gains)
    below = math.hypot(*(math.log(value / low) for value, low, _ in gains)) / len(gains)
    above = math.hypot(*(math.log(high / value) for value, _, high in gains)) / len(gains)
    return math.exp(middle), math.exp(middle - below), math.exp(middle + above)


def markdown(measured: Sequence[Row]) -> str:
    done = [row for row in measured if not row.get("failure")]
    ways = {RULES: RULES} | ({FOUND: "found by tune"} if any(row["searched"] for row in done) else {})
    cells = []
    for row in done:
        base = row["verdict"]["plans"][0]
        each = (cell for which in ways for cell in _cells(row, which))
        cells.append([row["model"], format_milliseconds(base["step_ms"]), _run(base), *each])
    means = ["**geometric mean**", "", ""]
    means += [cell for which in ways for cell in (_mean_text(measured, which), "", "")]
    head = ("network", "baseline's step", "run", *(cell for way in ways.values() for cell in (way, "run", "plan")))
    about = (
        "Times as fast as the baseline, by the step alone, with 99 % intervals. A run is all of its steps with what it"
        " takes to start and compile. `auto` takes the plan of its rules, and compiles nothing."
        " What failed or wasn't measured is in no mean.\n"
    )
    named = [*failures(measured), *unmeasured(measured), *slower(measured), *longer(measured)]
    parts = [about, *table(head, [*cells, means]), "", *(f"- {line}" for line in named)]
    return "\n".join([*parts, "\n## What was raced and left out\n", *_left_out(done)]) + "\n"


def _cells(row: Row, which: str) -> list[str]:
    """How much faster its steps are, how long the run takes, and under which plan."""
    one = timings(row)[which]
    if one["failure"]:
        return ["failed", "-", "-"]
    return [_text(gain(row, which)), _run(one), Plan(**one["plan"]).brief()]


def _run(one: Row) -> str:
    return "-" if one["run_s"] is None else format_duration(one["run_s"])


def failures(measured: Sequence[Row]) -> list[str]:
    """Networks that couldn't be measured, and plans that would be taken and failed, with the reason."""
    found = [f"{row['model']}: {row['failure']}" for row in measured if row.get("failure")]
    for row in measured:
        if not row.get("failure"):
            plans = {which: one for which, one in timings(row).items() if one["failure"]}
            found += [f"{row['model']} ({which}): {one['failure']}" for which, one in plans.items()]
    return found


def unmeasured(measured: Sequence[Row]) -> list[str]:
    """Plans that would be taken, and whose pairs were too few to say anything."""
    found = []
    for row in measured:
        if not row.get("failure"):
            plans = {which: one for which, one in timings(row).items() if not one["failure"]}
            short = {which: one for which, one in plans.items() if math.isnan(gain(row, which)[0])}
            found += [f"{row['model']} ({which}): not measured, {one['windows']} pairs" for which, one in short.items()]
    return found


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last of each network: what failed may have been tried again."""
    return list({row["model"]: row for row in rows}.values())


def _mean_text(measured: Sequence[Row], which: str) -> str:
    """The mean, and of how many networks it is."""
    done = [row for row in measured if not row.get("failure")]
    count = sum(not math.isnan(gain(row, which)[0]) for row in done)
    return f"{_text(geometric_mean(done, which))}, {count} of {len(measured)}"


def _text(gained: tuple[float, float, float]) -> str:
    value, low, high = gained
    return "not measured" if math.isnan(value) else f"{value:.2f} ({low:.2f} to {high:.2f})"


def _left_out(done: Sequence[Row]) -> Iterator[str]:
    for row in done:
        said = row["verdict"].get("notes", [])  # records of before have none of what auto said
        yield from (f"- {row['model']}, {line}" for line in said if line.startswith(_AGAINST))
        if (searched := row["searched"]) is None:
            continue
        for one in searched["plans"]:
            if one["name"] in (searched["baseline"], searched["winner"]):
                continue
            ratio = (
                _text((one["ratio"], one["ratio_low"] or math.nan, one["ratio_high"] or math.nan))
                if one["ratio"]
                else ""
            )
            why = one["failure"] or ", ".join(filter(None, [one["verdict"], one["parity"]])) or "behind"
            yield f"- {row['model']}, {one['name']}: {ratio} {why}"


_AGAINST = ("auto leaves out", "auto goes on eagerly")
"""What `auto` says where it doesn't take a plan."""


def slower(measured: Sequence[Row]) -> list[str]:
    """Networks on which the steps of a plan that would be taken are surely slower than the baseline's."""
    done = [row for row in measured if not row.get("failure")]
    behind = [(row["model"], which) for row in done for which in (RULES, FOUND) if gain(row, which)[2] < 1]
    return [f"{model} ({which}): slower than the baseline" for model, which in behind]


def longer(measured: Sequence[Row]) -> list[str]:
    """Networks whose run takes longer under what `auto` takes than under the baseline: its start isn't won back."""
    found = []
    for row in measured:
        if row.get("failure"):
            continue
        base, own = row["verdict"]["plans"][0], timings(row)[RULES]
        # Where it kept the baseline's plan, the same steps were timed twice.
        slack = 1 + MARGIN if gain(row, RULES)[0] == 1 else 1.0
        if own["run_s"] and base["run_s"] and own["run_s"] > slack * base["run_s"]:
            found.append(f"{row['model']} ({RULES}): a run of {_run(own)}, and of {_run(base)} under the baseline")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="some of " + ", ".join(NAMES) + "; default the first eleven")
    parser.add_argument("--seconds", type=float, default=60, help="of the last race; the search's take twice that")
    parser.add_argument("--no-search", action="store_true", help="only what auto takes, without a search by tune")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--journal", type=Path, help="default .bench/auto-models.jsonl, or -alone with --no-search")
    parser.add_argument("--record", action="store_true", help="write a claim")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in NAMES]:
        parser.error(f"{', '.join(unknown)}: the networks are {', '.join(NAMES)}")
    if options.one is not None:
        one = options.models[0], options.seconds
        verdict = raced(*one, Plan(**json.loads(options.one))) if options.one else searched(*one)
        print(json.dumps(verdict.model_dump()))
        return 0
    try:
        now = circumstances()
        setup = {"seconds": options.seconds, "searched": not options.no_search}
        setup |= {
            "cores": machine.read_processor().allowed_cores,
            "versions": now["versions"],
            "threads": now["threads"],
        }
        spoken = " ".join(["python -m bench.auto_models", *sys.argv[1:]])
        measured = {"command": spoken, **now}
        path = options.journal or HOME / f"auto-models{'-alone' if options.no_search else ''}.jsonl"
        journal = Journal(path, resume=True, fresh=options.fresh, setup=setup, measured=measured)
    except HotloopError as error:
        parser.error(str(error))
    asked = options.models or FIRST
    try:
        for name in asked:
            done = latest(journal.of(model=name))
            if not done or failures(done) or unmeasured(done):
                journal.add({"model": name}, **searched_and_raced(name, options.seconds, search=not options.no_search))
                row = journal.rows[-1]
                print("; ".join(failures([row])) or f"{name}: {row['plan']}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"stopped; what was measured is in {journal.path}: the same command goes on", file=sys.stderr)
        return 130
    rows = [row for row in latest(journal.rows) if row["model"] in asked]
    text = markdown(rows)
    print(text)
    if options.record:
        figures = {"asked": list(asked), "models": rows}
        then = dict(journal.measured or measured)
        command = then.pop("command")
        folder = write_claim("auto-models", command, None, figures, then)
        write_atomic(folder / "README.md", text)
        print(folder, file=sys.stderr)
    return 1 if slower(rows) or longer(rows) or failures(rows) or unmeasured(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
