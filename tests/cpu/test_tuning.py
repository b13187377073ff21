"""The search for a plan: what is tried, what it may cost, and what is never chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hotloop
from hotloop import seeking
from hotloop.choosing import known, placed
from hotloop.errors import MemoryExhausted, PlanError
from hotloop.hardware import Hardware
from hotloop.measuring import Entrant
from hotloop.measuring.racing import Measured
from hotloop.measuring.rounds import Lane, Limits, ratio, run_rounds
from hotloop.measuring.statistics import answer
from hotloop.onlooker import Onlooker
from hotloop.plan import Plan
from hotloop.records import TaskFacts
from hotloop.taskfile import Loaded
from hotloop.tuning import bounds, held, proofs
from hotloop.tuning import search as module
from hotloop.tuning.bounds import Makeup, makeup
from hotloop.tuning.budget import Budget
from hotloop.tuning.candidates import combined, compiled_changes, eager_changes, without
from hotloop.tuning.compiling import compiling_gains
from hotloop.tuning.search import BASELINE, Search
from hotloop.verdicts import Parity, Timing, Verdict
from hotloop.wanted import Wanted
from tests.cpu import programs
from tests.cpu.families import family
from tests.cpu.programs import a_task
from tests.cpu.test_race_rounds import Machine
from tests.cpu.test_race_rounds import Plan as Windows
from tests.unit.machines import A_GPU, a_machine
from tests.unit.machines import facts as made_up

STEP_MS = 10.0
HALF = Makeup(100, step_s=STEP_MS / 1e3, library_s=0.35 * STEP_MS / 1e3, other_s=0.38 * STEP_MS / 1e3)
"""A step that could be twice as fast."""


def told(task: Any) -> tuple[TaskFacts, Hardware]:
    return known(task, Plan())


class Races:
    """In place of races: each plan is so many times as fast as the baseline as `speeds` say, by axis=value."""

    def __init__(self, **speeds: float) -> None:
        self.speeds = {name.replace("__", "="): value for name, value in speeds.items()}
        self.raced: list[str] = []
        self.seconds = 0.0

    def __call__(
        self, entrants: Sequence[Entrant], baseline: str, *, steps: int, time_limit_s: float, **_: Any
    ) -> Measured:
        self.seconds += time_limit_s
        return Measured([self.timing(entrant, steps) for entrant in entrants], [])

    def timing(self, entrant: Entrant, steps: int) -> Timing:
        ratio = 1.0
        for part in entrant.name.split():
            ratio *= self.speeds.get(part, 1.0)
        self.raced.append(entrant.name)
        entrant.lower()
        assert entrant.plan is not None
        return Timing(
            name=entrant.name,
            plan=entrant.plan.model_dump(),
            step_ms=STEP_MS / ratio,
            ratio=ratio,
            ratio_low=0.99 * ratio,
            ratio_high=1.01 * ratio,
            verdict="faster" if ratio > 1.03 else "slower" if ratio < 0.97 else "no difference",
            startup_s=0.0,
            compile_s=0.0,
            run_s=steps * STEP_MS / ratio / 1e3,
        )


class Rounds(Races):
    """Real rounds of windows, on a machine made of a clock alone."""

    def __call__(self, entrants: Sequence[Entrant], baseline: str, *, steps: int, **_: Any) -> Measured:
        made, clock = {entrant.name: self.timing(entrant, steps) for entrant in entrants}, Machine()
        lanes = {
            one.name: Lane(one.name, Windows(clock, one.name, (made[one.name].step_ms or 0.0) / 1e3), group=one.group)
            for one in entrants
        }
        run_rounds(list(lanes.values()), lanes[baseline], Limits(1000.0, lambda: clock.now, brief=True))
        return Measured([self.seen(made[name], lane, lanes[baseline]) for name, lane in lanes.items()], [])

    def seen(self, timing: Timing, lane: Lane, baseline: Lane) -> Timing:
        found = ratio(lane, baseline)
        figures = dict(ratio=found.median, ratio_low=found.low, ratio_high=found.high, windows=found.pairs)
        return timing.model_copy(update=figures | {"verdict": answer(found), "left_out": not lane.running})


def proving(parity: str = "bitwise") -> Any:
    def prove(programs: Sequence[Any]) -> list[Parity]:
        return [Parity(plan=one.parts.plan.brief(), parity=parity, reason="said so", states=16) for one in programs]

    return prove


def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled plans are lowered as they are without."""
    lowered = held.lower
    monkeypatch.setattr(
        held, "lower", lambda task, plan: lowered(task, plan.with_axes(compile="none", rewrites="none"))
    )


