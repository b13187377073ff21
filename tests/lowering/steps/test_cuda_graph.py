"""Steps as graphs, on a CPU's stand-in for CUDA's: each repeats just what was recorded, and equals the baseline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.random.rng import StepSeeds
from hotloop.core.state import State, differing_paths
from hotloop.errors import PlanError
from hotloop.lowering.compile.compiled_rng import check_draws, check_recurrent
from hotloop.lowering.program import Program
from hotloop.lowering.steps import cuda_graph
from hotloop.lowering.steps.cuda_graph import CudaGraphStep
from hotloop.lowering.transforms import accumulation
from hotloop.plan import Plan
from tests.lowering.test_cpu_plans import STEPS, after, assert_equal_within_rounding, baseline, changed
from tests.support.fake_graph_recorder import FakeRecorder, RecallingRecorder
from tests.support.programs import a_task, advance, through_file
from tests.support.tasks.model_families import BATCH, family

TWO = Plan(graphs=2, residency="device")  # of three whole batches in an epoch: one replay of two, and one of one
RUNS = [(name, plan) for name in ("mlp", "cnn", "gpt") for plan in (Plan(graphs="step"), TWO)]
RUNS += [("lstm", TWO), ("vae", Plan(graphs="step")), ("residual", Plan(graphs="step", layout="channels_last"))]
RUNS += [
    (name, Plan(graphs="step", optimizer=how, layout=layout))
    for name, layout in (("gpt", "contiguous"), ("residual", "contiguous"), ("residual", "channels_last"))
    for how in ("foreach",)
]
RUNS += [("mlp", Plan(graphs="step", optimizer="forloop")), ("mlp", Plan(graphs="step", accumulation=3))]


@pytest.fixture(autouse=True)
def on_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on this CPU, and optimizers that believe that it keeps their counts on the device, as CUDA does."""
    monkeypatch.setattr("hotloop.lowering.build._check_plan", lambda parts: None)
    monkeypatch.setattr(cuda_graph, "GraphRecorder", FakeRecorder)
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, "_get_capturable_supported_devices"):
            monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **options: ["cpu"])


def replays(program: Program) -> list[int]:
    """Steps of each replay so far."""
    return program._step._recorder.replays  # type: ignore[attr-defined,no-any-return]


@pytest.mark.few("mlp-graphs=step", "mlp-residency=device*", "mlp-graphs=step,accumulation=3", "vae-graphs=step")
@pytest.mark.parametrize(("name", "plan"), RUNS, ids=[f"{name}-{changed(plan)}" for name, plan in RUNS])
def test_it_runs_as_the_baseline_does_and_its_state_round_trips(name: str, plan: Plan) -> None:
    program = hotloop.lower(family(name), plan)
    state = after(program, STEPS)
    assert_equal_within_rounding(state, baseline(name))
    # All but the first step, in which the optimizer makes its state, and the incomplete batch of each epoch.
    assert sum(replays(program)) == STEPS - 1 - STEPS // 4
    assert set(replays(program)) == ({1} if plan.graphs == "step" else {1, 2})

    program.restore(through_file(state))
    assert differing_paths(program.state(), state) == []
    further = after(program, 3)
    under_the_baseline = hotloop.lower(family(name))
    under_the_baseline.restore(state)
    assert differing_paths(under_the_baseline.state(), state) == []
    assert_equal_within_rounding(further, after(under_the_baseline, 3))


