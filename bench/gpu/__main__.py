"""Runs the checks that need a GPU, and records each result in claims/ as soon as it is there.

    python -m bench.gpu                       what fits into 480 s, on the GPU that torch finds
    python -m bench.gpu --rehearse            the whole list on the CPU with small sizes
    python -m bench.gpu --only train,check/W1 --budget 200
    python -m bench.gpu --resume claims/2027-01-31_gpu-h200

Parts without a passing record of this chip and this source run first, so that several short visits complete the list.
Exit code 0: nothing failed; 1: something did, see the file that its record names; 2: nothing could be run.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.gpu.catalogue import CHECKS, Check, jobs_of
from bench.gpu.facts import Facts, facts
from bench.gpu.order import chosen, ordered
from bench.gpu.record import Record, fitting, known_results, new_folder, read
from bench.gpu.setting import CLAIMS, ROOT, Setting
from bench.gpu.table import listing, results, shown
from bench.gpu.visit import Visit
from hotloop.core.files.atomic_files import check_writable
from hotloop.errors import DeviceError, HotloopError

BUDGET_S = 480.0
HOME = ROOT / ".bench" / "gpu"
"""Caches, outputs and records of rehearsals; git ignores it."""


class Stopped(BaseException):
    """Ctrl-C or SIGTERM; `code` is the exit code that shells expect."""

    def __init__(self, number: int) -> None:
        self.name, self.code = signal.Signals(number).name, 128 + number


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=_seconds, help=f"seconds for this visit; default {BUDGET_S:.0f}")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="run what this record lacks, and add to it")
    parser.add_argument("--only", metavar="A,B", help="checks, or parts such as train/W1")
    parser.add_argument("--list", action="store_true", help="show the list, run nothing")
    parser.add_argument("--device", choices=("cuda", "mps", "cpu"), help="default: the GPU that torch finds")
    parser.add_argument("--rehearse", action="store_true", help="the whole list on the CPU, with small sizes")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for records; default claims/")
    given = parser.parse_args(arguments)
    if given.rehearse and given.device not in (None, "cpu"):
        parser.error("--rehearse runs on the CPU: leave --device out")
    if given.resume is not None and given.out is not None:
        parser.error("--resume names the folder itself: leave --out out")
    return given


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; expected a number of seconds above 0")
    return number


def home_of(given: argparse.Namespace, found: Facts) -> Path:
    """Where records lie: only those of a GPU belong into claims/."""
    if given.out is not None:
        return Path(given.out)
    if given.rehearse:
        return HOME / "rehearsals"
    return CLAIMS if found.device != "cpu" else HOME / "cpu"


def run(given: argparse.Namespace, checks: tuple[Check, ...], ask: Callable[[str | None], Facts]) -> int:
    jobs = chosen(jobs_of(checks), given.only)
    began = time.monotonic()
    try:
        found = ask("cpu" if given.rehearse else given.device)
    except DeviceError:
        if not given.list:
            raise
        shown(listing(jobs, {}, jobs, given.budget or BUDGET_S))
        return 0
    home = home_of(given, found)
    if given.resume is not None:
        before = read(given.resume)
        check_resumed(given.resume, before, found, given.rehearse)
        known = {} if before is None else before["checks"]
    else:
        known = known_results(home, found, given.rehearse)
    # A rehearsal begins anew: its purpose is that each line runs now.
    known = {} if given.rehearse and given.resume is None else known
    waiting = ordered(jobs, known, repeat=given.resume is None)
    budget_s = given.budget if given.budget or given.rehearse else BUDGET_S
    if given.list:
        shown(listing(jobs, known, waiting, budget_s))
        return 0
    if not waiting:
        say(f"all of {given.resume} passed on this chip with this source: nothing to run")
        return 0
    if budget_s is not None and budget_s < (least := min(job.part.estimate_s for job in waiting)):
        raise HotloopError(f"--budget {budget_s:g}", expected=f"at least {least:.0f} s, which the shortest part takes")
    folder = given.resume or new_folder(home, found, given.rehearse)
    check_writable(folder / "record.json", "--out")
    setting = Setting(found.device, given.rehearse, HOME / found.slug / found.source[:12])
    command = " ".join(["python -m bench.gpu", *sys.argv[1:]])
    visit = Visit(setting, Record(folder, found, command, given.rehearse), say, budget_s, began)
    say(f"{found.chip}, torch {found.circumstances.get('versions', {}).get('torch')}: {len(waiting)} parts wait")
    code = 0
    try:
        visit.run(waiting)
    except Stopped as stopped:
        say(f"stopped by {stopped.name}: what was done is in {folder}")
        code = stopped.code
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the table is short
    stored = {**known, **visit.record.results}
    shown(results(jobs, stored, visit))
    failed = [key for key, ended in visit.ended.items() if ended.status in ("failed", "late")]
    if failed:
        say(f"failed: {', '.join(failed)}; see {folder}")
    elif not code:
        left = sum(job.key not in stored or stored[job.key]["status"] == "failed" for job in jobs)
        say(f"{folder}: {len(visit.ended)} parts done, {left} left for another visit")
    return code or int(bool(failed))


def check_resumed(folder: Path, before: dict | None, found: Facts, is_rehearsal: bool) -> None:
    """That a folder's record goes on here.

    Raises:
        HotloopError: there is none, or it is of another chip or source.
    """
    if before is None:
        raise HotloopError(f"--resume {folder}: there is no record.json", expected="a folder of an earlier visit")
    if not fitting(before, found, is_rehearsal):
        differs = [
            f"{name} {before.get(name)} is not {now}"
            for name, now in (("chip", found.chip), ("source", found.source), ("device", found.device))
            if before.get(name) != now
        ]
        reason = "; ".join(differs) or "one of both is a rehearsal"
        raise HotloopError(f"--resume {folder}: {reason}", fix="leave --resume out, which begins a new record")


def say(line: str) -> None:
    print(line, flush=True)


def _stop(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise Stopped(number)


def main(
    arguments: Sequence[str] | None = None,
    checks: tuple[Check, ...] = CHECKS,
    ask: Callable[[str | None], Facts] = facts,
) -> int:
    given = parsed(sys.argv[1:] if arguments is None else arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        return run(given, checks, ask)
    except HotloopError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"stopped by {stopped.name} before the first part", file=sys.stderr)
        return stopped.code


if __name__ == "__main__":
    sys.exit(main())
