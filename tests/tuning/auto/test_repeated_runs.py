"""A Task that is trained again and again: steps of earlier runs are remembered, and compiling is worth as much to runs to come."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotloop.core.callback import View
from hotloop.core.hardware.machine import machine_name, speed_versions
from hotloop.errors import DiskError, HotloopError
from hotloop.plan import Plan
from hotloop.task_file import LoadedTask, load_task
from hotloop.tuning import auto, race_cache
from hotloop.tuning.auto import facts_with_fingerprint
from hotloop.tuning.race_cache import (
    CachedRace,
    best_race,
    expected_future_steps,
    load_races,
    load_trained_steps,
    save_trained_steps,
    unprofitable_plans,
)
from tests.support.runs import resume_run, start_run
from tests.support.tuning.handmade_verdicts import COMPILED, VERSIONS, timing
from tests.tuning.auto.test_recall import FILE
from tests.tuning.search.test_race_cache import ELSEWHERE

HERE: dict[str, Any] = dict(fingerprint="f", machine="m", versions=VERSIONS, device="cpu")
CPU = {"device": "cpu"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    monkeypatch.setattr(race_cache, "races_folder", lambda: tmp_path / "races")
    yield tmp_path / "races"


def test_steps_are_kept_until_they_are_spent() -> None:
    assert load_trained_steps(**HERE) == 0
    assert save_trained_steps(**HERE, steps=30) == []
    assert load_trained_steps(**HERE) == 30
    save_trained_steps(**HERE, steps=0)
    assert load_trained_steps(**HERE) == 0
    of_races = {name: value for name, value in HERE.items() if name != "device"}
    assert load_races(**of_races) == ([], [])  # they are no result of one


@pytest.mark.parametrize("name", [*ELSEWHERE, "another device"])
def test_steps_of_another_task_or_elsewhere_do_not_count(name: str) -> None:
    save_trained_steps(**HERE, steps=30)
    assert load_trained_steps(**HERE | {"device": "cpu"} | ELSEWHERE.get(name, {"device": "cuda:0"})) == 0


def test_steps_on_one_gpu_count_on_the_next() -> None:
    save_trained_steps(**HERE | {"device": "cuda:0"}, steps=30)
    assert load_trained_steps(**HERE | {"device": "cuda:1"}) == 30


@pytest.mark.parametrize("content", [b"", b"many", b"-5", b"\xff\xfe"], ids=["empty", "text", "negative", "bytes"])
def test_what_was_not_written_by_hotloop_counts_for_nothing(content: bytes, folder: Path) -> None:
    save_trained_steps(**HERE, steps=30)
    next(folder.glob("*/steps-cpu")).write_bytes(content)
    assert load_trained_steps(**HERE) == 0


def test_a_disk_that_is_full_costs_a_run_nothing_but_being_counted(monkeypatch) -> None:
    def full(path: Path, content: str) -> None:
        raise DiskError("no space is left")

    monkeypatch.setattr(race_cache, "write_atomic", full)
    assert save_trained_steps(**HERE, steps=7) == [
        "the run's steps couldn't be stored for later runs: no space is left"
    ]


def test_as_many_steps_are_expected_as_there_were_but_no_more_than_ten_such_runs() -> None:
    assert [expected_future_steps(before, 100) for before in (0, 40, 1_000, 50_000)] == [0, 40, 1_000, 1_000]


def kept_as(seconds: float, warm_s: float | None) -> CachedRace:
    """A plan that was compiled and proven, and wins 10 s in 20,000 steps of a millisecond."""
    measured = timing(COMPILED, 2.0, compile_s=seconds, compile_warm_s=warm_s, startup_s=0.0, step_ms=0.5)
    baseline = timing(Plan(), 1.0, startup_s=0.0, step_ms=1.0)
    return CachedRace(key={}, timing=measured, baseline=baseline)


@pytest.mark.parametrize(
    ("seconds", "warm_s", "to_come", "taken"),
    [
        (8.0, None, 0, True),
        (15.0, None, 0, False),
        (15.0, None, 20_000, True),  # compiled anew it wins 5 s of two runs
        (25.0, None, 200_000, False),  # longer than the run itself
        (15.0, 12.0, 200_000, False),  # a start takes longer than it saves, in each of them
        (15.0, 2.0, 0, True),
    ],
)
def test_what_must_be_compiled_anew_is_compiled_for_runs_to_come(
    seconds: float, warm_s: float | None, to_come: int, taken: bool
) -> None:
    one = kept_as(seconds, warm_s)
    assert best_race([one], 20_000, to_come=to_come) == (one if taken else None)
    assert unprofitable_plans([one], 20_000, to_come=to_come) == ([] if taken else [COMPILED])


def steps_of(reference: Path) -> int:
    of = facts_with_fingerprint(load_task(str(reference))).fingerprint
    return load_trained_steps(of, machine_name(), speed_versions(), "cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(FILE)  # two batches, one epoch
    return tmp_path / "task.py"


def test_runs_of_a_file_are_counted_whatever_their_length(file: Path, tmp_path: Path) -> None:
    loaded = load_task(str(file))
    start_run(loaded, run=tmp_path / "run", plan="auto", axes=CPU)
    assert steps_of(file) == 2
    start_run(loaded, run=tmp_path / "longer", plan="auto", axes=CPU, overrides={"epochs": 3})
    assert steps_of(file) == 8
    resume_run(tmp_path / "run", plan="auto", axes=CPU, overrides={"epochs": 4})
    assert steps_of(file) == 14


@pytest.mark.more
def test_runs_of_python_or_without_a_word_for_auto_are_not_counted(file: Path, tmp_path: Path) -> None:
    loaded = load_task(str(file))
    start_run(loaded, run=tmp_path / "run", plan="baseline", axes=CPU)
    start_run(loaded, run=tmp_path / "unasked", axes=CPU)
    start_run(LoadedTask(loaded.task, None, {}), run=tmp_path / "python", plan="auto", axes=CPU)
    assert steps_of(file) == 0 and not list(tmp_path.glob("races/*/steps*"))


def test_an_interrupted_run_counts_with_the_steps_that_it_did(file: Path, tmp_path: Path) -> None:
    def interrupting(view: View) -> None:
        if view.event == "epoch" and view.step == 6:
            signal.raise_signal(signal.SIGINT)

    loaded, run = load_task(str(file)), tmp_path / "run"
    start_run(loaded, run=run, plan="auto", axes=CPU, overrides={"epochs": 1000}, callbacks=[interrupting])
    assert 6 <= steps_of(file) < 100


def test_a_run_that_ends_in_an_error_counts_too(file: Path, tmp_path: Path) -> None:
    def failing(view: View) -> None:
        if view.event == "epoch":
            raise HotloopError("out of luck")

    with pytest.raises(HotloopError):
        start_run(load_task(str(file)), run=tmp_path / "run", plan="auto", axes=CPU, callbacks=[failing])
    assert steps_of(file) >= 2  # what may be done is noted ahead, for a tenth of a second


@pytest.mark.more
def test_what_a_run_did_before_it_was_stopped_is_no_earlier_run(file: Path, tmp_path: Path, monkeypatch) -> None:
    heard = list[int]()

    def noted(trained: int, steps: int | None) -> int:
        heard.append(trained)
        return expected_future_steps(trained, steps)

    loaded, run = load_task(str(file)), tmp_path / "run"
    start_run(loaded, run=run, plan="auto", axes=CPU, overrides={"epochs": 5})
    monkeypatch.setattr(auto, "expected_future_steps", noted)
    resume_run(run, plan="auto", axes=CPU, overrides={"epochs": 6})
    assert set(heard) == {0}


def test_what_earlier_runs_did_reaches_who_chooses(file: Path, tmp_path: Path, monkeypatch) -> None:
    heard = list[int]()

    def noted(trained: int, steps: int | None) -> int:
        heard.append(trained)
        return expected_future_steps(trained, steps)

    monkeypatch.setattr(auto, "expected_future_steps", noted)
    loaded = load_task(str(file))
    for name in "ab":
        start_run(loaded, run=tmp_path / name, plan="auto", axes=CPU)
    assert set(heard) == {0, 2}
