"""The search for a plan: what it may cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hotloop.core.hardware.devices import resolve_device
from hotloop.core.records.race import Timing
from hotloop.errors import PlanError
from hotloop.plan import Plan
from hotloop.tuning import search as module
from hotloop.tuning.economics import Budget
from hotloop.tuning.races.measure import Contender
from hotloop.tuning.search import BASELINE
from hotloop.tuning.step_profile import StepProfile, profile_step
from tests.support import programs
from tests.support.tasks.model_families import family
from tests.support.tuning.fake_races import HALF, STEP_MS, Races, Rounds, proving, searching, uncompiled


def test_racing_takes_a_small_share_of_the_run() -> None:
    budget = Budget.of(0.01, 100_000, None)
    assert budget.racing_s < 0.05 * budget.run_s
    assert Budget.of(0.01, 100, None).is_too_small
    assert Budget.of(0.01, 100, 30.0).racing_s == 30.0
    assert not Budget.of(0.01, 100, 30.0).is_too_small


def test_a_race_has_the_time_that_it_takes_to_tell_anything() -> None:
    run = Budget.of(0.01, 10_000, None)
    assert run.racing_s / 8 < run.least_s == run.race_s(1 / 8) < run.race_s(1.0) == run.racing_s
    assert Budget.of(0.01, 10_000, 4.0).race_s(1 / 8) == 0.5  # the user's limit is kept to


def test_of_long_steps_races_may_take_as_long_as_the_proof_of_what_they_find() -> None:
    short, long = (Budget.of(step_s, 10_000_000, None) for step_s in (0.1, 2.0))
    assert long.racing_s == pytest.approx(long.proof_s) and long.proof_s > short.racing_s
    few = Budget.of(2.0, 5_000, None)
    assert few.racing_s < 0.05 * few.run_s


def test_a_short_run_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    races = Races(threads__1=3.0)
    looked = searching(monkeypatch, races, steps=2_000)  # 20 s
    assert looked.run() == BASELINE
    assert races.raced == [BASELINE]
    assert "doesn't pay" in looked.notes[0]
    assert looked.left_open


def test_of_a_run_of_few_steps_none_is_run_to_see_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of half a minute: a look at one of them would take a tenth of the run."""
    looked = searching(monkeypatch, Races(), steps=10)
    monkeypatch.setattr(module, "lower", lambda task, plan: pytest.fail("it was lowered"))
    assert looked.run() == BASELINE
    assert "a proof takes as long as about 250 steps" in looked.notes[0]
    assert looked.timings[BASELINE].step_ms is None and looked.left_open


def test_races_keep_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    races = Races(optimizer__fused=1.2, layout__channels_last=1.2)
    searching(monkeypatch, races, steps=30_000).run()
    assert races.seconds <= Budget.of(STEP_MS / 1e3, 30_000, None).racing_s


def test_a_proof_that_costs_more_than_it_wins_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = searching(monkeypatch, Races(optimizer__fused=1.031), steps=8_000)  # 80 s, of which it saves 2.4
    assert looked.run() == BASELINE
    assert "not proven" in looked.notes[-1]


def test_no_compilation_where_the_run_is_too_short_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "profile_step", lambda program: StepProfile(100, STEP_MS / 1e3, 0.65 * STEP_MS / 1e3, 0.0)
    )
    looked = searching(monkeypatch, Races(), steps=8_000, compiler=True)  # 80 s, of which it could save 16
    looked.run()
    assert any("no compilation was tried" in note for note in looked.notes)