def searching(monkeypatch: pytest.MonkeyPatch, races: Races, steps: int = 100_000, **given: Any) -> Search:
    """A search whose races, times and compilations are made up; the rest is real."""
    task = given.pop("task", None) or family("cnn")
    base = placed(Plan(), "cpu")
    facts, hardware = told(task)
    if given.pop("compiler", False):
        uncompiled(monkeypatch)
    else:
        hardware = replace(hardware, compiler=None)
    hardware = replace(hardware, processor=replace(hardware.processor, threads=given.pop("threads", 1)))
    monkeypatch.setattr(module, "measure", races)
    monkeypatch.setattr(module.Runner, "warm_up", lambda self, seconds: (STEP_MS / 1e3, STEP_MS / 1e3))
    facts = facts.model_copy(update={"steps": steps})
    fields = dict(
        task=task, baseline=base, base=base, fixed={"device"}, facts=facts, hardware=hardware, prove=proving()
    )
    return Search(**{**fields, **given})


# ---------------------------------------------------------------- what is tried


def test_only_what_can_be_run_is_tried() -> None:
    facts, hardware = told(family("mlp"))
    assert facts.images and not facts.convolutions  # nothing in it is the faster for another order of dimensions
    changes = eager_changes(facts, hardware, Plan(), threads=1)
    assert {"layout": "channels_last"} not in changes
    assert {"optimizer": "fused"} in changes
    assert {"threads": 1} not in changes  # as it is anyway
    assert compiled_changes(facts, replace(hardware, compiler=None), Plan()) == []


def test_on_cuda_several_steps_are_recorded_at_once_where_the_data_lies_there() -> None:
    """With a compiler first; whether they win and come to the same, race and proof tell."""
    for residency, recorded in ("stream", ["step"]), ("device", [8, "step"]):
        ways = compiled_changes(made_up(), a_machine(A_GPU), Plan(device="cuda:0", residency=residency))
        graphs = [(way.get("compile", "none"), way["graphs"]) for way in ways if "graphs" in way]
        assert graphs == [(how, one) for how in ("step", "none") for one in recorded]
        assert ways[: len(recorded)] == [{"compile": "step", "graphs": one} for one in recorded]
        assert {"compile": "step"} in ways


def test_samples_of_one_epoch_are_not_read_first() -> None:
    facts, hardware = told(family("cnn"))
    for steps, residencies in ((100, []), (101, ["host"])):
        read = facts.model_copy(update={"data": "Samples", "batches": 100, "steps": steps})
        changes = eager_changes(read, hardware, Plan(device="cpu"), threads=1)
        assert [change["residency"] for change in changes if "residency" in change] == residencies


def test_axes_that_the_user_set_stay() -> None:
    facts, hardware = told(family("cnn"))
    changes = without(eager_changes(facts, hardware, Plan(), threads=64), {"threads", "optimizer"})
    assert {"layout": "channels_last"} in changes
    assert not any(change.keys() & {"threads", "optimizer"} for change in changes)


