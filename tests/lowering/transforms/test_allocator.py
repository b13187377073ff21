"""allocator=keep: memory that a step frees stays for the next one, and goes back when the training is over."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hotloop
from hotloop.core.hardware import limits
from hotloop.core.hardware.machine import speed_versions
from hotloop.core.state import differing_paths
from hotloop.errors import PlanError
from hotloop.lowering.transforms import allocator as axis
from hotloop.plan import Plan
from hotloop.tuning.race_cache import _DEPENDS_ON
from hotloop.tuning.races.runner import Runner
from tests.support.processes.page_fault_count import KEEP, a_task
from tests.support.programs import advance

pytestmark = pytest.mark.skipif(limits.active_allocator() is None, reason="memory here isn't glibc's to keep")

IS_GLIBCS = limits._is_glibc_malloc


@pytest.fixture(autouse=True)
def this_machine(any_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real C library, which other tests go without."""
    monkeypatch.setattr(limits, "_is_glibc_malloc", IS_GLIBCS)


def counted(*without: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.support.processes.page_fault_count", *map(str, without)]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


@pytest.fixture(scope="module")
def pages() -> dict[str, Any]:
    return counted()


def test_a_step_gets_no_memory_from_the_system_that_the_one_before_has_had(pages: dict[str, Any]) -> None:
    assert pages["usual"] > 4 * 15_000, "four blocks of 63 MB come and go in each step, in pages of 4 KiB"
    assert max(pages["kept"], pages["again"]) < pages["usual"] / 10


@pytest.mark.more
@pytest.mark.parametrize("parameter", [axis._MMAP_MAX, axis._TRIM_THRESHOLD])
def test_either_half_alone_is_not_enough(parameter: int) -> None:
    pages = counted(parameter)
    assert max(pages["kept"], pages["again"]) > pages["usual"] / 10


def test_an_evaluation_between_steps_leaves_it_kept(pages: dict[str, Any]) -> None:
    assert pages["evaluated"] < pages["usual"] / 10


@pytest.mark.more
def test_in_a_race_no_window_begins_with_memory_that_another_plan_has_given_back() -> None:
    """A step that doesn't count gets it from the system, or gives it back, in races of steps so long that none else would."""
    runners = [Runner(hotloop.lower(a_task(), plan)) for plan in (KEEP, Plan())]
    for runner in runners:
        runner.run_untimed(0)
    for runner in runners:
        settled = []
        for _ in range(2):
            before = runner.program.position.step
            runner.run_untimed(0)
            settled.append(runner.program.position.step - before)
            runner.window(1)
        assert settled == [1, 0]
    for runner in runners:
        runner.program.close()


def test_the_memory_goes_back_when_the_program_is_closed(pages: dict[str, Any]) -> None:
    assert pages["given back"] > 100e6


def test_it_goes_back_to_where_glibc_was_by_itself(pages: dict[str, Any]) -> None:
    """Which leaves a size alone once a block of it was freed, so that the baseline of a race is that of a process of its own."""
    before, after = pages["thresholds"]
    assert before < 16 << 20 and after == pytest.approx(20 << 20, rel=0.01)


BLOCKS = """
import ctypes, sys
from hotloop.lowering.transforms.allocator import keep_freed_memory, leave_freed_memory
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
if "untouched" not in sys.argv:
    keep_freed_memory(True)
    keep_freed_memory(False)
if "left" in sys.argv:
    leave_freed_memory()
library.free(library.malloc(16 << 20))
print("mapped" if ctypes.c_size_t.from_address(library.malloc(15 << 20) - 8).value & 2 else "kept")
"""


@pytest.mark.parametrize(("how", "ends"), [("untouched", "kept"), ("switched off", "mapped"), ("left", "kept")])
def test_a_change_that_is_left_for_good_suits_larger_blocks_as_glibc_s_own_rules_do(how: str, ends: str) -> None:
    """Any change ends these rules, by which a freed block raises the limit of blocks that the system gets back."""
    done = subprocess.run([sys.executable, "-c", BLOCKS, how], capture_output=True, text=True, check=True)
    assert done.stdout == f"{ends}\n"


def test_a_worker_keeps_nothing(pages: dict[str, Any]) -> None:
    assert pages["worker"] == [True, False]


def test_whatever_ends_a_compilation_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(program: Any, batch: Any, samples: int) -> None:
        program.prime()
        assert axis.keeps_freed_memory()
        raise KeyboardInterrupt

    monkeypatch.setattr("hotloop.lowering.build.Program.prepare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hotloop.lower(a_task(), KEEP.with_axes(compile="step"))
    assert not axis.keeps_freed_memory()


@pytest.mark.more
def test_a_run_goes_on_where_nobody_can_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And says so; unless it is asked for."""
    hotloop.fit(a_task(epochs=1), run=tmp_path / "run", progress=False)
    monkeypatch.setattr(limits, "_is_glibc_malloc", lambda: False)
    longer = a_task(epochs=2)
    with pytest.raises(PlanError, match="only glibc"):
        hotloop.fit(longer, run=tmp_path / "run", resume=True, plan=KEEP, progress=False)
    assert hotloop.fit(longer, run=tmp_path / "run", resume=True).plan.allocator == "default"
    assert "memory of steps isn't reused from here on" in " ".join(capfd.readouterr().err.split())


def test_what_is_remembered_is_of_the_allocator_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert speed_versions()["allocator"] == "glibc"
    monkeypatch.setattr(limits, "_is_glibc_malloc", lambda: False)
    assert "allocator" not in speed_versions() and "allocator" in _DEPENDS_ON


@pytest.mark.more
def test_the_result_has_the_same_bits() -> None:
    ends = []
    for plan in (KEEP, Plan()):
        program = hotloop.lower(a_task(), plan)
        advance(program, 5)
        ends.append(program.state())
        program.close()
    assert not differing_paths(*ends)


def asked(command: str, **environment: str) -> str:
    """What a process of its own says of its allocator."""
    code = f"from hotloop.core.hardware import limits\n{command}"
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


@pytest.mark.more
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "1000000"),
        pytest.param("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1000000", marks=pytest.mark.more),
    ],
)
def test_what_the_environment_says_stays(variable: str, value: str) -> None:
    assert asked("print(limits.active_allocator())") == "glibc"
    assert asked("print(limits.active_allocator())", **{variable: value}) == "None"


@pytest.mark.more
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, for an allocator to preload")
def test_another_allocator_that_is_preloaded_is_not_told(tmp_path: Path) -> None:
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(
        "#include <stddef.h>\nextern void *__libc_malloc(size_t);\nvoid *malloc(size_t n) { return __libc_malloc(n); }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert asked("print(limits.active_allocator())", LD_PRELOAD=str(library)) == "None"


def test_what_can_not_be_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_is_glibc_malloc", lambda: False)
    with pytest.raises(PlanError, match=r"allocator=keep can't be run here: only glibc's .* Use allocator=default"):
        hotloop.lower(a_task(), KEEP)


@pytest.mark.few("auto")
@pytest.mark.parametrize("plan", [KEEP, "auto"])
def test_a_training_keeps_it_and_gives_it_back(
    plan: Plan | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []

    class Process(axis._AllocatorState):
        def keep_freed(self, keeps: bool) -> None:
            if keeps != self.keeps:
                told.append(keeps)
            super().keep_freed(keeps)

    monkeypatch.setattr(axis, "_ALLOCATOR", Process())
    hotloop.fit(a_task(epochs=2), plan=plan, run=tmp_path / "run", progress=False)
    assert told == [True, False]
