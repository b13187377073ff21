"""`hotloop tune`, and training that takes what it remembered."""

from __future__ import annotations

import importlib
import json
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotloop.core.files.run_folder import StoredRun
from hotloop.core.records.race import TRUSTED_CLASSES, Verdict
from hotloop.errors import PlanError
from hotloop.plan import Plan
from hotloop.report.run_report import run_report
from hotloop.training.run import Run
from hotloop.tuning import search, tune
from tests.support.processes.in_process_command import SMALL, Hotloop, commands

CPU = ("--device", "cpu")


class Ticking:
    """A clock that only moves when it is asked, and when one kind of update takes its time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now

    def slowed(self, update: Callable[..., None]) -> Callable[..., None]:
        """The same update, for which the clock moves on by 3 ms."""

        def slow(*args: Any, **kwargs: Any) -> None:
            self.now += 3e-3
            update(*args, **kwargs)

        return slow


@pytest.fixture
def hotloop(tmp_path: Path, monkeypatch, capfd) -> Iterator[Hotloop]:
    """In a folder with a Task whose update pays to be written in another way, by a clock that no load disturbs."""
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: tmp_path / "cache")
    clock, adam = Ticking(), importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_single_tensor_adam", clock.slowed(adam._single_tensor_adam))
    monkeypatch.setattr(search, "measure", partial(search.measure, clock=clock))
    monkeypatch.setattr(search, "Runner", partial(search.Runner, clock=clock))
    monkeypatch.setattr(search, "time", SimpleNamespace(perf_counter=clock))
    # nor does it know what memory costs
    monkeypatch.setattr("hotloop.core.hardware.limits._is_glibc_malloc", lambda: False)
    monkeypatch.setattr(search, "compiled_changes", lambda *given: [])  # compiling has tests of its own
    (tmp_path / "task.py").write_text(
        f"""{SMALL}
def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, foreach=False)

task = make(optimizer=adam, epochs=30)
"""
    )
    with commands(tmp_path, monkeypatch, capfd) as run:
        yield run


def plan_of(folder: Path) -> dict[str, Any]:
    plan = tomllib.loads((folder / "plan.toml").read_text())
    return {axis: value for axis, value in plan.items() if value != getattr(Plan(), axis)}


@pytest.mark.more
def test_what_it_finds_is_what_training_takes(hotloop: Hotloop, tmp_path: Path) -> None:
    done = hotloop("tune", "task.py", *CPU, "--set", "threads=1", "--time-limit", "30s", "--json")
    assert done.code == 0
    verdict = Verdict(**done.document)
    assert verdict.winner is not None
    winner = verdict.plan(verdict.winner)
    assert winner.verdict == "faster"
    assert winner.parity in ("bitwise", "fp32-equivalent")
    assert winner.plan["optimizer"] in ("fused", "foreach")
    assert winner.plan["threads"] == 1  # as it was set

    said = hotloop("train", "task.py", *CPU, "--run", "remembered")
    assert "stored as the fastest" in said.err
    assert plan_of(tmp_path / "remembered") == plan_of_timing(winner.plan)

    said = hotloop("train", "task.py", *CPU, "--run", "again", "--tune")
    assert "tune: optimizer=" in said.err and "remembered" in said.err
    assert plan_of(tmp_path / "again") == plan_of_timing(winner.plan)

    hotloop("train", "task.py", *CPU, "--plan", "baseline", "--run", "plain")
    assert plan_of(tmp_path / "plain") == {}

    # Another Task in the same file's place is another Task.
    (tmp_path / "task.py").write_text((tmp_path / "task.py").read_text().replace("lr=1e-3", "lr=2e-3"))
    said = hotloop("train", "task.py", *CPU, "--run", "changed")
    assert "remembered" not in said.err


LONG = ("--epochs", "12000")
"""So many that a search pays for itself."""


def test_training_may_look_for_its_plan_first(hotloop: Hotloop, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text(task.read_text().replace("epochs=30", "patience=1, monitor='train_loss', goal='max'"))  # ends soon
    done = hotloop(
        "train", "task.py", *CPU, *LONG, "--stop-after", "1h", "--set", "threads=1", "--tune", "--run", "tuned"
    )
    assert done.code == 0
    assert "times as fast as the baseline and" in done.err
    plan = plan_of(tmp_path / "tuned")
    assert plan.pop("threads") == 1
    assert plan.keys() == {"optimizer"}
    found = Verdict.model_validate_json((tmp_path / "tuned" / "plan_search.json").read_text())
    assert found.winner is not None
    winner = found.plan(found.winner)
    assert plan_of(tmp_path / "tuned") == plan_of_timing(winner.plan)
    assert winner.ratio_low is not None and winner.ratio_low > 1 and winner.parity in TRUSTED_CLASSES
    page = run_report(StoredRun.read(tmp_path / "tuned"))
    assert "Plan: race and proof" in page and f"{winner.ratio_low:.2f} to {winner.ratio_high:.2f}" in page

    hotloop("train", "task.py", *CPU, *LONG, "--run", "stored", "--set", "threads=1", "--plan", "auto")
    stored = Verdict.model_validate_json((tmp_path / "stored" / "plan_search.json").read_text())
    assert stored.winner == found.winner and "a stored result" in stored.notes[0]
    hotloop("train", "task.py", *CPU, "--run", "plain", "--plan", "baseline")
    assert not (tmp_path / "plain" / "plan_search.json").exists()


def test_a_damaged_search_is_named_in_the_report(hotloop: Hotloop, tmp_path: Path) -> None:
    hotloop("train", "task.py", *CPU, "--run", "run", "--plan", "baseline", "--epochs", "1")
    (tmp_path / "run" / "plan_search.json").write_text("{")
    assert "plan_search.json is damaged and left out" in run_report(StoredRun.read(tmp_path / "run"))


@pytest.mark.more
def test_the_time_of_a_search_counts_for_stop_after(hotloop: Hotloop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search keeps to a third of it, and what it takes all the same is time that the run doesn't have."""
    real, limit_s = tune.cached_or_tuned_plan, 1.0

    def slow(*given: Any, **options: Any) -> Any:
        found = real(*given, **options)
        time.sleep(max(0.0, options["until"] - time.monotonic()))
        return found

    monkeypatch.setattr(tune, "cached_or_tuned_plan", slow)
    done = hotloop("train", "task.py", *CPU, *LONG, "--stop-after", f"{limit_s}s", "--tune", "--run", "late")
    assert done.code == 0
    assert "a race and a proof take about" in done.err and "of the third of the time until stop-after" in done.err
    stop = Run.open(Path("late")).journal()[-1]
    assert (stop["reason"], stop["step"] <= 1) == ("stop-after", True)


