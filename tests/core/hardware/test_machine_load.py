"""The load of other programs beside a measurement."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import NamedTuple

import pytest

from hotloop.core.hardware import machine_load
from hotloop.core.hardware.machine_load import (
    ACCEPT_LOAD,
    CpuUsage,
    LoadMeter,
    cores_used_by_others,
    is_busy,
    wait_until_quiet,
)
from tests.support.busy_machine import busy_process, pretend_load

BURN = "import time; until = time.process_time() + 0.5\nwhile time.process_time() < until: pass"


def test_the_load_of_others() -> None:
    before = CpuUsage(at=10.0, all_s=100.0, own_s=40.0)
    assert cores_used_by_others(before, CpuUsage(at=20.0, all_s=118.0, own_s=50.0)) == pytest.approx(0.8)
    assert cores_used_by_others(before, CpuUsage(at=20.0, all_s=109.9, own_s=50.0)) == 0.0
    assert is_busy(0.8, 2) and not is_busy(0.1, 2) and not is_busy(0.8, 64)


def test_work_on_cores_that_we_may_not_use_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Times(NamedTuple):
        user: float
        idle: float

    monkeypatch.setattr(machine_load.psutil, "cpu_times", lambda percpu: [Times(10.0, 5.0), Times(500.0, 1.0)])
    monkeypatch.setattr(machine_load, "allowed_cores", lambda: [0])
    assert CpuUsage.now().all_s == 10.0


def test_our_own_work_is_not_that_of_others() -> None:
    before, until = CpuUsage.now(), time.process_time() + 0.5
    while time.process_time() < until:
        pass
    after = CpuUsage.now()
    assert after.own_s - before.own_s >= 0.45
    assert after.all_s - before.all_s >= 0.4  # the system counts in hundredths


def test_the_work_of_a_finished_grandchild_is_our_own() -> None:
    """Such as a C++ compiler that a compiling process has started."""
    outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\nprint(1, flush=True)\nsys.stdin.read()"
    before = CpuUsage.now()
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        after = CpuUsage.now()
        child.communicate()
    assert after.own_s - before.own_s >= 0.45


def test_a_real_program_beside_makes_the_machine_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACCEPT_LOAD, "0")
    with busy_process() as other:
        meter, used = LoadMeter(), sum(other.cpu_times()[:2])
        while sum(other.cpu_times()[:2]) < used + 0.5:
            time.sleep(0.05)
        assert meter.others() > 0
        others = cores_used_by_others(meter._before, CpuUsage.now())
        assert others >= 0.4 / (time.monotonic() - meter._before.at)
    assert bool(meter.busy()) is is_busy(others, len(machine_load.allowed_cores()))


def test_the_remark_names_the_load_unless_the_user_accepts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_load(monkeypatch, cores=64.0)
    meter = LoadMeter()
    time.sleep(0.01)
    assert "other programs used 64.0 of its" in meter.busy() and "nothing is stored" in meter.busy()
    monkeypatch.setenv(ACCEPT_LOAD, "1")
    assert meter.busy() == ""


def test_a_measurement_waits_for_a_quiet_machine_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock, load = [0.0], [9.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setenv(ACCEPT_LOAD, "0")
    monkeypatch.setattr(machine_load.time, "sleep", sleep)
    monkeypatch.setattr(machine_load.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(CpuUsage, "now", classmethod(lambda cls: CpuUsage(clock[0], load[0] * clock[0], 0.0)))
    monkeypatch.setattr(machine_load, "allowed_cores", lambda: [0, 1])
    wait_until_quiet()
    assert sum(slept) == pytest.approx(machine_load.QUIET_WAIT_S, abs=0.15)
    slept.clear()
    wait_until_quiet(1.0)
    assert sum(slept) == pytest.approx(1.0, abs=0.15)
    slept.clear()
    load[0] = 0.0
    wait_until_quiet()
    assert len(slept) == 1
