"""What runs the GPU checks: order, budget, results on disk, and parts that fail, hang and crash, as real processes."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.gpu.setting import ROOT
from tests.support.bench.fake_gpu_checks import begun, lines

LONG_S = 60.0
"""Much longer than anything takes here."""


@dataclass
class Machine:
    """A machine with a chip, in a folder of its own.

    Attributes:
        checks: name -> parts `[name, estimate_s, limit_s]`.
    """

    folder: Path
    checks: dict[str, list[list[Any]]]
    chip: str = "NVIDIA Fake 9"
    source: str = "0123456789abcdef"
    torch: str = "2.11.0"
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        given = {"home": str(self.folder / "home"), "checks": self.checks, "torch": self.torch}
        described = json.dumps(given | {"chip": self.chip, "source": self.source})
        where = [] if "--resume" in arguments else ["--out", str(self.folder / "claims")]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.bench.fake_gpu_runner", described, *where, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=LONG_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    @property
    def scratch(self) -> Path:
        return self.folder / "home" / "fake-9" / self.source[:12]

    @property
    def records(self) -> list[Path]:
        return sorted((self.folder / "claims").glob("*/record.json"))

    @property
    def record(self) -> dict[str, Any]:
        (path,) = self.records
        return dict(json.loads(path.read_text()))

    def statuses(self) -> dict[str, str]:
        return {key: one["status"] for key, one in self.record["checks"].items()}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def make(**checks: list[list[Any]]) -> Machine:
        made.append(Machine(tmp_path, checks))
        return made[-1]

    yield make
    for process in (process for one in made for process in one.started):
        process.kill()
        process.communicate()


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def part(name: str, estimate_s: float = 1, limit_s: float = LONG_S) -> list[Any]:
    return [name, estimate_s, limit_s]


@pytest.mark.more
def test_a_failing_part_leaves_its_traceback_and_the_others_go_on(machine: Callable[..., Machine]) -> None:
    here = machine(
        first=[part("passes"), part("raises"), part("judges"), part("passes-too")],
        second=[part("crashes"), part("skips"), part("passes-at-last")],
    )
    done = here.run()
    assert done.returncode == 1
    assert here.statuses() == {
        "first/passes": "passed",
        "first/raises": "failed",
        "first/judges": "failed",
        "first/passes-too": "passed",
        "second/crashes": "failed",
        "second/skips": "skipped",
        "second/passes-at-last": "passed",
    }
    folder = here.records[0].parent
    traceback = (folder / "first-raises.txt").read_text()
    assert "Traceback" in traceback and "a fault that was planted" in traceback
    assert "what it printed" in (folder / "first-judges.txt").read_text()
    assert here.record["checks"]["first/judges"]["figure"] == "the figure is wrong"
    assert "SIGSEGV" in here.record["checks"]["second/crashes"]["figure"]
    assert "crashes" in (folder / "second-crashes.txt").read_text()  # faulthandler names the function
    assert not (folder / "first-passes.txt").exists()
    assert "failed: first/raises, first/judges, second/crashes" in done.stdout


@pytest.mark.more
def test_a_process_goes_on_after_a_part_that_passed_and_never_after_a_failure(machine: Callable[..., Machine]) -> None:
    here = machine(one=[part("passes"), part("passes-too"), part("raises"), part("passes-again")])
    here.run()
    first, second, third, fourth = (line.split()[1] for line in lines(here.scratch))
    assert first == second == third != fourth


@pytest.mark.more
def test_a_hanging_part_ends_at_its_limit_with_all_that_it_started(machine: Callable[..., Machine]) -> None:
    here = machine(one=[part("sleeps", 1, 2.0), part("passes")])
    done = here.run()
    assert done.returncode == 1
    assert here.statuses() == {"one/sleeps": "failed", "one/passes": "passed"}
    assert here.record["checks"]["one/sleeps"]["figure"] == "not done within 2 s"
    assert "wait_for_ever" in (here.records[0].parent / "one-sleeps.txt").read_text()
    assert not is_alive(int((here.scratch / "started").read_text()))


@pytest.mark.more
def test_parts_that_fit_run_and_a_second_visit_begins_with_the_others(machine: Callable[..., Machine]) -> None:
    here = machine(one=[part("passes-a", 60), part("passes-b", 600), part("passes-c", 20)])
    assert here.run("--budget", "100").returncode == 0
    assert begun(here.scratch) == ["passes-a", "passes-c"]
    done = here.run("--budget", "1000")
    assert done.returncode == 0
    assert begun(here.scratch)[2:] == ["passes-b", "passes-a", "passes-c"]
    assert "0 left" in done.stdout


@pytest.mark.more
def test_parts_that_never_ran_come_before_those_that_failed(machine: Callable[..., Machine]) -> None:
    here = machine(one=[part("raises", 1), part("passes", 50)])
    here.run("--budget", "40")
    here.run("--budget", "90")
    assert begun(here.scratch) == ["raises", "passes", "raises"]


@pytest.mark.more
def test_a_part_that_the_budget_cuts_off_is_no_failure_and_not_stored(machine: Callable[..., Machine]) -> None:
    here = machine(one=[part("passes"), part("sleeps", 1)])
    done = here.run("--budget", "10")
    assert done.returncode == 0
    assert here.statuses() == {"one/passes": "passed"}
    assert "cut off before its end" in done.stdout
    assert not is_alive(int((here.scratch / "started").read_text()))


def test_after_a_sigkill_results_are_there_and_nothing_goes_on_alone(machine: Callable[..., Machine]) -> None:
    here = machine(one=[part("passes"), part("sleeps"), part("passes-too")])
    process = here.start()
    until(lambda: (here.scratch / "started").exists())
    (child,) = {int(line.split()[1]) for line in lines(here.scratch)}
    process.kill()
    process.wait()
    until(lambda: not is_alive(child) and not is_alive(int((here.scratch / "started").read_text())))
    assert here.statuses() == {"one/passes": "passed"}

    here.checks["one"][1] = part("passes-now")
    done = here.run("--resume", str(here.records[0].parent))
    assert done.returncode == 0
    assert begun(here.scratch) == ["passes", "sleeps", "passes-now", "passes-too"]
    assert "nothing to run" in here.run("--resume", str(here.records[0].parent)).stdout


@pytest.mark.more
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_what_there_is(machine: Callable[..., Machine], number: int, code: int) -> None:
    here = machine(one=[part("passes"), part("sleeps"), part("passes-too")])
    process = here.start()
    until(lambda: (here.scratch / "started").exists())
    process.send_signal(number)
    out, err = process.communicate(timeout=LONG_S)
    assert process.returncode == code
    assert f"stopped by {signal.Signals(number).name}: what was done is in" in out
    assert "Traceback" not in err
    assert here.statuses() == {"one/passes": "passed"}
    assert not is_alive(int((here.scratch / "started").read_text()))


@pytest.mark.more
def test_the_record_says_what_was_measured_where(machine: Callable[..., Machine]) -> None:
    here = machine(steps=[part("measures")], one=[part("passes")])
    assert here.run().returncode == 0
    record = here.record
    assert record["claim"] == "gpu-fake-9"
    assert record["chip"] == here.chip and record["source"] == here.source and record["rehearsal"] is False
    assert record["versions"]["torch"] == "2.11.0"
    stored = record["checks"]["one/passes"]
    assert stored["status"] == "passed" and stored["figures"] == {"device": "cuda"} and stored["torch"] == "2.11.0"
    assert stored["seconds"] >= 0 and stored["taken"]
    with (here.records[0].parent / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["network"], row["device"], float(row["step_ms"])) for row in rows] == [
        ("mlp", "cpu", 0.5),
        ("mlp", "cuda", 0.25),
    ]


@pytest.mark.more
@pytest.mark.parametrize("changed", [{"source": "another"}, {"chip": "NVIDIA Fake 10"}])
def test_results_of_another_source_or_chip_do_not_count(
    machine: Callable[..., Machine], changed: dict[str, str]
) -> None:
    here = machine(one=[part("passes")])
    here.run()
    (before,) = here.records
    content = before.read_text()
    for name, value in changed.items():
        setattr(here, name, value)
    refused = here.run("--resume", str(before.parent))
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1 and next(iter(changed)) in refused.stderr
    assert here.run().returncode == 0
    assert len(here.records) == 2 and before.read_text() == content


@pytest.mark.more
def test_a_failure_that_passes_later_leaves_no_output(machine: Callable[..., Machine]) -> None:
    here = machine(one=[part("raises")])
    assert here.run().returncode == 1
    path = here.records[0]
    record = json.loads(path.read_text())
    record["checks"]["one/passes"] = record["checks"].pop("one/raises")
    path.write_text(json.dumps(record))
    (path.parent / "one-raises.txt").rename(path.parent / "one-passes.txt")
    here.checks["one"] = [part("passes")]
    assert here.run("--resume", str(path.parent)).returncode == 0
    assert not (path.parent / "one-passes.txt").exists() and here.statuses() == {"one/passes": "passed"}


@pytest.mark.more
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nothing"], "there is no such check"),
        (["--budget", "0.5"], "at least 1 s"),
        (["--budget", "never"], "expected a number of seconds above 0"),
        (["--resume", "nowhere"], "there is no record.json"),
        (["--rehearse", "--device", "cuda"], "leave --device out"),
    ],
)
def test_a_wrong_call_is_one_line(machine: Callable[..., Machine], arguments: list[str], said: str) -> None:
    here = machine(one=[part("passes")])
    done = here.run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert begun(here.scratch) == []


@pytest.mark.more
def test_a_file_that_is_no_record_is_refused(machine: Callable[..., Machine], tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("{}")
    done = machine(one=[part("passes")]).run("--resume", str(tmp_path))
    assert done.returncode == 2 and "is no record of the GPU checks" in done.stderr


@pytest.mark.more
def test_only_some_run_and_the_list_runs_none(machine: Callable[..., Machine]) -> None:
    here = machine(one=[part("passes"), part("passes-too")], two=[part("passes-there")])
    listed = here.run("--list")
    assert listed.returncode == 0 and "two/passes-there" in listed.stdout and begun(here.scratch) == []
    assert here.run("--only", "two,one/passes-too").returncode == 0
    assert begun(here.scratch) == ["passes-too", "passes-there"]


@pytest.mark.more
def test_a_part_for_other_devices_is_skipped(machine: Callable[..., Machine]) -> None:
    here = machine(one=[[*part("passes"), ["mps"]], part("passes-too")])
    assert here.run().returncode == 0
    assert here.statuses() == {"one/passes": "skipped", "one/passes-too": "passed"}
    assert begun(here.scratch) == ["passes-too"]


@pytest.mark.more
def test_without_a_gpu_it_is_one_line() -> None:
    import torch

    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("there is a GPU here")
    done = subprocess.run([sys.executable, "-m", "bench.gpu"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no GPU: torch ") and "--rehearse" in line