def test_the_best_value_of_each_axis_is_put_together() -> None:
    changes = [{"threads": 1}, {"threads": 2}, {"optimizer": "fused"}, {"layout": "channels_last"}]
    speeds = [(1.2, "faster"), (1.5, "faster"), (1.01, "no difference"), (1.3, "faster")]
    timings = [Timing(name="x", ratio=ratio, verdict=verdict) for ratio, verdict in speeds]  # type: ignore[arg-type]
    assert combined(changes, timings) == {"threads": 2, "layout": "channels_last"}


def test_a_step_is_looked_at_and_nothing_has_happened() -> None:
    from hotloop.lowering import lower
    from hotloop.state import differences

    program = lower(family("mlp"))
    before = program.state()
    made = makeup(program)
    assert made.operations > 30  # forward, backward, clipping and update of four parameters
    assert made.library_s and made.other_s
    assert differences(program.state(), before) == []


def test_a_step_that_torch_does_not_show_is_hoped_little_of() -> None:
    from hotloop.lowering import lower
    from hotloop.state import differences

    class Branching(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return torch.cond(x.sum() > 0, lambda value: 2 * value, lambda value: 3 * value, (y,))

    task = a_task()
    width = task.roles.train.columns[0].flatten(1).shape[1]
    model = torch.nn.Sequential(torch.nn.Flatten(), Branching(width, 10))
    program = lower(replace(task, model=lambda: model))
    before = program.state()
    assert makeup(program) is None and differences(program.state(), before) == []
    program.advance(1)  # torch's compiler, which runs the branches, was left as it had been
    assert compiling_gains(None, 1e-3) == compiling_gains(Makeup(0), 1e-3)


def test_products_stay_with_the_library_and_a_convolution_that_is_rewritten_need_not() -> None:
    from torch.ops import aten

    image = torch.zeros(1, 3, 8, 8)
    assert bounds._stays(aten.addmm.default, (image, image, image), True)
    assert bounds._stays(aten.scaled_dot_product_attention.default, (image, image, image), True)
    assert not any(bounds._stays(one, (image,), True) for one in (aten.relu.default, aten._foreach_add_.Scalar))


class Stays(Onlooker):
    """Which convolutions of a step, forward and backward, are reckoned to stay with the library."""

    def __init__(self, rewrites: bool) -> None:
        super().__init__()
        self.rewrites, self.found = rewrites, list[bool]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__.startswith("convolution"):
            self.found.append(bounds._stays(function, args, self.rewrites))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("layers", "rewrites", "stay"),
    [
        ([torch.nn.Conv2d(3, 4, 3)], True, [False, False]),
        ([torch.nn.Conv2d(3, 4, 3)], False, [True, True]),  # nothing is compiled that rewrites it
        ([torch.nn.Conv2d(3, 4, 5)], True, [True, True]),  # 75 weights in a filter
        ([torch.nn.Conv2d(3, 3, 3, groups=3)], True, [True, True]),
        # The second one's input learns, as MobileNet's 3 x 3 ones do.
        ([torch.nn.Conv2d(3, 2, 3), torch.nn.Conv2d(2, 2, 3)], True, [False, True, True, False]),
    ],
    ids=["small", "without rewrites", "large", "grouped", "behind another"],
)
def test_a_convolution_counts_as_rewritten_only_where_the_rewrite_takes_it(
    layers: list[torch.nn.Module], rewrites: bool, stay: list[bool]
) -> None:
    with Stays(rewrites) as seen:
        torch.nn.Sequential(*layers)(torch.zeros(2, 3, 8, 8)).sum().backward()
    assert seen.found == stay


def test_a_step_of_many_small_operations_gains_most_by_compiling() -> None:
    gains = [compiling_gains(Makeup(200), step_s) for step_s in (1.5e-3, 1e-2, 1.0)]  # on an accelerator
    assert gains[0] > gains[1] > gains[2] > 1
    assert compiling_gains(Makeup(10_000), 1e-3) < 10
    few, many = Makeup(30, 1e-3, library_s=0.8e-3, other_s=0.1e-3), Makeup(100, 1e-3, library_s=0.1e-3, other_s=0.4e-3)
    assert 1 < compiling_gains(few, 1.0) < 1.5 < compiling_gains(many, 1.0) < 10  # its own time counts


