"""A Task that is trained again and again: steps of earlier runs are remembered, and compiling is worth as much to runs to come."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hotloop
from hotloop import kept, settling, weighing
from hotloop.choosing import lowered
from hotloop.errors import DiskError
from hotloop.kept import add_trained, recall, trained
from hotloop.plan import Plan
from hotloop.remembering import fingerprinted
from hotloop.setting import machine_name, speed_versions
from hotloop.taskfile import Loaded, load_task
from hotloop.training import go_on, start
from hotloop.view import View
from hotloop.weighing import Hope, Memory
from tests.cpu.made_verdicts import VERSIONS
from tests.cpu.pretended_compiling import AUTO, finding, make_any_run_long, pretend_to_compile
from tests.cpu.programs import a_task
from tests.cpu.test_race_kept import ELSEWHERE
from tests.cpu.test_race_taken import FILE

HERE: dict[str, Any] = dict(fingerprint="f", machine="m", versions=VERSIONS)
CPU = {"device": "cpu"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    monkeypatch.setattr(kept, "folder", lambda: tmp_path / "races")
    yield tmp_path / "races"


def test_steps_of_runs_add_up() -> None:
    assert trained(**HERE) == 0
    assert [add_trained(**HERE, steps=steps) for steps in (30, 12)] == [[], []]
    assert trained(**HERE) == 42
    assert recall(**HERE) == ([], [])  # they are no result of a race


@pytest.mark.parametrize("name", ELSEWHERE)
def test_steps_of_another_task_or_elsewhere_do_not_count(name: str) -> None:
    add_trained(**HERE, steps=30)
    assert trained(**HERE | ELSEWHERE[name]) == 0


@pytest.mark.parametrize("content", [b"", b"many", b"-5", b"\xff\xfe"], ids=["empty", "text", "negative", "bytes"])
def test_what_was_not_written_by_hotloop_counts_for_nothing(content: bytes, folder: Path) -> None:
    add_trained(**HERE, steps=30)
    next(folder.glob("*/steps")).write_bytes(content)
    assert trained(**HERE) == 0
    add_trained(**HERE, steps=7)
    assert trained(**HERE) == 7


def test_a_disk_that_is_full_costs_a_run_nothing_but_being_counted(monkeypatch) -> None:
    def full(path: Path, content: str) -> None:
        raise DiskError("no space is left")

    monkeypatch.setattr(kept, "write_atomic", full)
    assert add_trained(**HERE, steps=7) == ["the run's steps couldn't be noted for runs to come: no space is left"]


def test_as_many_steps_are_expected_as_there_were_but_no_more_than_ten_such_runs() -> None:
    assert [Memory(steps=before).to_come(100) for before in (0, 40, 1_000, 50_000)] == [0, 40, 1_000, 1_000]


def test_compiling_pays_by_runs_to_come_as_well() -> None:
    """It takes 15 s of 20 and wins 10 in each run: after two of them three times that."""
    hopes = [Hope(20_000, 1e-3, 2.0, compile_s=9.5, to_come=before) for before in (0, 20_000, 40_000)]
    assert [hope.compilations for hope in hopes] == [0, 0, 1]
    assert "save about 30 s of the 20,000 steps left and of 40,000 in runs to come, as there were before" in str(
        hopes[-1]
    )
    assert "to come" not in str(hopes[0])


def test_no_run_is_made_twice_as_long_for_those_to_come() -> None:
    assert [Hope(steps, 1e-3, 2.0, compile_s=9.5, to_come=10**9).compilations for steps in (14_000, 16_000)] == [0, 1]


def test_looks_at_what_callbacks_change_are_taken_in_runs_to_come_too(monkeypatch) -> None:
    monkeypatch.setattr(Hope, "pays", lambda hope, compilations=1: True)
    program = hotloop.lower(a_task(callbacks=[print]), Plan(device="cpu"))  # of five batches
    hope = weighing.hoped(program, 500, way="package", rewrites=False, to_come=1500)
    assert isinstance(hope, Hope) and (hope.looks, hope.to_come) == (400, 1500)


def test_a_race_and_its_proof_are_held_for_runs_to_come_too(monkeypatch) -> None:
    """A proof that wouldn't pay in this run alone."""
    make_any_run_long(monkeypatch)
    pretend_to_compile(monkeypatch)
    finding(monkeypatch)(compile__package=2.0)
    asked, plain = list[Any](), settling.Settling.run

    def noted(self: Any, *given: Any) -> Any:
        asked.append(self.facts.steps)
        return plain(self, *given)

    monkeypatch.setattr(settling.Settling, "run", noted)
    task = a_task(epochs=100)
    lowered(task, AUTO, memory=Memory(steps=700)).close()
    assert asked == [500 + 700]


def steps_of(reference: Path) -> int:
    of = fingerprinted(load_task(str(reference))).fingerprint
    return trained(of, machine_name(), speed_versions())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(FILE)  # two batches, one epoch
    return tmp_path / "task.py"


def test_runs_of_a_file_are_counted_whatever_their_length(file: Path, tmp_path: Path) -> None:
    loaded = load_task(str(file))
    start(loaded, run=tmp_path / "run", axes=CPU)
    assert steps_of(file) == 2
    start(loaded, run=tmp_path / "longer", plan="auto", axes=CPU, overrides={"epochs": 3})
    assert steps_of(file) == 8
    go_on(tmp_path / "run", plan="auto", axes=CPU, overrides={"epochs": 4})
    assert steps_of(file) == 14


def test_a_run_under_a_plan_of_the_users_is_not_counted_nor_one_of_python(file: Path, tmp_path: Path) -> None:
    loaded = load_task(str(file))
    start(loaded, run=tmp_path / "run", plan="baseline", axes=CPU)
    assert steps_of(file) == 0
    start(Loaded(loaded.task, None, {}), run=tmp_path / "python", plan="auto", axes=CPU)
    assert steps_of(file) == 0 and not list(tmp_path.glob("races/*/steps"))


def test_an_interrupted_run_counts_with_the_steps_that_it_did(file: Path, tmp_path: Path) -> None:
    def interrupting(view: View) -> None:
        if view.event == "epoch" and view.step == 6:
            signal.raise_signal(signal.SIGINT)

    start(load_task(str(file)), run=tmp_path / "run", axes=CPU, overrides={"epochs": 1000}, callbacks=[interrupting])
    assert 6 <= steps_of(file) < 100


def test_what_earlier_runs_did_reaches_who_chooses(file: Path, tmp_path: Path, monkeypatch) -> None:
    heard, plain = list[int](), Memory.to_come

    def noted(memory: Memory, steps: int) -> int:
        heard.append(memory.steps)
        return plain(memory, steps)

    make_any_run_long(monkeypatch)
    monkeypatch.setattr(Memory, "to_come", noted)
    loaded = load_task(str(file))
    for name in "ab":
        start(loaded, run=tmp_path / name, plan="auto", axes=CPU)
    assert set(heard) == {0, 2}
