"""Beside other programs no command stores what it measured, nor calls it sure; each says so, and its JSON has a field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotloop.advisor.ledger import ledger_folder
from hotloop.advisor.this_machine import cpu_rates_here
from hotloop.core.hardware.probe import measure_hardware, speed_folder
from hotloop.core.records.race import STATES, Parity
from hotloop.plan import Plan
from hotloop.profiler import compile_race
from hotloop.profiler.step_costs import cpu_probe
from hotloop.report.race import winner_sentence
from hotloop.task_file import load_task
from hotloop.tuning import race, tune
from hotloop.tuning.auto import facts_with_fingerprint
from hotloop.tuning.contenders import RaceSpec
from hotloop.tuning.race_cache import races_folder
from hotloop.tuning.window_race import ProvenPlan, store_speed
from tests.cli.test_advise import CHIPS, one_line, rates_of
from tests.support.busy_machine import pretend_load
from tests.support.processes.in_process_command import SMALL, Hotloop
from tests.tuning.live.test_stored_speed import PLAN, raced

CPU = ("--device", "cpu")
REMARK = "the machine was busy: other programs used 1.0 of its"


@pytest.fixture(params=[1.0, 0.0], ids=["busy", "quiet"])
def is_busy(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether other programs use a core, in a folder with a Task and without stored results."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("hotloop.core.hardware.machine_load.allowed_cores", lambda: [0, 1])
    pretend_load(monkeypatch, request.param)
    adam = "optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=False)"
    (tmp_path / "task.py").write_text(f"{SMALL}task = make({adam}, epochs=30)\n")
    return bool(request.param)


def stored(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.json") if path.is_file()]


def test_a_search_stores_nothing(hotloop: Hotloop, is_busy: bool) -> None:
    found = hotloop("tune", "task.py", *CPU, "--set", "threads=1", "--time-limit", "8s", "--json").document
    assert found["busy"].startswith(REMARK) is is_busy
    assert bool(stored(races_folder())) is not is_busy
    assert not is_busy or not stored(races_folder().parent / "searches")


def test_a_race_stores_nothing_and_names_no_sure_winner(is_busy: bool) -> None:
    loaded = load_task("task.py")
    verdict = race.race_loaded(loaded, RaceSpec([Plan(device="cpu", optimizer="foreach")]), prove=None, racing_s=1.0)
    assert verdict.busy.startswith(REMARK) is is_busy
    assert bool(stored(races_folder())) is not is_busy
    assert winner_sentence(verdict).startswith("No sure winner: beside other programs") is is_busy


def test_a_plan_found_under_load_is_measured_not_sure(is_busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_task("task.py")
    spec = RaceSpec([Plan(device="cpu", optimizer="foreach")])

    def proven(*given: object) -> list[Parity]:
        return [Parity(plan="", parity="bitwise", reason="for the test", states=STATES)]

    verdict = race.race_loaded(loaded, spec, prove=proven, racing_s=1.0)
    (plan,) = [one for one in verdict.plans if one.name != verdict.baseline]
    faster = verdict.model_copy(
        update={
            "plans": [verdict.plan(verdict.baseline), plan.model_copy(update={"ratio": 64.0, "verdict": "faster"})],
            "winner": plan.name,
        }
    )
    monkeypatch.setattr(tune, "tune_loaded", lambda *given, **options: faster)
    said: list[str] = []
    wanted = tune.PlanRequest.from_value("auto", {"device": "cpu"})
    found, line = tune.cached_or_tuned_plan(loaded, wanted, say=said.append)
    assert found == plan.as_plan
    assert ("measured 64.00 times as fast as the baseline (not sure" in line) is is_busy
    assert any(REMARK in one for one in said) is is_busy


def test_a_race_in_real_steps_stores_nothing(is_busy: bool) -> None:
    loaded = load_task("task.py")
    proof = Parity(plan=PLAN.brief(), parity="bitwise", reason="for the test", states=STATES)
    contest = raced(1e-3, 2e-3)
    notes = store_speed("task", facts_with_fingerprint(loaded), contest, ProvenPlan(proof, 10.0, 0.1, 0.0))
    assert [REMARK in note for note in notes] == [True] * is_busy
    assert ("not sure: the machine was busy" in contest.describe()) is is_busy
    assert bool(stored(races_folder())) is not is_busy


def test_measured_speeds_and_rates_are_not_stored(is_busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.core.hardware.benchmarks.BUDGET_S", 0.001)
    monkeypatch.setattr(cpu_probe, "measure_cpu_rates", lambda **options: rates_of(1e-5))
    assert measure_hardware("cpu").busy.startswith(REMARK) is is_busy
    assert bool(stored(speed_folder())) is not is_busy
    assert cpu_rates_here()[2].startswith(REMARK) is is_busy
    assert bool(stored(speed_folder().parent / "cpu-rates")) is not is_busy


def test_advice_is_not_sure(hotloop: Hotloop, is_busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.core.hardware.benchmarks.BUDGET_S", 0.001)
    monkeypatch.setattr(cpu_probe, "measure_cpu_rates", lambda **options: rates_of(1e-5))
    found = hotloop("advise", "task.py", *CHIPS, "--json").document
    assert found["busy"].startswith(REMARK) is is_busy
    assert "(not sure: the machine was busy)" in found["answer"] or not is_busy
    assert "surely" not in found["answer"] or not is_busy
    (own,) = [row for row in found["machines"] if row["form"] == "here"]
    assert (own["source"] == "a step measured here") is not is_busy
    assert bool(stored(ledger_folder())) is not is_busy
    assert (REMARK in one_line(hotloop("advise", "task.py", *CHIPS).err)) is is_busy


def test_a_measured_step_is_no_correction_of_a_prediction(
    hotloop: Hotloop, tmp_path: Path, is_busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.core.hardware.benchmarks.BUDGET_S", 0.001)
    with pytest.MonkeyPatch.context() as quiet:
        pretend_load(quiet, 0.0)
        assert hotloop("advise", "task.py", "--plan", "baseline", *CHIPS).code == 0
    done = hotloop("train", "task.py", *CPU, "--plan", "baseline", "--run", "run")
    assert "predicted" in done.err and (REMARK in one_line(done.err)) is is_busy
    measured = [json.loads(path.read_text())["measured_ms"] for path in stored(ledger_folder())]
    assert any(measured) is not is_busy


def test_a_compiled_network_has_no_gain(is_busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr("torch.compile", lambda network: network)
    call = compile_race.NetworkCall.of(torch.nn.Linear(4, 4), (torch.randn(2, 4),), {})
    found = compile_race._race(call, compile_race.time.monotonic() + 3.0)
    assert ("ratio" in found) is not is_busy
    assert found.get("failure", "").startswith(REMARK) is is_busy


def test_no_batch_size_is_called_the_fastest(hotloop: Hotloop, is_busy: bool) -> None:
    """In a process of its own, where only the machine's true load counts: the sizes' remark comes from there."""
    from hotloop.hyperparameters import finders
    from hotloop.hyperparameters.trial_processes import TaskSource

    class HereInstead:
        def run(self, work: str, log: str, **job: object) -> dict[str, object]:
            return finders.measure_batch_size(**job)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finders, "_MEASURE_S", 0.05)
        found = finders.measure_batch_sizes(
            HereInstead(),
            TaskSource("task.py"),
            {},
            {"device": "cpu"},
            "task",
            lambda line: None,  # type: ignore[arg-type]
        )
    assert found.largest == 16
    assert found.busy.startswith(REMARK) is is_busy
    assert (found.fastest is None) is is_busy
