"""Optuna's storage has the same rows for any order in which trials end, and after an end of the study at any call.

The trials are simulated, so that hundreds of interruptions take seconds; `test_trial_rounds` has real processes.
"""

from __future__ import annotations

import math
import random
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy

import hotloop
from hotloop.errors import DiskError, StudyError
from hotloop.hyperparameters import study_folder
from hotloop.hyperparameters.samplers import rungs, silence_optuna
from hotloop.hyperparameters.study_folder import StudyFolder
from hotloop.hyperparameters.trial_rounds import FINISHED, TIME_LIMIT, Rounds
from tests.hyperparameters.test_samplers import record
from tests.support.studies import SimulatedWorkers, new_folder, stored_rows

EPOCHS, TRIALS, MOST_KILLS = 5, 8, 12


class Killed(BaseException):
    """The end of the study's process."""


def settings(pruner: str = "halving", sampler: str = "tpe", repeats: int = 1) -> Any:
    return record(
        pruner=pruner, sampler=sampler, repeats=repeats, epochs=EPOCHS, rungs=rungs(pruner, EPOCHS), round_size=4
    )


def run(folder: StudyFolder, jobs: int = 1, order: int = 0, trials: int = TRIALS, until: float = math.inf) -> str:
    with silence_optuna():
        return Rounds(folder, SimulatedWorkers(order), None, jobs, lambda line: None).run(trials, until)


def whole(path: Path, study: Any, jobs: int = 1, order: int = 0) -> list[tuple]:
    assert run(new_folder(path, study), jobs, order) == FINISHED
    return stored_rows(path)


@pytest.mark.parametrize("pruner", ["none", "median", "hyperband", "halving"])
def test_the_order_in_which_trials_end_changes_nothing(tmp_path: Path, pruner: str) -> None:
    study = settings(pruner, repeats=2)
    first = whole(tmp_path / "first", study)
    assert whole(tmp_path / "second", study, jobs=3, order=1) == first
    states = {row[2] for row in first if row[0] == "trial"}
    assert "FAIL" in states
    assert ("PRUNED" in states) == (pruner in ("hyperband", "halving"))  # the median needs five complete trials


CALLS = (
    (SimulatedWorkers, "next_finished"),
    (StudyFolder, "store_progress"),
    (optuna.Study, "add_trial"),
    (optuna.Study, "set_user_attr"),
    (optuna.storages._CachedStorage, "set_trial_intermediate_value"),
    (optuna.storages._CachedStorage, "set_trial_system_attr"),
    (optuna.storages._CachedStorage, "set_trial_state_values"),
)
"""Where a study is ended, before and after the call."""


@contextmanager
def ended_after(patch: pytest.MonkeyPatch, calls: float) -> Iterator[list[int]]:
    """Ends the study after so many of CALLS; yields the number of calls."""
    count = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            count[0] += 1
            if count[0] >= calls:
                raise Killed
            return result

        return call

    with patch.context() as context:
        for owner, name in CALLS:
            context.setattr(owner, name, counted(getattr(owner, name)))
        yield count


def run_with_kills(path: Path, study: Any, patch: pytest.MonkeyPatch, seed: int, jobs: int = 2) -> int:
    """Runs a study that is ended again and again; returns how often."""
    draws, kills = random.Random(seed), 0
    folder = new_folder(path, study)
    while kills < MOST_KILLS:
        try:
            with ended_after(patch, draws.randint(1, 30)):
                run(folder, jobs, order=draws.randint(0, 99))
                return kills
        except Killed:
            kills += 1
            folder = StudyFolder.open(path)
    run(folder, jobs)
    return kills


@pytest.mark.parametrize("pruner", ["halving", pytest.param("median", marks=pytest.mark.more)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.more) for seed in range(1, 10))])
def test_an_end_at_any_call_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pruner: str, seed: int
) -> None:
    study = settings(pruner)
    first = whole(tmp_path / "whole", study)
    assert run_with_kills(tmp_path / "killed", study, monkeypatch, seed) > 3
    assert stored_rows(tmp_path / "killed") == first


def values_in_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    """The first trial that ends gives its value to the first trial of the round."""
    store, seen = StudyFolder.store_progress, list[int]()

    def stored(self: StudyFolder, progress: Any) -> None:
        if progress.number not in seen:
            seen.append(progress.number)
        store(self, progress.model_copy(update={"number": seen.index(progress.number)}))

    patch.setattr(StudyFolder, "store_progress", stored)


def fresh_numbers_after_a_kill(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rounds, "_store_proposals", lambda self, trials, start: self.folder.optuna.add_trials(trials[start:]))


def failures_known_too_early(patch: pytest.MonkeyPatch) -> None:
    """A round that is computed again leaves out of its comparisons what fails later."""
    patch.setattr(Rounds, "_has_failed", lambda self, number, rung=0: any(one.error for one in self._progress(number)))