def test_a_long_run_tries_the_best_plan_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gain that is hoped for is that over the best plan without a compiler, whose operations are counted."""
    lowered, counted = module.lower, []
    monkeypatch.setattr(
        module, "lower", lambda task, plan: lowered(task, plan.with_axes(compile="none", rewrites="none"))
    )
    monkeypatch.setattr(
        module, "profile_step", lambda program: counted.append(program.parts.plan.optimizer) or StepProfile(1_000)
    )
    races = Races(optimizer__fused=1.3, layout__channels_last=1.4, compile__package=2.0)
    searching(monkeypatch, races, steps=400_000, compiler=True).run()
    # A compiler writes the update its own way, and rewrites know the usual order of dimensions.
    assert races.raced[-2:] == ["layout=channels_last compile=package", "compile=package rewrites=all"]
    assert counted == ["fused"]


@pytest.mark.parametrize(
    ("steps", "fused", "raced"),
    [
        (8_000, 1.0, ["compile=step rewrites=all"]),  # which is compiled sooner
        (14_000, 1.0, ["compile=package rewrites=all"]),  # of 140 s it leaves 70, too few to compile another
        (20_000, 1.5, ["compile=package rewrites=all"]),  # of 133 s, which the best eager plan takes, it leaves 67
        (200_000, 1.0, ["compile=package rewrites=all", "compile=package"]),
    ],
)
def test_where_there_is_time_for_one_compilation_it_is_the_rewritten_step(
    monkeypatch: pytest.MonkeyPatch, steps: int, fused: float, raced: list[str]
) -> None:
    lowered = module.lower
    monkeypatch.setattr(
        module, "lower", lambda task, plan: lowered(task, plan.with_axes(compile="none", rewrites="none"))
    )
    monkeypatch.setattr(module, "profile_step", lambda program: HALF)
    races = Races(optimizer__fused=fused, compile__package=2.0, compile__step=1.9, rewrites__all=2.0)
    as_usual = {"device", "layout"}
    assert searching(monkeypatch, races, steps=steps, compiler=True, fixed=as_usual).run() == raced[0]
    assert [name for name in races.raced if "compile" in name] == raced


LAID, REWRITTEN = "layout=channels_last compile=package", "compile=package rewrites=all"


@pytest.mark.parametrize(
    ("steps", "pooled", "eagerly", "raced"),
    [
        (14_000, False, 0.9, [LAID]),
        (14_000, True, 0.9, [REWRITTEN]),
        (14_000, False, 1.1, [LAID]),
        (14_000, True, 1.1, [REWRITTEN]),
        (20_000, False, 0.9, [LAID, "compile=package"]),  # there is no time for three
        (200_000, False, 0.9, [LAID, REWRITTEN, "compile=package"]),
    ],
)
def test_images_are_compiled_with_channels_last_unless_pooling_can_be_rewritten(
    monkeypatch: pytest.MonkeyPatch, steps: int, pooled: bool, eagerly: float, raced: list[str]
) -> None:
    """Whether or not an eager step is faster so."""
    lowered = module.lower
    monkeypatch.setattr(
        module, "lower", lambda task, plan: lowered(task, plan.with_axes(compile="none", rewrites="none"))
    )
    monkeypatch.setattr(module, "profile_step", lambda program: replace(HALF, has_pooling=pooled))
    races = Races(layout__channels_last=eagerly, compile__package=2.0, rewrites__all=1.2)
    searching(monkeypatch, races, steps=steps, compiler=True).run()
    assert [name for name in races.raced if "compile" in name] == raced


def test_a_compiled_step_is_not_left_out_for_a_rewritten_one_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered, classes = module.lower, iter(["broken", "bitwise"])
    monkeypatch.setattr(
        module, "lower", lambda task, plan: lowered(task, plan.with_axes(compile="none", rewrites="none"))
    )
    monkeypatch.setattr(module, "profile_step", lambda program: HALF)
    races = Rounds(compile__package=1.6, rewrites__all=1.4)
    prove = lambda programs: proving(next(classes))(programs)  # noqa: E731
    assert searching(monkeypatch, races, steps=200_000, compiler=True, prove=prove).run() == "compile=package"


@pytest.mark.parametrize(
    ("speed", "steps", "alone"), [(4.0, 200_000, True), (1.5, 200_000, False), (4.0, 20_000, False)]
)
def test_a_short_compiled_step_races_on_one_thread_too_where_there_is_time(
    monkeypatch: pytest.MonkeyPatch, speed: float, steps: int, alone: bool
) -> None:
    """A step of 10 ms / 4 is too short to share, of 10 / 1.5 it isn't; of 200 s it leaves 50, too few to compile it once more."""
    uncompiled(monkeypatch)
    monkeypatch.setattr(module, "profile_step", lambda program: HALF)
    races = Races(compile__package=speed)
    search = searching(monkeypatch, races, steps=steps, compiler=True, threads=2, task=family("mlp"))
    search.run()
    assert ("threads=1" in races.raced[-1] and "compile=package" in races.raced[-1]) is alone


def test_a_step_with_nothing_to_rewrite_is_compiled_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Races):
        def timing(self, entrant: Contender, steps: int) -> Timing:
            if "rewrites" in entrant.name:
                return Timing(name=entrant.name, failure="nothing to rewrite")
            return super().timing(entrant, steps)

    uncompiled(monkeypatch)
    monkeypatch.setattr(module, "profile_step", lambda program: HALF)
    looked = searching(monkeypatch, Plain(compile__step=2.0), steps=10_000, compiler=True, fixed={"device", "layout"})
    assert looked.run() == "compile=step"