def optimizer(name: str, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: getattr(torch.optim, name)(parameters, lr=0.01, **options)


OPTIMIZERS = {
    "SGD": optimizer("SGD", momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD dampened": optimizer("SGD", momentum=0.9, dampening=0.1, maximize=True),
    "Adam": optimizer("Adam", weight_decay=0.1),
    "Adam with the maximum": optimizer("Adam", amsgrad=True),
    "AdamW": optimizer("AdamW"),
    "NAdam": optimizer("NAdam"),
    "RAdam": optimizer("RAdam"),
    "Adamax": optimizer("Adamax"),
    "RMSprop": optimizer("RMSprop", momentum=0.9, centered=True, weight_decay=0.1),
    "Adadelta": optimizer("Adadelta"),
}


CHANGED = [(name, "default") for name in OPTIMIZERS] + [
    (name, "forloop") for name in ("SGD", "Adam", "NAdam", "RMSprop")
]


@pytest.mark.few("SGD-default", "Adam-default")
@pytest.mark.parametrize(("name", "how"), CHANGED)
def test_each_optimizer_takes_what_the_schedule_says_from_the_device(name: str, how: str) -> None:
    """The learning rate changes at each step, and so do momentum or the first of the betas where there is one."""
    task = family("mlp", optimizer=OPTIMIZERS[name], schedule=one_cycle)
    program = hotloop.lower(task, Plan(graphs="step", optimizer=how))
    plain = hotloop.lower(task, Plan(optimizer=how))
    for group in plain.optimizer.param_groups:  # torch's own arithmetic on the device, fp32 where it was Python's
        group.update({"capturable": True} if "capturable" in group else {})
    assert_equal_within_rounding(after(program, 9), after(plain, 9))
    assert len(replays(program)) == 9 - 1 - 2


def one_cycle(optimizer: torch.optim.Optimizer, total: int) -> Any:
    cycles = any("momentum" in group or "betas" in group for group in optimizer.param_groups)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total, cycle_momentum=cycles)


@pytest.mark.few("SGD-contiguous", "SGD-channels_last")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_a_graph_takes_in_the_fused_update_however_weights_lie(name: str, layout: str) -> None:
    task = family("residual", optimizer=optimizer(name), schedule=of_the_rate)
    program = hotloop.lower(task, Plan(graphs="step", optimizer="fused", layout=layout))
    assert_equal_within_rounding(after(program, 9), after(hotloop.lower(task), 9))
    assert len(replays(program)) >= 9 - 1 - 2


class Transposed(nn.Module):
    """The gradient of its weight has other strides than the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.weight.t()])


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_a_fused_update_in_a_graph_reads_gradients_that_lie_otherwise(name: str) -> None:
    task = a_task(model=Transposed, optimizer=optimizer(name), schedule=of_the_rate)
    program = hotloop.lower(task, Plan(graphs="step", optimizer="fused"))
    assert_equal_within_rounding(after(program, 4), after(hotloop.lower(task), 4))
    assert replays(program)


def of_the_rate(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total, cycle_momentum=False)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_fused_update_takes_the_learning_rate_alone(name: str) -> None:
    plan = Plan(graphs="step", optimizer="fused")
    task = family("mlp", optimizer=optimizer(name), schedule=of_the_rate)
    assert_equal_within_rounding(after(hotloop.lower(task, plan), 9), after(hotloop.lower(task), 9))
    cycling = OPTIMIZERS[name]
    with pytest.raises(PlanError, match="a fused update takes the learning rate alone"):
        hotloop.lower(family("mlp", optimizer=cycling, schedule=one_cycle), plan)


@pytest.mark.more
def test_so_many_steps_are_one_replay_only_where_so_many_are_asked_for() -> None:
    task = family("mlp", batch_size=4)  # 14 batches in an epoch
    program, plain = hotloop.lower(task, Plan(graphs=8, residency="device")), hotloop.lower(task)
    for steps in (1, 3, 8, 2, 14):  # across no end of an epoch, then as many as are left
        for one in (program, plain):
            outcome = one.advance(steps)
            assert outcome.steps == steps
            if outcome.ended:
                one.end_epoch(1.0)
        assert program.position == plain.position
        assert_equal_within_rounding(program.state(), plain.state())
    assert replays(program) == [1, 1, 1, 8, 1, 1, 8, *[1] * 6]


@pytest.mark.more
def test_a_loop_of_one_s_own_keeps_its_losses() -> None:
    """A replay writes its loss where the one before did; what was handed out stays."""
    program, plain = hotloop.lower(family("mlp"), TWO), hotloop.lower(family("mlp"))
    batch = tuple(column[:BATCH] for column in family("mlp").data)
    losses, expected = ([one.step(batch) for _ in range(5)] for one in (program, plain))
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
    assert replays(program) == [1] * 4


def test_a_compiled_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "GraphRecorder", RecallingRecorder)
    program = hotloop.lower(family("mlp"), Plan(graphs="step", compile="step"))
    assert_equal_within_rounding(after(program, STEPS), baseline("mlp"))
    assert len(replays(program)) == STEPS - 1 - STEPS // 4


# ---------------------------------------------------------------- planted faults


def seen(plan: Plan = TWO) -> bool:
    """Whether a comparison with the baseline finds a fault, in the family with all that a graph may get wrong."""
    return seen_in("cnn", plan)


def seen_in(name: str, plan: Plan = TWO) -> bool:
    state: State = after(hotloop.lower(family(name), plan), STEPS)
    try:
        assert_equal_within_rounding(state, baseline(name))
    except AssertionError:
        return True
    return False


def test_without_a_fault_nothing_is_seen() -> None:
    assert not seen()


@pytest.mark.more
def test_numbers_of_the_schedule_that_stay_as_recorded_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaGraphStep, "_set_cells", only_at_first(CudaGraphStep._set_cells))
    assert seen()


@pytest.mark.more
def test_numbers_of_the_first_step_for_all_of_a_replay_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CudaGraphStep._set_cells
    monkeypatch.setattr(CudaGraphStep, "_set_cells", lambda self, rows: plain(self, [rows[0]] * len(rows)))
    assert seen() and not seen(Plan(graphs="step"))


def test_a_batch_that_is_not_copied_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph.StaticBatches, "fill", lambda self, batches: None)
    assert seen()


@pytest.mark.more
def test_rows_that_are_not_cut_anew_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph.StaticBatches, "split_rows", lambda self, columns, rows: self.batches)
    assert seen() and seen(Plan(graphs="step"))


@pytest.mark.more
def test_losses_that_are_added_up_twice_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not seen_in("mlp")
    note = CudaGraphStep._note

    def twice(self: Any, group: Any, outputs: Any) -> None:
        note(self, group, outputs)
        for (batch, samples), (loss, *_) in zip(group, outputs, strict=True):
            self._add(loss, {}, self.parts.weigh(batch, samples))

    monkeypatch.setattr(CudaGraphStep, "_note", twice)
    assert seen_in("mlp")


def test_draws_that_are_the_same_at_each_step_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepSeeds, "seed_of", lambda self, step: 1)
    assert seen()


@pytest.mark.more
def test_state_that_is_not_moved_to_where_the_graph_works_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaGraphStep, "_is_bound", lambda self: bool(self.optimizer.state))
    assert seen()


def test_a_number_that_is_not_lifted_is_refused_when_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "counts_samples", lambda parts: False)  # the graph adds nothing up
    monkeypatch.setattr(cuda_graph, "lift_scalars", lambda captured, *adding: captured)
    with pytest.raises(PlanError, match=r"can't be recorded as a CUDA graph.*graphs=none"):
        hotloop.lower(family("mlp"), Plan(graphs="step"))


def test_a_piece_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = accumulation.split_batch
    monkeypatch.setattr("hotloop.lowering.checks.batch_rows.check_accumulation", lambda *args: None)
    monkeypatch.setattr(accumulation, "split_batch", lambda *args: list(whole(*args))[1:])
    state = after(hotloop.lower(family("mlp"), Plan(graphs="step", accumulation=3)), STEPS)
    with pytest.raises(AssertionError):
        assert_equal_within_rounding(state, baseline("mlp"))


def only_at_first(function: Callable[..., None]) -> Callable[..., None]:
    done: list[bool] = []

    def once(*args: Any) -> None:
        if not done:
            done.append(True)
            function(*args)

    return once


# ---------------------------------------------------------------- refused


class Asking(nn.Module):
    """Asks for the value of a tensor, which the host would have to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x[:, :3], x.mean().item()) * self.layer(x)  # type: ignore[no-any-return]


