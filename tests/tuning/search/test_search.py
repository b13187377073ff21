"""The search for a plan: what is chosen, and what never is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hotloop
from hotloop.core.hardware.devices import resolve_device
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.race import Parity, Timing, Verdict
from hotloop.errors import MemoryExhausted
from hotloop.plan import Plan
from hotloop.task_file import LoadedTask
from hotloop.tuning import search as module
from hotloop.tuning import tune
from hotloop.tuning.races.measure import Contender, RaceMeasurement
from hotloop.tuning.search import BASELINE, PlanSearch
from tests.support import programs
from tests.support.programs import a_task
from tests.support.tasks.model_families import family
from tests.support.tuning.fake_races import STEP_MS, Doubtful, Races, proving, searching, told


def test_what_pays_is_put_together_and_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    races = Races(optimizer__fused=1.3, layout__channels_last=1.4)
    looked = searching(monkeypatch, races)
    assert set(looked.run().split()) == {"optimizer=fused", "layout=channels_last"}
    chosen = looked.timings[races.raced[-1]]
    assert chosen.parity == "bitwise"


def test_nothing_slower_than_the_baseline_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searching(monkeypatch, Races(optimizer__fused=0.8, optimizer__foreach=0.9)).run() == BASELINE


def test_good_changes_that_are_bad_together_are_not_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clashing(Races):
        def timing(self, entrant: Contender, steps: int) -> Timing:
            found = super().timing(entrant, steps)
            clash = {"ratio": 0.5, "step_ms": 2 * STEP_MS, "verdict": "slower"}
            return found.model_copy(update=clash) if len(entrant.name.split()) > 1 else found

    looked = searching(monkeypatch, Clashing(optimizer__fused=1.3, layout__channels_last=1.4))
    assert looked.run() == "layout=channels_last"


@pytest.mark.parametrize("parity", ["broken", "unproven", "reduced-precision"])
def test_what_is_not_proven_equal_is_not_chosen(monkeypatch: pytest.MonkeyPatch, parity: str) -> None:
    looked = searching(monkeypatch, Races(optimizer__fused=1.3), prove=proving(parity))
    assert looked.run() == BASELINE
    assert looked.timings["optimizer=fused"].parity == parity


class Judging:
    """Proofs that some plans fail; each takes its time by a clock alone."""

    def __init__(self, *wrong: str, seconds: float = 0.0) -> None:
        self.wrong, self.seconds, self.now = wrong, seconds, 0.0
        self.asked: list[str] = []

    def __call__(self, programs: Sequence[Any]) -> list[Parity]:
        (name,) = (one.parts.plan.brief() for one in programs)
        self.asked.append(name)
        self.now += self.seconds
        parity = "broken" if any(part in name for part in self.wrong) else "bitwise"
        return [Parity(plan=name, parity=parity, reason="said so", states=16)]  # type: ignore[arg-type]


def test_proofs_go_on_until_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    judging = Judging("layout=channels_last")
    looked = searching(monkeypatch, Races(optimizer__fused=1.3, layout__channels_last=1.4), prove=judging)
    assert looked.run() == "optimizer=fused" and len(judging.asked) == 3


class Clashing(Races):
    """Both together are hardly faster than one."""

    def timing(self, entrant: Contender, steps: int) -> Timing:
        found = super().timing(entrant, steps)
        together = {"ratio": 1.35, "step_ms": STEP_MS / 1.35}
        return found.model_copy(update=together) if len(entrant.name.split()) > 1 else found


def test_a_proof_that_lacked_memory_says_nothing_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(programs: Sequence[Any]) -> list[Parity]:
        if programs[0].parts.plan.brief() == "layout=channels_last":
            raise torch.OutOfMemoryError("no room")
        return proving()(programs)  # type: ignore[no-any-return]

    looked = searching(monkeypatch, Clashing(optimizer__fused=1.3, layout__channels_last=1.4), prove=prove)
    assert set(looked.run().split()) == {"optimizer=fused", "layout=channels_last"}
    assert looked.timings["layout=channels_last"].short_of_memory


def test_what_has_a_change_that_is_not_proven_is_not_proven_either(monkeypatch: pytest.MonkeyPatch) -> None:
    judging = Judging("layout=channels_last")
    looked = searching(monkeypatch, Clashing(optimizer__fused=1.3, layout__channels_last=1.4), prove=judging)
    assert looked.run() == "optimizer=fused"
    assert judging.asked == ["layout=channels_last", "optimizer=fused"]
    (both,) = (timing for timing in looked.timings.values() if len(timing.name.split()) > 1)
    assert (both.parity, both.parity_reason) == ("unproven", "it has layout=channels_last, which is broken")


@pytest.mark.parametrize(("looking_ms", "says"), [(0.0, ""), (2.2, "more than it wins"), (4.0, "")])
def test_what_each_epoch_takes_beside_its_steps_counts_against_a_plan(
    looking_ms: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 80 s of training it leaves 18, less than the proof takes, or nothing."""

    class Looking(Races):
        def timing(self, entrant: Contender, steps: int) -> Timing:
            of = {"looking_ms": looking_ms if entrant.name == "optimizer=fused" else 0.0}
            return super().timing(entrant, steps).model_copy(update=of)

    judging = Judging()
    looked = searching(monkeypatch, Looking(optimizer__fused=1.3), steps=8_000, prove=judging)
    assert looked.run() == (BASELINE if looking_ms else "optimizer=fused")
    assert judging.asked == ([] if looking_ms else ["optimizer=fused"])
    assert any(says in note for note in looked.notes) or not says
    timing = looked.timings["optimizer=fused"]
    assert timing.run_s == pytest.approx(timing.starts_s + 8 * (STEP_MS / 1.3 + looking_ms))


