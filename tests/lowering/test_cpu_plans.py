"""Each plan that a CPU can run gives what the baseline gives, and its State is the baseline's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.state import State, differing_paths
from hotloop.errors import PlanError
from hotloop.lowering.program import Program
from hotloop.lowering.steps.compiled_step import CompiledStep
from hotloop.plan import BASELINE, Plan
from tests.support.killed_training import train
from tests.support.processes.resumed_training import disagreements
from tests.support.programs import advance, through_file
from tests.support.tasks.model_families import FAMILIES, family

STEPS = 22  # into the sixth epoch

EAGER = {
    "channels_last": Plan(layout="channels_last"),
    "forloop": Plan(optimizer="forloop"),
    "foreach": Plan(optimizer="foreach"),
    "fused": Plan(optimizer="fused"),
    "threads": Plan(threads=1),
}
COMPILED = {name: Plan(compile=name) for name in ("forward", "step")}
# The longest to compile, and so the one package that test_axis_combinations.py runs too: whoever comes second loads it.
PACKAGE = Plan(compile="package", layout="channels_last", optimizer="fused", threads=1)
# Each family under the whole step; the other two ways share its capture, so that one family shows them.
IMAGES = ("mlp", "cnn", "residual", "vae")
RUNS = [(name, plan) for name in FAMILIES for plan in EAGER.values() if name in IMAGES or plan.layout == "contiguous"]
RUNS += [(name, COMPILED["step"]) for name in FAMILIES] + [("cnn", COMPILED["forward"]), ("mlp", PACKAGE)]
RUNS += [("mlp", Plan(compile="step", optimizer="fused"))]
RUNS += [(name, Plan(accumulation=3)) for name in ("mlp", "residual", "lstm", "gpt")]
RUNS += [("mlp", Plan(accumulation=3, compile=how)) for how in ("forward", "step")]
MORE = {
    *((name, COMPILED["step"]) for name in ("cnn", "gpt", "lstm", "residual", "vae")),
    *(("mlp", Plan(accumulation=3, compile=how)) for how in ("forward", "step")),
    ("cnn", Plan(compile="forward")),
}
"""What takes long to compile, and shows of further families what others show too."""


def changed(plan: Plan) -> str:
    return ",".join(f"{axis}={value}" for axis, value in plan.model_dump(exclude_defaults=True).items())


def after(program: Program, steps: int) -> State:
    advance(program, steps)
    return program.state()


_BASELINES: dict[str, State] = {}


def baseline(name: str) -> State:
    if name not in _BASELINES:
        _BASELINES[name] = after(hotloop.lower(family(name)), STEPS)
    return _BASELINES[name]


def assert_equal_within_rounding(state: State, expected: State) -> None:
    """Far above what rounding comes to in these steps (1e-7), far below any fault (a step left out: 1e-2)."""
    for part in ("parameters", "buffers", "average"):
        for name, value in getattr(expected, part).items():
            torch.testing.assert_close(getattr(state, part)[name], value, rtol=1e-5, atol=1e-5, msg=f"{part} {name}")
    assert state.position == expected.position
    assert state.sums.keys() == expected.sums.keys()
    for name, value in expected.sums.items():
        assert float(state.sums[name]) == pytest.approx(float(value), rel=1e-5), name
    assert state.schedule["last_epoch"] == expected.schedule["last_epoch"]


@pytest.mark.few(
    "mlp-*",
    "residual-layout=channels_last",
    "residual-accumulation=3",
    "lstm-optimizer=foreach",
    "gpt-threads=1",
    "vae-optimizer=fused",
    "cnn-optimizer=fused",
)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, id=f"{name}-{changed(plan)}", marks=[pytest.mark.more] * ((name, plan) in MORE))
        for name, plan in RUNS
    ],
)
def test_it_runs_as_the_baseline_does_and_its_state_round_trips(
    name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs_run = []
    finish = CompiledStep._finish
    monkeypatch.setattr(CompiledStep, "_finish", lambda *args: programs_run.append(1) or finish(*args))
    program = hotloop.lower(family(name), plan)
    state = after(program, STEPS)
    assert_equal_within_rounding(state, baseline(name))
    # All but the first step, in which the optimizer makes its state, and the incomplete batch of each epoch.
    assert len(programs_run) == (STEPS - 1 - STEPS // 4 if plan.compile in ("step", "package") else len(programs_run))
    assert plan.compile == "none" or programs_run

    program.restore(through_file(state))
    assert differing_paths(program.state(), state) == []
    further = after(program, 3)

    under_the_baseline = hotloop.lower(family(name))
    under_the_baseline.restore(state)
    assert differing_paths(under_the_baseline.state(), state) == []
    assert_equal_within_rounding(further, after(under_the_baseline, 3))


@pytest.mark.more
def test_switching_plans_twice_keeps_order_and_result() -> None:
    plans = [BASELINE, Plan(compile="step"), Plan(layout="channels_last", optimizer="fused")]
    state = None
    for plan, steps in zip(plans, (6, 7, STEPS - 13), strict=True):
        program = hotloop.lower(family("cnn"), plan)
        if state is not None:
            program.restore(state)
        state = after(program, steps)
    assert state is not None
    assert_equal_within_rounding(state, baseline("cnn"))


@pytest.mark.few("layout=channels_last*")
@pytest.mark.parametrize("plan", [Plan(compile="step"), Plan(layout="channels_last", optimizer="foreach")], ids=changed)
def test_killed_and_gone_on_with_it_ends_bitwise_the_same(tmp_path: Path, plan: Plan) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(whole, family("cnn", epochs=4), plan=plan)
    for until in (3, 9):
        assert train(run, family("cnn", epochs=4), plan=plan, until=until) is None
    train(run, family("cnn", epochs=4), plan=plan)
    assert disagreements(whole, run) == []


@pytest.mark.more
@pytest.mark.parametrize("plan", [BASELINE, Plan(compile="step")], ids=["eager", "compiled"])
def test_random_layers_draw_anew_at_each_step(plan: Plan) -> None:
    """On one batch, with weights that don't move, the losses of a net with dropout still differ."""
    # A rate of zero by way of the schedule: the compiled step is then the one that the tests above have compiled.
    still = dict(
        schedule=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.0, total_steps=total)
    )
    task = family("cnn", **still)
    program = hotloop.lower(task, plan)
    advance(program, 1)
    batch = tuple(column[:16] for column in task.data)
    weight = program.state().parameters["0.weight"].clone()
    losses = [float(program.step(batch)) for _ in range(4)]
    assert program.state().parameters["0.weight"].equal(weight)
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precisions_where_the_machine_is_not_asked(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without such instructions emulates them: slow, but the same lowering as elsewhere."""
    monkeypatch.setattr("hotloop.lowering.build._check_plan", lambda parts: None)
    plan = Plan(precision=precision)
    program = hotloop.lower(family("mlp"), plan)
    state = after(program, 10)
    plain = after(hotloop.lower(family("mlp")), 10)
    assert {value.dtype for value in state.parameters.values()} == {torch.float32}
    name = "1.weight"
    error = (state.parameters[name] - plain.parameters[name]).norm() / plain.parameters[name].norm()
    assert 1e-6 < error < 1e-1  # it does round, and still trains the same network
    assert bool(state.scaler) == (precision == "fp16")

    again = hotloop.lower(family("mlp"), plan)
    again.restore(through_file(state))
    assert differing_paths(again.state(), state) == []
    assert differing_paths(after(again, 3), after(program, 3)) == []


def test_a_scale_of_the_loss_that_is_not_restored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.lowering.build._check_plan", lambda parts: None)
    program = hotloop.lower(family("mlp"), Plan(precision="fp16"))
    state = after(program, 3)
    state.scaler["scale"] = 256.0
    program.restore(state)
    assert program.state().scaler["scale"] == 256.0
    monkeypatch.setattr(torch.amp.GradScaler, "load_state_dict", lambda self, state: None)
    other = hotloop.lower(family("mlp"), Plan(precision="fp16"))
    other.restore(state)
    assert differing_paths(other.state(), state) != []


@pytest.mark.more
def test_fp16_compiled_scales_its_loss_as_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.lowering.build._check_plan", lambda parts: None)
    plain = after(hotloop.lower(family("mlp")), 3).parameters["1.weight"]

    def error() -> float:
        state = after(hotloop.lower(family("mlp"), Plan(precision="fp16", compile="forward")), 3)
        assert state.scaler["_growth_tracker"] == 3  # of three steps none was left out
        return float((state.parameters["1.weight"] - plain).norm() / plain.norm())

    assert error() < 1e-4
    monkeypatch.setattr(CompiledStep, "_set_scale", lambda self: None)
    assert error() > 1e-3


# ---------------------------------------------------------------- planted faults


def test_a_step_that_forgets_to_clip_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledStep, "clip", lambda self, parameters: None)
    state = after(hotloop.lower(family("cnn"), Plan(compile="forward")), STEPS)
    with pytest.raises(AssertionError):
        assert_equal_within_rounding(state, baseline("cnn"))


@pytest.mark.more
def test_strides_are_guarded() -> None:
    """A program that got a batch of other strides would read it wrongly; the step runs eagerly instead."""
    program, plain = hotloop.lower(family("mlp"), Plan(compile="step")), hotloop.lower(family("mlp"))
    images, label = (column[:16] for column in family("mlp").data)
    turned = images.flip(0).transpose(2, 3)
    for _ in range(3):
        assert float(program.step((turned, label))) == pytest.approx(float(plain.step((turned, label))), rel=1e-6)


# ---------------------------------------------------------------- refused


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (1 + 0.1 * self.calls)  # type: ignore[no-any-return]


class CountingInPrivate(Counting):
    _calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        x = self.layer(x)
        return x * 2 if self._calls > 500 else x


class CountingLoss(nn.CrossEntropyLoss):
    """Counts less from step to step."""

    calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(output, target) * 0.9**self.calls


class Drawing(Counting):
    def forward(self, x: Tensor) -> Tensor:
        import random

        return self.layer(x) * random.random()  # type: ignore[no-any-return]


class Branching(Counting):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * 2 if x.mean() > 0 else x


class Replacing(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.seen = self.seen + x.detach().mean(0)
        return x + self.seen


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": Counting}, "the attribute 'calls' of the model"),
        ({"model": CountingInPrivate}, "the attribute '_calls' of the model"),
        ({"loss": CountingLoss()}, "the attribute 'calls' of the loss"),
        ({"model": Drawing}, "draws from Python's or NumPy's generator"),
        ({"model": Branching}, "test_cpu_plans.py:"),
        ({"model": Replacing}, "replaces the buffer 'seen'"),
        ({"optimizer": torch.optim.ASGD}, "the optimizer, an ASGD: GuardOnDataDependentSymNode"),
        ({"optimizer": torch.optim.Adafactor}, "compile=forward, which leaves the update out"),
    ],
)
def test_what_would_not_be_the_same_step_after_step_is_refused(fields: dict[str, Any], says: str) -> None:
    from tests.support.programs import a_task

    with pytest.raises(PlanError, match="can't be captured as one graph") as caught:
        hotloop.lower(a_task(**fields), Plan(compile="step"))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


class CountingGroups(torch.optim.Optimizer):
    """Plain descent at a rate that falls as it counts, in its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": 0, "seen": (0, 0.5)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.count(group)
            for value in group["params"]:
                value.sub_(value.grad * (group["lr"] / (group["count"] + group["seen"][0])))

    def count(self, group: dict[str, Any]) -> None:
        group["count"] += 1


class CountingInATuple(CountingGroups):
    def count(self, group: dict[str, Any]) -> None:
        group["seen"] = (group["seen"][0] + 1, 0.5)


@pytest.mark.parametrize("plan", [Plan(compile="step"), Plan(compile="package")], ids=Plan.brief)
@pytest.mark.parametrize(("optimizer", "says"), [(CountingGroups, "'count'"), (CountingInATuple, "'seen'")])
def test_an_optimizer_that_counts_in_its_groups_is_refused(plan: Plan, optimizer: type, says: str) -> None:
    """A captured step would count once, and compute with that for ever."""
    from tests.support.programs import a_task

    with pytest.raises(PlanError, match=f"can't be captured.* changes its own {says}") as caught:
        hotloop.lower(a_task(optimizer=optimizer), plan)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))}, "'1' (BatchNorm1d)"),
        ({"step": lambda model, batch: model(batch[0]).pow(2).sum() / 10}, "divides by a number"),
    ],
)
def test_pieces_that_don_t_add_up_are_refused(fields: dict, says: str) -> None:
    from tests.support.programs import a_task

    with pytest.raises(PlanError, match="accumulation=2 changes the gradient") as caught:
        hotloop.lower(a_task(**fields), Plan(accumulation=2))
    assert says in str(caught.value)