class Doubtful(Races):
    """A first race leaves everything undecided."""

    def timing(self, entrant: Entrant, steps: int) -> Timing:
        timing = super().timing(entrant, steps)
        first = self.raced.count(entrant.name) == 1
        return timing.model_copy(update={"verdict": None} if first else {})


@pytest.mark.parametrize(("speed", "chosen"), [(1.06, "optimizer=fused"), (1.02, BASELINE)])
def test_what_seemed_faster_races_once_more_if_that_can_pay(
    monkeypatch: pytest.MonkeyPatch, speed: float, chosen: str
) -> None:
    races = Doubtful(optimizer__fused=speed, layout__channels_last=1.01)
    assert searching(monkeypatch, races, steps=10_000).run() == chosen  # 100 s
    assert races.raced.count("optimizer=fused") == (2 if chosen != BASELINE else 1)
    assert races.raced.count("layout=channels_last") == 1


# ---------------------------------------------------------------- what it may cost


def test_racing_takes_a_small_share_of_the_run() -> None:
    budget = Budget.of(0.01, 100_000, None)
    assert budget.racing_s < 0.05 * budget.run_s
    assert Budget.of(0.01, 100, None).too_small
    assert Budget.of(0.01, 100, 30.0).racing_s == 30.0
    assert not Budget.of(0.01, 100, 30.0).too_small


def test_a_race_has_the_time_that_it_takes_to_tell_anything() -> None:
    run = Budget.of(0.01, 10_000, None)
    assert run.racing_s / 8 < run.least_s == run.race_s(1 / 8) < run.race_s(1.0) == run.racing_s
    assert Budget.of(0.01, 10_000, 4.0).race_s(1 / 8) == 0.5  # the user's limit is kept to


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
    monkeypatch.setattr(held, "lower", lambda task, plan: pytest.fail("it was lowered"))
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
    monkeypatch.setattr(module, "makeup", lambda program: Makeup(100, STEP_MS / 1e3, 0.65 * STEP_MS / 1e3, 0.0))
    looked = searching(monkeypatch, Races(), steps=8_000, compiler=True)  # 80 s, of which it could save 16
    looked.run()
    assert any("no compilation was tried" in note for note in looked.notes)