class Failing(Races):
    """Plans with any of these axes can't be run."""

    def __init__(self, *parts: str, **speeds: float) -> None:
        super().__init__(**speeds)
        self.parts = parts

    def timing(self, entrant: Contender, steps: int) -> Timing:
        if any(part in entrant.name for part in self.parts):
            self.raced.append(entrant.name)
            return Timing(name=entrant.name, failure="it can't")
        return super().timing(entrant, steps)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, and each step could be twice as fast."""
    uncompiled(monkeypatch)
    monkeypatch.setattr(module, "profile_step", lambda program: HALF)


@pytest.mark.parametrize("steps", [40_000, 200_000])
@pytest.mark.parametrize("before", [(), ("compile=package", "compile=package rewrites=all")])
def test_where_one_way_to_compile_cannot_be_run_the_next_is_tried(
    steps: int, before: Sequence[str], compiling: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether that shows now, or did so before."""
    races = Failing("compile=package", "rewrites", "compile=step", compile__forward=2.0)
    failed = dict.fromkeys(before, "it can't")
    looked = searching(monkeypatch, races, steps=steps, compiler=True, failed=failed)
    assert looked.run() == "compile=forward"
    assert ("compile=package" in races.raced) is not bool(before)


def test_a_way_to_compile_that_failed_late_leaves_no_time_for_another(
    compiling: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 80 s of training a compiler should win 21: time for one compilation, and for the one that takes less."""
    clock = [0.0]

    class Late(Failing):
        def timing(self, entrant: Contender, steps: int) -> Timing:
            clock[0] += 10.0 if "compile" in entrant.name else 0.0
            return super().timing(entrant, steps)

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    races = Late("compile=step", compile__package=2.0)
    looked = searching(monkeypatch, races, steps=8_000, compiler=True, task=family("mlp"))
    assert looked.run() == BASELINE and "compile=package" not in races.raced
    assert "no other compilation was tried" in looked.notes[-1]


def test_axes_of_the_user_s_that_can_t_be_run_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = searching(
        monkeypatch, Failing("residency=host"), base=resolve_device(Plan(residency="host"), "cpu"), compiler=True
    )
    with pytest.raises(PlanError, match="residency=host, as you set it, can't be run: it can't"):
        looked.run()


def test_what_is_faster_than_the_baseline_by_what_the_user_set_alone_wins_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    races = Races(residency__host=1.6, layout__channels_last=0.8)
    base = resolve_device(Plan(residency="host"), "cpu")
    looked = searching(monkeypatch, races, base=base, fixed={"device", "residency"}, compiler=True)
    assert "layout" not in looked.run()
    alone = [name for name in races.raced if "layout" in name and "compile" not in name]
    assert alone == ["layout=channels_last residency=host"]  # once


def test_good_changes_that_can_t_be_run_together_are_taken_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = dict.fromkeys(
        ("compile__package", "compile__step", "compile__forward"), 0.95
    )  # not as fast, but for its start
    races = Failing("layout=channels_last optimizer=fused", optimizer__fused=1.3, layout__channels_last=1.4, **slower)
    assert searching(monkeypatch, races, compiler=True, steps=10_000).run() == "layout=channels_last"


def test_a_run_that_is_shorter_than_what_a_proof_takes_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    races = Races(optimizer__fused=1.5)
    looked = searching(monkeypatch, races, steps=500)
    monkeypatch.setattr(module.Runner, "quick_estimate", lambda self, seconds: (2.0, 0.0))  # 17 minutes
    assert looked.run() == BASELINE and races.raced == []
    assert "a proof takes as long as about 250 steps" in looked.notes[0]


def test_a_time_limit_that_is_too_short_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind(Races):
        def timing(self, entrant: Contender, steps: int) -> Timing:
            return super().timing(entrant, steps).model_copy(update={"verdict": None})

    looked = searching(monkeypatch, Blind(), time_limit_s=0.1)
    assert looked.run() == BASELINE
    assert looked.notes == ["a time limit of 0.1 s is too short to compare any plan with the baseline; give it more"]


@pytest.mark.parametrize("batch_size", [24, 10])
def test_steps_are_looked_at_across_the_ends_of_epochs_and_of_the_training(batch_size: int) -> None:
    from hotloop.core.state import differing_paths
    from hotloop.lowering.build import lower

    once = lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)  # noqa: E731
    program = lower(programs.a_task(batch_size=batch_size, epochs=2, schedule=once))
    before = program.state()
    made = profile_step(program)
    assert made is not None and made.step_s and made.operations > 10
    assert differing_paths(program.state(), before) == []