BEFORE = {
    "stop-after": (("--stop-after", "soon"), "stop-after='soon'"),
    "checkpoint-every": (("--checkpoint-every", "often"), "checkpoint-every='often'"),
    "run": (("--run", "."), ". exists and is not a run"),
}


@pytest.mark.parametrize("option", BEFORE)
def test_a_wrong_option_shows_before_a_search(option: str, hotloop: Hotloop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "cached_or_tuned_plan", lambda *given, **options: pytest.fail("a search was made"))
    given, says = BEFORE[option]
    done = hotloop("train", "task.py", *CPU, *LONG, "--tune", *given)
    assert done.code == 1 and says in done.err and done.err.count("\n") == 1


@pytest.mark.more
def test_a_short_training_doesn_t_look_for_long(hotloop: Hotloop, tmp_path: Path) -> None:
    done = hotloop("train", "task.py", *CPU, "--tune", "--run", "short")
    assert done.code == 0
    assert "doesn't pay" in done.err
    assert "tune: nothing was raced" in done.err and "the plan is that of the rules" in done.err
    hotloop("train", "task.py", *CPU, "--run", "plain")
    assert plan_of(tmp_path / "short") == plan_of(tmp_path / "plain") == {"optimizer": "fused"}


def plan_of_timing(axes: dict[str, Any]) -> dict[str, Any]:
    return {axis: value for axis, value in axes.items() if value != getattr(Plan(), axis)}


def test_a_run_too_short_to_tune_keeps_the_baseline_and_says_so(hotloop: Hotloop) -> None:
    done = hotloop("tune", "task.py", *CPU, "--json")
    assert done.code == 0
    assert done.document["winner"] == "baseline"
    assert any("doesn't pay" in note for note in done.document["notes"])


@pytest.mark.more
def test_what_was_raced_before_the_proof_ended_is_kept(
    hotloop: Hotloop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prove(*given: Any, **axes: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hotloop.tuning.tune.prove_programs", prove)
    assert hotloop("tune", "task.py", *CPU, "--time-limit", "30s").code == 130
    kept = [json.loads(path.read_text())["timing"] for path in (tmp_path / "cache").rglob("*.json")]
    assert any(one["verdict"] == "faster" for one in kept) and not any(one["parity"] for one in kept)


def test_a_plan_that_was_set_and_can_t_be_run_is_told_each_time(
    hotloop: Hotloop, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered = search.lower

    def lower(task: Any, plan: Plan) -> Any:
        if plan.threads == 1:
            raise PlanError("threads=1 is planted")
        return lowered(task, plan)

    monkeypatch.setattr(search, "lower", lower)
    for _ in range(2):
        done = hotloop("tune", "task.py", *CPU, "--set", "threads=1", "--time-limit", "30s")
        assert done.code == 1 and "threads=1, as you set it, can't be run: threads=1 is planted" in done.err


@pytest.mark.parametrize("given", [("--plan", "baseline"), ("--resume", "runs/first")])
def test_a_plan_that_is_given_is_not_looked_for(hotloop: Hotloop, given: tuple[str, str]) -> None:
    task = () if given[0] == "--resume" else ("task.py",)
    done = hotloop("train", *task, *given, "--tune")
    assert done.code == 2
    assert "--tune searches a plan for a new run" in done.err


def test_a_plan_for_ranks_is_not_looked_for(hotloop: Hotloop) -> None:
    done = hotloop("train", "task.py", "--ranks", "2", "--tune")
    assert done.code == 2
    assert "--tune searches a plan for one process" in done.err


WRONG = {
    "a time limit": (("--time-limit", "soon"), "time-limit"),
    "an axis": (("--set", "nosuch=1"), "nosuch"),
    "a device": (("--device", "cuda:7"), "cuda:7"),
    "an axis that can't be run": (("--set", "graphs=step", *CPU), "graphs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_one_line(hotloop: Hotloop, name: str) -> None:
    arguments, says = WRONG[name]
    done = hotloop("tune", "task.py", *arguments)
    assert done.code in (1, 2)
    errors = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert says in errors[0]
    assert "Traceback" not in done.err