def test_a_long_run_tries_the_best_plan_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gain that is hoped for is that over the best plan without a compiler, whose operations are counted."""
    lowered, counted = held.lower, []
    monkeypatch.setattr(
        held, "lower", lambda task, plan: lowered(task, plan.with_axes(compile="none", rewrites="none"))
    )
    monkeypatch.setattr(module, "makeup", lambda program: counted.append(program.parts.plan.optimizer) or Makeup(1_000))
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
        (200_000, 1.0, ["compile=package", "compile=package rewrites=all"]),
    ],
)
def test_where_there_is_time_for_one_compilation_it_is_the_rewritten_step(
    monkeypatch: pytest.MonkeyPatch, steps: int, fused: float, raced: list[str]
) -> None:
    lowered = held.lower
    monkeypatch.setattr(
        held, "lower", lambda task, plan: lowered(task, plan.with_axes(compile="none", rewrites="none"))
    )
    monkeypatch.setattr(module, "makeup", lambda program: HALF)
    races = Races(optimizer__fused=fused, compile__package=2.0, compile__step=1.9, rewrites__all=2.0)
    assert searching(monkeypatch, races, steps=steps, compiler=True).run() == raced[-1]
    assert [name for name in races.raced if "compile" in name] == raced


def test_a_compiled_step_is_not_left_out_for_a_rewritten_one_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered, classes = held.lower, iter(["broken", "bitwise"])
    monkeypatch.setattr(
        held, "lower", lambda task, plan: lowered(task, plan.with_axes(compile="none", rewrites="none"))
    )
    monkeypatch.setattr(module, "makeup", lambda program: HALF)
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
    monkeypatch.setattr(module, "makeup", lambda program: HALF)
    races = Races(compile__package=speed)
    search = searching(monkeypatch, races, steps=steps, compiler=True, threads=2, task=family("mlp"))
    search.run()
    assert ("threads=1" in races.raced[-1] and "compile=package" in races.raced[-1]) is alone


def test_a_step_with_nothing_to_rewrite_is_compiled_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Races):
        def timing(self, entrant: Entrant, steps: int) -> Timing:
            if "rewrites" in entrant.name:
                return Timing(name=entrant.name, failure="nothing to rewrite")
            return super().timing(entrant, steps)

    uncompiled(monkeypatch)
    monkeypatch.setattr(module, "makeup", lambda program: HALF)
    looked = searching(monkeypatch, Plain(compile__step=2.0), steps=10_000, compiler=True)
    assert looked.run() == "compile=step"


class Failing(Races):
    """Plans with any of these axes can't be run."""

    def __init__(self, *parts: str, **speeds: float) -> None:
        super().__init__(**speeds)
        self.parts = parts

    def timing(self, entrant: Entrant, steps: int) -> Timing:
        if any(part in entrant.name for part in self.parts):
            self.raced.append(entrant.name)
            return Timing(name=entrant.name, failure="it can't")
        return super().timing(entrant, steps)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, and each step could be twice as fast."""
    uncompiled(monkeypatch)
    monkeypatch.setattr(module, "makeup", lambda program: HALF)


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
        def timing(self, entrant: Entrant, steps: int) -> Timing:
            clock[0] += 10.0 if "compile" in entrant.name else 0.0
            return super().timing(entrant, steps)

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    races = Late("compile=step", compile__package=2.0)
    looked = searching(monkeypatch, races, steps=8_000, compiler=True, task=family("mlp"))
    assert looked.run() == BASELINE and "compile=package" not in races.raced
    assert "no other compilation was tried" in looked.notes[-1]


def test_axes_of_the_user_s_that_can_t_be_run_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = searching(
        monkeypatch, Failing("residency=host"), base=placed(Plan(residency="host"), "cpu"), compiler=True
    )
    with pytest.raises(PlanError, match="residency=host, as you set it, can't be run: it can't"):
        looked.run()


def test_what_is_faster_than_the_baseline_by_what_the_user_set_alone_wins_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    races = Races(residency__host=1.6, layout__channels_last=0.8)
    base = placed(Plan(residency="host"), "cpu")
    looked = searching(monkeypatch, races, base=base, fixed={"device", "residency"}, compiler=True)
    assert "layout" not in looked.run()
    assert [name for name in races.raced if "layout" in name] == ["layout=channels_last residency=host"]  # once, alone


def test_good_changes_that_can_t_be_run_together_are_taken_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    races = Failing("layout=channels_last optimizer=fused", optimizer__fused=1.3, layout__channels_last=1.4)
    assert searching(monkeypatch, races, compiler=True, steps=10_000).run() == "layout=channels_last"


def test_a_run_that_is_shorter_than_what_a_proof_takes_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    races = Races(optimizer__fused=1.5)
    looked = searching(monkeypatch, races, steps=500)
    monkeypatch.setattr(module.Runner, "warm_up", lambda self, seconds: (2.0, 2.0))  # 17 minutes
    assert looked.run() == BASELINE and races.raced == []
    assert "a proof takes as long as about 250 steps" in looked.notes[0]


def test_a_time_limit_that_is_too_short_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind(Races):
        def timing(self, entrant: Entrant, steps: int) -> Timing:
            return super().timing(entrant, steps).model_copy(update={"verdict": None})

    looked = searching(monkeypatch, Blind(), time_limit_s=0.1)
    assert looked.run() == BASELINE
    assert looked.notes == ["a time limit of 0.1 s is too short to tell any plan from the baseline; give it more"]


@pytest.mark.parametrize("batch_size", [24, 10])
def test_steps_are_looked_at_across_the_ends_of_epochs_and_of_the_training(batch_size: int) -> None:
    from hotloop.lowering import lower
    from hotloop.state import differences

    once = lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)  # noqa: E731
    program = lower(programs.a_task(batch_size=batch_size, epochs=2, schedule=once))
    before = program.state()
    made = makeup(program)
    assert made is not None and made.step_s and made.operations > 10
    assert differences(program.state(), before) == []


# ---------------------------------------------------------------- what is chosen


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
        def timing(self, entrant: Entrant, steps: int) -> Timing:
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

    def timing(self, entrant: Entrant, steps: int) -> Timing:
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
        def timing(self, entrant: Entrant, steps: int) -> Timing:
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
    monkeypatch.setattr(proofs, "time", SimpleNamespace(perf_counter=lambda: judging.now))
    races = Races(optimizer__fused=1.05, layout__channels_last=1.06)
    looked = searching(monkeypatch, races, steps=8_000, prove=judging)
    assert looked.run() == BASELINE and len(judging.asked) == 1
    assert len([note for note in looked.notes if "with the proofs before, more than it wins" in note]) == 2


@pytest.mark.parametrize(
    "error",
    [MemoryExhausted("no room"), torch.OutOfMemoryError("no room")],
    ids=["as hotloop says it", "as torch does"],
)
def test_without_memory_for_a_proof_the_plan_is_unproven(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(programs: Sequence[Any]) -> list[Parity]:
        raise error

    looked = searching(monkeypatch, Races(optimizer__fused=1.3), prove=prove)
    assert looked.run() == BASELINE
    found = looked.timings["optimizer=fused"]
    assert found.parity == "unproven" and "no room" in (found.parity_reason or "") and found.short_of_memory


def test_a_reduced_precision_that_was_asked_for_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = searching(
        monkeypatch, Races(optimizer__fused=1.3), prove=proving("reduced-precision"), fixed={"precision"}
    )
    assert looked.run() == "optimizer=fused"


def test_a_plan_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Races):
        def timing(self, entrant: Entrant, steps: int) -> Timing:
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
    base = placed(Plan(), "cpu")
    facts, hardware = told(task)
    from hotloop.parity import prove_programs

    looked = Search(
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
        def timing(self, entrant: Entrant, steps: int) -> Timing:
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

    def __call__(self, *given: Any, **how: Any) -> Measured:
        self.calls += 1
        found = super().__call__(*given, **how)
        slower = 4.0 if self.calls == 2 else 1.0
        return Measured([one.model_copy(update={"step_ms": slower * (one.step_ms or 0.0)}) for one in found.plans], [])


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
    lowered = held.lower

    def lower(task: Any, plan: Plan) -> Any:
        program = lowered(task, plan)
        program.compile_s = 30.0 if plan.optimizer == "fused" else 0.0
        return program

    monkeypatch.setattr(held, "lower", lower)
    looked = searching(monkeypatch, Doubtful(optimizer__fused=1.25))
    monkeypatch.setattr(held, "time", SimpleNamespace(perf_counter=lambda: 0.0))
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
    monkeypatch.setattr(seeking, "tuned", lambda *_, **__: verdict)
    wanted = Wanted.of("auto", {"accumulation": 2, "device": "cpu"})
    plan, told = seeking.remembered_or_tuned(Loaded(a_task(), None, {}), wanted)
    assert plan == Plan(accumulation=2) and "accumulation=2" in told


def test_a_device_counts_more_than_that_of_a_plan() -> None:
    verdict = hotloop.tune(programs.a_task(), plan=Plan(device="cuda"), device="cpu", progress=False)
    assert verdict.plans[0].plan["device"] == "cpu"