def one_sampler_for_all_rounds(patch: pytest.MonkeyPatch) -> None:
    """The sampler's random numbers go on from round to round, so that they depend on what this process has proposed."""
    from hotloop.hyperparameters import trial_rounds

    made: dict[int, Any] = {}
    fresh = trial_rounds.make_sampler
    patch.setattr(trial_rounds, "make_sampler", lambda study, index: made.setdefault(id(study), fresh(study, 0)))


FAULTS = (values_in_order_of_arrival, fresh_numbers_after_a_kill, one_sampler_for_all_rounds)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]) -> None:
    study = settings()
    first = whole(tmp_path / "whole", study)
    fault(monkeypatch)
    with suppress(Exception):  # of trials that Optuna refuses
        run_with_kills(tmp_path / "faulty", study, monkeypatch, seed=0)
    assert stored_rows(tmp_path / "faulty") != first


@pytest.mark.parametrize("fault", [None, failures_known_too_early])
def test_a_failure_changes_no_comparison_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None] | None
) -> None:
    study, store = settings(), StudyFolder.store_progress
    first = whole(tmp_path / "whole", study)
    if fault is not None:
        fault(monkeypatch)

    def end_after_a_failure(self: StudyFolder, progress: Any) -> None:
        store(self, progress)
        if progress.error:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(StudyFolder, "store_progress", end_after_a_failure)
        run(new_folder(tmp_path / "ended", study))
    run(StudyFolder.open(tmp_path / "ended"))
    assert (stored_rows(tmp_path / "ended") == first) == (fault is None)


def journal_mode(path: Path) -> str:
    connection = sqlite3.connect(path)
    try:
        return connection.execute("PRAGMA journal_mode").fetchone()[0]
    finally:
        connection.close()


@pytest.mark.parametrize("has_reader", [False, True])
def test_a_study_at_its_end_is_one_file(tmp_path: Path, has_reader: bool) -> None:
    """A reader such as Optuna's dashboard may delay this, and is no error."""
    folder = new_folder(tmp_path / "s", settings())
    with folder.locked():
        assert run(folder) == FINISHED
        assert journal_mode(tmp_path / "s/study.db") == "wal"
        reader = sqlite3.connect(tmp_path / "s/study.db")
        if has_reader:
            reader.execute("begin")
            reader.execute("select * from trials").fetchone()
    reader.close()
    assert journal_mode(tmp_path / "s/study.db") == ("wal" if has_reader else "delete")
    assert sorted(path.name for path in (tmp_path / "s").glob("study.db*")) == ["study.db"]
    assert len(StudyFolder.open(tmp_path / "s").optuna.trials) == TRIALS


def test_the_time_limit_ends_the_study_after_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotloop.hyperparameters import trial_rounds

    folder = new_folder(tmp_path / "s", settings())
    clock = iter(range(100))
    monkeypatch.setattr(trial_rounds.time, "monotonic", lambda: float(next(clock)))
    assert run(folder, until=1.0) == TIME_LIMIT
    states = [trial.state.name for trial in folder.optuna.get_trials()]
    assert len(states) == 4 and "RUNNING" not in states
    monkeypatch.undo()
    assert run(folder) == FINISHED
    assert stored_rows(tmp_path / "s") == whole(tmp_path / "whole", settings())


def test_a_second_new_study_leaves_the_first_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_folder, "_LOCK_S", 0.1)
    (tmp_path / "task.py").touch()
    first = study_folder.new_folder(tmp_path / "s")
    with ThreadPoolExecutor(1) as other:  # has its own lock, as another process
        other.submit(first.__enter__).result()
        (tmp_path / "s" / "source").mkdir()
        with pytest.raises(StudyError, match="is in use by another process"):
            hotloop.study(tmp_path / "task.py", {"lr": [1, 2]}, folder=tmp_path / "s", progress=False)
        assert (tmp_path / "s" / "source").is_dir()
        other.submit(first.__exit__, None, None, None).result()


def test_two_studies_of_one_second_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study_folder.time, "strftime", lambda form: "20261128-120000")
    assert [study_folder.make_folder("a").name for _ in range(2)] == ["a-20261128-120000", "a-20261128-120000-2"]


@pytest.mark.parametrize(
    ("statement", "kind", "line"),
    [
        ("insert into t values (1)", DiskError, "study.db can't be used: attempt to write a readonly database"),
        ("select * from t", StudyError, "study.db is damaged: file is not a database"),
    ],
)
def test_an_error_of_sqlite_is_one_line(tmp_path: Path, statement: str, kind: type[Exception], line: str) -> None:
    path = tmp_path / "study.db"
    if kind is DiskError:
        sqlite3.connect(path).execute("create table t (a int)").connection.close()
    else:
        path.write_text("no database, but a text that is long enough for a header" * 20)
    engine = sqlalchemy.create_engine(f"sqlite:///file:{path}?mode=ro&uri=true")
    with pytest.raises(kind) as error, study_folder.translate_storage_errors(tmp_path), engine.begin() as connection:
        connection.exec_driver_sql(statement)
    assert line in str(error.value) and "\n" not in str(error.value)
    engine.dispose()