def test_what_has_no_form_on_the_device_is_refused_by_its_name() -> None:
    with pytest.raises(PlanError, match=r"full_like.*takes a number") as caught:
        hotloop.lower(a_task(model=Asking), Plan(graphs="step"))
    assert "\n" not in str(caught.value)


def test_an_optimizer_that_counts_on_the_host_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device is another than the CPU: here one without content."""
    step = hotloop.lower(family("mlp", optimizer=optimizer("Adagrad"), schedule=None), Plan(graphs="step"))._step
    assert isinstance(step, CudaGraphStep)
    after_one = hotloop.lower(family("mlp", optimizer=optimizer("Adagrad"), schedule=None))
    advance(after_one, 1)
    step.optimizer = after_one.optimizer
    monkeypatch.setattr(step, "parts", step.parts.__class__(**{**vars(step.parts), "device": torch.device("meta")}))
    with pytest.raises(PlanError, match="Adagrad stores its 'step' on the cpu"):
        step._check_state()


def test_draws_that_follow_from_no_seed_are_refused() -> None:
    """cuDNN's recurrent layers, which a CPU doesn't trace, in graphs written by hand."""
    check_draws(recurrent(dropout=0.0))
    with pytest.raises(PlanError, match="draw from a state of their own"):
        check_draws(recurrent(dropout=0.5))


def test_recurrent_layers_of_cudnn_are_refused_by_name_where_it_computes_them() -> None:
    cuda, model = torch.device("cuda:0"), nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2))
    with pytest.raises(PlanError, match=r"one graph: 1 is one of torch's recurrent layers.*compile=none") as caught:
        check_recurrent(model, cuda)
    assert "\n" not in str(caught.value)
    check_recurrent(model, torch.device("cpu"))
    check_recurrent(nn.LSTMCell(2, 2), cuda)
    with torch.backends.cudnn.flags(enabled=False):
        check_recurrent(model, cuda)


@pytest.mark.more
def test_a_compiler_that_takes_no_lists_of_parameters_gets_them_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    build = cuda_graph.build_program

    def choosy(captured: Any, parts: Any) -> Any:
        asked.append(captured.graph.code.count("_foreach"))
        if len(asked) == 1:
            raise PlanError("the captured step can't be compiled")
        return build(captured, parts)

    monkeypatch.setattr(cuda_graph, "GraphRecorder", RecallingRecorder)
    monkeypatch.setattr(cuda_graph, "build_program", choosy)
    program = hotloop.lower(family("mlp"), Plan(graphs="step", compile="step"))
    assert len(asked) == 2 and asked[0] > asked[1]  # the average of weights is one over lists either way
    assert_equal_within_rounding(after(program, STEPS), baseline("mlp"))


def recurrent(**given: Any) -> torch.fx.GraphModule:
    graph, operation = torch.fx.Graph(), torch.ops.aten._cudnn_rnn.default
    graph.output(graph.call_function(operation, tuple(given.get(one.name) for one in operation._schema.arguments)))
    return torch.fx.GraphModule(nn.Module(), graph)