def test_a_cast_inside_of_the_model_is_checked_all_the_same() -> None:
    from tests.support.programs import a_task

    def casting() -> nn.Module:
        model = nn.Linear(6, 3)
        model.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
        return model

    assert hotloop.lower(a_task(model=casting), Plan(accumulation=2)).parts.plan.accumulation == 2


@pytest.mark.more
def test_pieces_count_by_the_weight_of_the_task() -> None:
    """Targets that are ignored make a piece count less, or not at all; equal shares would give another gradient."""
    from tests.support.programs import a_task, labelled

    x, y = labelled()
    y = torch.where(torch.arange(len(y)) % 4 < 2, -100, y)
    plans = [Plan(), Plan(accumulation=4), Plan(accumulation=4, compile="step")]
    states = [after(hotloop.lower(a_task(data=(x, y), batch_size=8, shuffle=False), plan), 9) for plan in plans]
    for state in states[1:]:
        torch.testing.assert_close(states[0].parameters, state.parameters, rtol=1e-5, atol=1e-6)


class Encoder(nn.Module):
    """Draws inside of a function of torch's that is made of others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[:, None].expand(-1, 3, -1)).mean(1))  # type: ignore[no-any-return]


def test_draws_wherever_they_are_made_don_t_keep_a_batch_from_being_cut() -> None:
    from tests.support.programs import a_task

    advance(hotloop.lower(a_task(model=Encoder), Plan(accumulation=2)), 2)