def test_all_proofs_together_cost_less_than_what_is_proven_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 s of training; a proof should take 2.5 s, and the first takes 3 in vain."""
    judging = Judging("layout=channels_last", seconds=3.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: judging.now))
    races = Races(optimizer__fused=1.05, layout__channels_last=1.06)
    looked = searching(monkeypatch, races, steps=8_000, prove=judging)
    assert looked.run() == BASELINE and len(judging.asked) == 1
    assert len([note for note in looked.notes if "with the proofs before, more than it wins" in note]) == 2


def test_what_was_proven_stays_known_where_the_next_proof_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    judging = Judging("layout=channels_last")

    def prove(programs: Sequence[Any]) -> list[Parity]:
        if judging.asked:
            raise KeyboardInterrupt
        return judging(programs)

    looked = searching(monkeypatch, Clashing(optimizer__fused=1.3, layout__channels_last=1.4), prove=prove)
    with pytest.raises(KeyboardInterrupt):
        looked.run()
    assert looked.timings["layout=channels_last"].parity == "broken"
    assert looked.timings["optimizer=fused"].parity is None


@pytest.mark.parametrize(
    ("error", "memory"),
    [(MemoryExhausted("no room"), True), (torch.OutOfMemoryError("no room"), True), (ValueError("no room"), False)],
    ids=["as hotloop says it", "as torch does", "anything else"],
)
def test_where_a_proof_fails_the_plan_is_unproven(
    error: Exception, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prove(programs: Sequence[Any]) -> list[Parity]:
        raise error

    looked = searching(monkeypatch, Races(optimizer__fused=1.3), prove=prove)
    assert looked.run() == BASELINE
    found = looked.timings["optimizer=fused"]
    assert found.parity == "unproven" and "no room" in (found.parity_reason or "")
    assert found.short_of_memory == memory


def test_a_reduced_precision_that_was_asked_for_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    # this CPU may have no such instructions
    monkeypatch.setattr("hotloop.lowering.build._check_plan", lambda parts: None)
    base, hardware = resolve_device(Plan(precision="bf16"), "cpu"), told(family("cnn"))[1]
    able = replace(hardware.devices[0], precisions=("fp32", "bf16", "fp64"))
    looked = searching(
        monkeypatch,
        Races(optimizer__fused=1.3),
        prove=proving("reduced-precision"),
        fixed={"precision"},
        base=base,
        hardware=replace(hardware, compiler=None, devices=(able,)),
    )
    assert looked.run() == "precision=bf16 optimizer=fused"


@pytest.mark.parametrize("precision", ["default", "fp32"])
def test_one_that_was_not_asked_for_is_not_though_the_precision_is_named(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    base = resolve_device(Plan(precision=precision), "cpu")
    proof = proving("reduced-precision")
    looked = searching(monkeypatch, Races(optimizer__fused=1.3), prove=proof, fixed={"precision"}, base=base)
    assert looked.run() == BASELINE


def test_a_plan_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Races):
        def timing(self, entrant: Contender, steps: int) -> Timing:
            if "fused" in entrant.name:
                return Timing(name=entrant.name, failure="no room")
            return super().timing(entrant, steps)

    assert searching(monkeypatch, Failing(layout__channels_last=1.3)).run() == "layout=channels_last"


def test_what_failed_before_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    races = Races(optimizer__fused=2.0, optimizer__foreach=1.5)
    search = searching(monkeypatch, races, failed={"optimizer=fused": "out of memory"})
    assert search.run() == "optimizer=foreach"
    assert not any("fused" in name for name in races.raced)
    (note,) = (note for note in search.notes if "fused" in note)
    assert "out of memory" in note and "hotloop race" in note


def test_a_real_search_ends_with_the_baseline_or_a_proven_plan() -> None:
    task = a_task(epochs=50)
    base = resolve_device(Plan(), "cpu")
    facts, hardware = told(task)
    from hotloop.parity.proof import prove_programs

    looked = PlanSearch(
        task,
        base,
        base,
        {"device"},
        facts,
        replace(hardware, compiler=None),
        lambda made: prove_programs(task, made),
        2.0,
    )
    winner = looked.run()
    assert winner == BASELINE or looked.timings[winner].parity in ("bitwise", "fp32-equivalent")
    assert set(looked.timings) > {BASELINE}


def test_times_of_two_races_stand_beside_one_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is half as fast in the second race: what was raced in the first is no better for that."""

    class Slowing(Races):
        def timing(self, entrant: Contender, steps: int) -> Timing:
            found = super().timing(entrant, steps)
            slow = 2 if "optimizer=fused layout" in entrant.name or self.raced.count(BASELINE) > 1 else 1
            return found.model_copy(update={"step_ms": slow * (found.step_ms or 0)})

    looked = searching(monkeypatch, Slowing(optimizer__fused=1.3, layout__channels_last=1.4))
    assert len(looked.run().split()) == 2
    base = looked.timings[BASELINE]
    for timing in looked.timings.values():
        assert timing.step_ms == pytest.approx((base.step_ms or 0) / (timing.ratio or 1))


class Busy(Races):
    """The second race is beside another program, which slows all alike."""

    calls = 0

    def __call__(self, *given: Any, **how: Any) -> RaceMeasurement:
        self.calls += 1
        found = super().__call__(*given, **how)
        slower = 4.0 if self.calls == 2 else 1.0
        return RaceMeasurement(
            [one.model_copy(update={"step_ms": slower * (one.step_ms or 0.0)}) for one in found.plans], []
        )


def test_a_busy_while_between_two_races_takes_nothing_from_what_was_found_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    races = Busy(optimizer__fused=2.0, layout__channels_last=1.5)
    looked = searching(monkeypatch, races, compiler=True)
    looked.run()
    assert races.calls > 2 and looked.timings["optimizer=fused"].ratio == pytest.approx(2.0)
    assert looked.timings["optimizer=fused"].verdict == "faster"


def test_a_plan_pays_once_its_whole_start_is_won_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each race but the first its Program is there already."""
    lowered = module.lower

    def lower(task: Any, plan: Plan) -> Any:
        program = lowered(task, plan)
        program.compile_s = 30.0 if plan.optimizer == "fused" else 0.0
        return program

    monkeypatch.setattr(module, "lower", lower)
    looked = searching(monkeypatch, Doubtful(optimizer__fused=1.25))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    assert looked.run() == "optimizer=fused"
    fused = looked.timings["optimizer=fused"]
    assert fused.startup_s is not None and fused.compile_s == 30.0
    assert fused.pays_after == 15_000  # at 2 ms a step


def test_axes_that_were_set_stay_where_nothing_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Timing(name=BASELINE, plan=Plan().model_dump(), ratio=1.0)
    given: dict[str, Any] = dict(
        task="t", fingerprint="f", baseline=BASELINE, winner=BASELINE, machine="m", versions={}
    )
    verdict = Verdict(plans=[base], steps=10, seconds=3.0, **given)
    monkeypatch.setattr(tune, "tune_loaded", lambda *_, **__: verdict)
    wanted = PlanRequest.from_value("auto", {"accumulation": 2, "device": "cpu"})
    plan, told = tune.cached_or_tuned_plan(LoadedTask(a_task(), None, {}), wanted)
    assert plan == Plan(accumulation=2) and "accumulation=2" in told


def test_a_device_counts_more_than_that_of_a_plan() -> None:
    verdict = hotloop.tune(programs.a_task(), plan=Plan(device="cuda"), device="cpu", progress=False)
    assert verdict.plans[0].plan["device"] == "cpu"
