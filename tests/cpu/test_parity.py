"""Parity: honest plans are trusted, planted faults are not, and what can't be compared is said to be unproven."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop
from bench.graph_mutations import Graphs
from bench.yardstick import Yardstick
from hotloop import parity
from hotloop.lowering import Program, lower
from hotloop.lowering.step import EagerStep
from hotloop.parity import prove, prove_programs
from hotloop.parity.collecting import Account, Collector, Evidence
from hotloop.parity.judging import TYPICAL, typical
from hotloop.parity.judging import judged as judged_by_parity
from hotloop.parity.witnesses import Truth, baselines
from hotloop.plan import BASELINE, Plan
from hotloop.rng import generator_states
from hotloop.state import State, differences
from hotloop.verdicts import TRUSTED, Parity
from tests.cpu.families import family
from tests.cpu.more_families import another_family
from tests.cpu.programs import a_task, advance

FORLOOP = Plan(optimizer="forloop")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine two threads are many times slower than one, and nothing here depends on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---------------------------------------------------------------- honest plans


class Turned(nn.Module):
    """A mask with permuted strides, and plain SGD, whose update Inductor takes for something else if it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(2, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.middle(self.first(x).view(-1, 4, 2).transpose(0, 1)).transpose(0, 1)
        return self.last(F.dropout(turned, 0.3).flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("task", "plans"),
    [
        (family("mlp"), [Plan(optimizer="fused"), Plan(residency="host"), Plan(accumulation=3)]),
        (family("cnn"), [Plan(layout="channels_last"), Plan(layout="channels_last", optimizer="fused")]),
        (family("gpt"), [Plan(optimizer="foreach"), Plan(accumulation=2)]),
        (another_family("gru"), [Plan(optimizer="foreach"), Plan(residency="device"), Plan(accumulation=3)]),
        (another_family("vae"), [FORLOOP, Plan(optimizer="fused")]),
        (a_task(model=Turned, epochs=9), [Plan(compile="step")]),
    ],
    ids=["mlp", "cnn", "gpt", "gru", "vae", "compiled"],
)
def test_honest_plans_are_trusted(task: hotloop.Task, plans: list[Plan]) -> None:
    found = prove_programs(task, [hotloop.lower(task, plan) for plan in plans])
    assert {one.plan: (one.parity, one.reason) for one in found if one.parity not in TRUSTED} == {}
    assert all(one.states >= 16 and one.free_steps >= 5 and one.first is None for one in found)


def test_the_baseline_is_bitwise_itself() -> None:
    assert prove(family("mlp"), BASELINE).parity == "bitwise"


def test_a_compiler_may_choose_the_strides_of_what_is_drawn() -> None:
    """Eager kernels draw in the order of memory, so a captured graph draws into tensors whose order is that anyhow."""

    def contiguous(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        draws = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli_.float)
        assert len(draws) == 1
        draws[0].target = lambda value, share: torch.empty(value.shape).bernoulli_(share)
        graph.recompile()
        return graph

    task = a_task(model=Turned, epochs=9)
    found = prove_programs(task, [Graphs(task, "step").program(contiguous)])[0]
    assert found.parity in TRUSTED, found.reason


# ---------------------------------------------------------------- planted faults


def around(holder: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    setattr(holder, name, make(getattr(holder, name)))


def module_of(program: Program, name: str) -> Any:
    return program.model.get_submodule(name)


def zero_grad_skipped(program: Program) -> None:
    program._step._clear_gradients = lambda: None  # type: ignore[method-assign]


def last_batch_dropped(program: Program) -> None:
    around(
        program.feed,
        "epoch",
        lambda epoch: lambda number, start=0: iter(list(epoch(number, start))[: max(0, 3 - start)]),
    )


def mask_repeated(program: Program) -> None:
    around(program._step.draws, "seed", lambda seed: lambda step: seed(0))


def statistics_not_updated(program: Program) -> None:
    norm = module_of(program, "1")
    norm.momentum = 0.0


def loss_scaled(program: Program) -> None:
    around(program._step, "_backward_of", lambda backward: lambda loss: backward(loss * 1.001))


def input_changed(program: Program) -> None:
    def make(compute: Callable) -> Callable:
        def changing(batch: Any) -> Any:
            batch[0].add_(1e-3)
            return compute(batch)

        return changing

    around(program._step, "_compute", make)


def layer_in_bf16(program: Program) -> None:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, self.weight, self.bias).float()

    layer = module_of(program, "9")
    layer.forward = MethodType(forward, layer)


def clipped_twice(program: Program) -> None:
    def make(clip: Callable) -> Callable:
        def twice(values: list[Tensor]) -> None:
            for _ in range(2):
                clip(values)
                torch._foreach_mul_([value.grad for value in values], 0.9)

        return twice

    around(program._step, "clip", make)


def state_of_the_step_before(program: Program) -> None:
    def make(step: Callable) -> Callable:
        def forgetful() -> None:
            before = {key: value["momentum_buffer"].clone() for key, value in program.optimizer.state.items()}
            step()
            for key, value in before.items():
                program.optimizer.state[key]["momentum_buffer"].copy_(value)

        return forgetful

    around(program.optimizer, "step", make)


def transposed_copy(program: Program) -> None:
    layer = module_of(program, "9")
    layer.forward = lambda x: F.linear(x, layer.weight.t().reshape(layer.weight.shape), layer.bias)


def average_decay_off(program: Program) -> None:
    around(
        program._step,
        "update_average",
        lambda _: lambda averages, values: torch._foreach_lerp_(averages, [v.detach() for v in values], 0.11),
    )


def rate_off(program: Program) -> None:
    def make(step: Callable) -> Callable:
        def off() -> None:
            group = program.optimizer.param_groups[0]
            before = group["lr"]
            group["lr"] = 1.2 * before
            step()
            group["lr"] = before

        return off

    around(program.optimizer, "step", make)


FAULTS: dict[str, tuple[Callable[[Program], None], str]] = {
    "zero_grad skipped": (zero_grad_skipped, "gradient"),
    "last batch dropped": (last_batch_dropped, "the parameters, within"),
    "dropout mask repeated": (mask_repeated, "loss 'loss' at step 2"),
    "statistics not updated": (statistics_not_updated, "buffer '1.running_"),
    "input changed": (input_changed, "count 'tensors 0 of the batch"),
    "layer in bf16": (layer_in_bf16, "loss 'loss' at step 1"),
    "clipped twice": (clipped_twice, "gradient"),
    "optimizer state of the step before": (state_of_the_step_before, "optimizer 'state/"),
    "transposed copy": (transposed_copy, "loss 'loss' at step 1"),
    "decay of the average off by 1 %": (average_decay_off, "average"),
    "learning rate off by 20 %": (rate_off, "update"),
}


@pytest.fixture(scope="module")
def judged(one_thread: None) -> dict[str, Parity]:
    """All faults of one network, proven together."""
    task = another_family("batchnorm", clip_norm=0.5, average=0.9)
    programs = [hotloop.lower(task, FORLOOP) for _ in FAULTS]
    for program, (plant, _) in zip(programs, FAULTS.values(), strict=True):
        plant(program)
    return dict(zip(FAULTS, prove_programs(task, programs), strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_broken_and_its_place_is_named(judged: dict[str, Parity], fault: str) -> None:
    found = judged[fault]
    assert found.parity == "broken", found.reason
    assert found.first is not None and found.first.startswith(FAULTS[fault][1]), found.first


def test_pieces_that_are_not_divided_are_broken() -> None:
    task = family("mlp")
    program = hotloop.lower(task, Plan(accumulation=2))
    around(program._step, "_backward_of", lambda backward: lambda loss: backward(2 * loss))
    found = prove_programs(task, [program])[0]
    assert found.parity == "broken"
    assert found.first is not None and found.first.startswith("gradient")


@pytest.fixture(scope="module")
def graphs() -> Graphs:
    return Graphs(family("cnn"), "step")


def test_a_stale_rate_in_a_graph_is_broken() -> None:
    """The schedule of the captured step: each update with the rate of the step before."""

    def stale(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        rates = [node for node in graph.graph.nodes if "_local_scalar_dense" in str(node.target)]
        with graph.graph.inserting_after(rates[0]):
            new = graph.graph.call_function(_Before(), (rates[0],))
        rates[0].replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        graph.recompile()
        return graph

    task = another_family("mlp")
    graphs = Graphs(task, "step")
    honest, faulty = prove_programs(task, [graphs.program(), graphs.program(stale)])
    assert honest.parity in TRUSTED
    assert faulty.parity == "broken"
    assert faulty.first is not None and faulty.first.startswith("update")


class _Before:
    """Gives what it was given one call before."""

    __name__ = "before"

    def __init__(self) -> None:
        self.last: Any = None

    def __call__(self, value: Any) -> Any:
        given, self.last = self.last, value
        return value if given is None else given


def test_mutants_that_change_a_step_clearly_are_caught(graphs: Graphs) -> None:
    """At random from the fuzzer; what a mutant does is measured apart from parity, which has to agree."""
    yardstick = Yardstick(graphs.program(), steps=10)
    made = []
    for number in range(12):
        program, mutation = graphs.mutant(random.Random(number))
        made.append((program, mutation, yardstick.of(program)))
    found = prove_programs(graphs.task, [program for program, _, _ in made])
    clear = [(m, p) for (_, m, effect), p in zip(made, found, strict=True) if effect.multiple > 1000]
    nothing = [(m, p) for (_, m, effect), p in zip(made, found, strict=True) if effect.multiple == 0]
    assert len(clear) >= 5
    assert [(m, p.reason) for m, p in clear if p.parity != "broken"] == []
    assert [(m, p.reason) for m, p in nothing if p.parity not in TRUSTED] == []


# ---------------------------------------------------------------- reduced precision


def test_bf16_is_reduced_precision_and_a_fault_in_it_is_still_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.lowering.order._check", lambda parts: None)  # this CPU may only emulate it
    task = family("mlp")
    programs = [hotloop.lower(task, Plan(precision="bf16")) for _ in range(3)]
    zero_grad_skipped(programs[1])
    rate_off(programs[2])
    found = [one.parity for one in prove_programs(task, programs)]
    assert found == ["reduced-precision", "broken", "broken"]


# ---------------------------------------------------------------- what can't be compared


class Norm(nn.Module):
    """As many language models have it: the mean of squares is always fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return (wide * wide.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype) * self.weight


class Bits(nn.Linear):
    """Clears the sign, of a number of 32 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x.view(torch.int32) & 0x7FFFFFFF).view(x.shape).view(torch.float32))


class OwnGenerator(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.generator))


class Clock(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + time.perf_counter() % 1))


class NoDouble(nn.Linear):
    def _apply(self, function: Callable, recurse: bool = True) -> Any:
        if function(torch.zeros(1)).dtype == torch.float64:
            raise RuntimeError("weights of 32 bits alone")
        return super()._apply(function, recurse)


class Rows(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter((torch.ones(6) * number, torch.tensor(number % 3)) for number in range(24))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": lambda: nn.Sequential(Norm(), nn.Linear(6, 3))}, "'0' (Norm) turns float64 into float32"),
        ({"model": lambda: Bits(6, 3)}, "can't be run in float64"),
        ({"model": lambda: NoDouble(6, 3)}, "weights of 32 bits alone"),
        ({"model": OwnGenerator}, "too random to compare"),
        ({"model": lambda: Clock(6, 3)}, "too random to compare"),
        ({"data": torch.utils.data.DataLoader(Rows(), batch_size=5), "batch_size": None}, "stream"),
    ],
    ids=["cast inside", "bits", "no double", "own generator", "clock", "stream"],
)
def test_what_can_t_be_compared_is_unproven_and_named(fields: dict[str, Any], says: str) -> None:
    found = prove(a_task(**fields), BASELINE)
    assert found.parity == "unproven"
    assert says in found.reason
    assert "\n" not in found.reason


def test_an_optimizer_that_calls_the_loss_itself_is_compared() -> None:
    task = a_task(optimizer=lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2), epochs=4)
    honest, faulty = hotloop.lower(task), hotloop.lower(task)
    loss_scaled(faulty)
    assert [one.parity for one in prove_programs(task, [honest, faulty])] == ["bitwise", "broken"]


# ---------------------------------------------------------------- draws


class Drawing(nn.Module):
    """Draws in the way that it is told."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(6, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.draw(x))  # type: ignore[no-any-return]


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda x: x + 0.3 * torch.randn(x.shape),
    "randn of its dtype": lambda x: x + 0.3 * torch.randn(x.shape, dtype=x.dtype),
    "rand_like": lambda x: x * torch.rand_like(x),
    "normal in place": lambda x: x + torch.empty_like(x).normal_(0, 0.3),
    "uniform in place": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout of features": lambda x: F.dropout1d(x[:, :, None], 0.4).squeeze(2),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
    "multinomial": lambda x: x[:, torch.multinomial(torch.ones(6, dtype=x.dtype), 6)],
    "of its own values": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "permutation": lambda x: x[:, torch.randperm(6)],
    "gumbel": lambda x: F.gumbel_softmax(x, tau=1.0),
    "exponential": lambda x: x * torch.empty_like(x).exponential_(),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_float64_draws_what_the_step_draws(draw: str) -> None:
    task = a_task(model=lambda: Drawing(DRAWS[draw]))
    faulty = hotloop.lower(task)
    mask_repeated(faulty)
    honest, broken = prove_programs(task, [hotloop.lower(task), faulty])
    assert honest.parity == "bitwise", honest.reason
    assert broken.parity == "broken"


# ---------------------------------------------------------------- what it leaves behind


def test_programs_and_generators_are_left_as_they_were() -> None:
    task = family("cnn")
    program = hotloop.lower(task, FORLOOP)
    advance(program, 3)
    before, generators, threads = program.state(), generator_states(), torch.get_num_threads()
    prove_programs(task, [program])
    assert differences(program.state(), before) == []
    assert generator_states() == generators
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    advance(program, 3)
    alone = hotloop.lower(task, FORLOOP)
    advance(alone, 6)
    assert differences(program.state(), alone.state()) == []


def test_they_are_left_so_when_the_proof_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    task = family("mlp")
    program = hotloop.lower(task, FORLOOP)
    advance(program, 3)
    before, generators = program.state(), generator_states()
    step, calls = EagerStep._run, []

    def interrupted(self: EagerStep, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 40:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(EagerStep, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prove_programs(task, [program])
    assert differences(program.state(), before) == []
    assert generator_states() == generators


def test_one_baseline_is_enough_for_what_passes_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them can only allow more: the others are asked about what didn't pass, and for nothing else."""
    asked: list[tuple[bool, int]] = []
    compared = parity._compared

    def recorded(task: Any, programs: Any, *given: Any, brief: bool) -> list[Parity]:
        asked.append((brief, len(programs)))
        return compared(task, programs, *given, brief=brief)

    monkeypatch.setattr(parity, "_compared", recorded)
    task = family("mlp")
    honest, faulty = lower(task, Plan(optimizer="fused")), lower(task, Plan(optimizer="foreach"))
    zero_grad_skipped(faulty)
    found = [one.parity for one in prove_programs(task, [honest, faulty])]
    assert found[0] in ("bitwise", "fp32-equivalent") and found[1] == "broken"
    assert asked == [(True, 2), (False, 1)]


def test_what_fails_beside_one_baseline_may_pass_beside_all(monkeypatch: pytest.MonkeyPatch) -> None:
    task = family("mlp")
    program = lower(task, Plan(optimizer="fused"))
    alone = parity._compared

    def strict(*given: Any, brief: bool) -> list[Parity]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hotloop.parity.judging.TYPICAL", 1e-3 if brief else 4.0)
            return alone(*given, brief=brief)

    monkeypatch.setattr(parity, "_compared", strict)
    assert prove_programs(task, [program])[0].parity in ("bitwise", "fp32-equivalent")


def _accounts(sizes: dict[str, list[float]]) -> dict[str, Account]:
    return {name: Account(name, [{WEIGHT: size} for size in errors]) for name, errors in sizes.items()}


WEIGHT = ("gradient", "weight")


def test_errors_of_two_sizes_have_a_floor_of_two_sizes() -> None:
    """Rounding switches a maximum at every third state or so of a baseline, and of a plan at more than half of them."""
    plain, other = [1e-6, 1e-6, 1e-4, 1e-6, 1e-6, 1e-6], [1e-6, 1e-4, 1e-6, 1e-6, 1e-4, 1e-6]
    accounts = _accounts({"plain": plain, "other": other, "plan": [1e-4, 1e-4, 1e-6, 1e-4, 1e-6, 1e-4]})
    rounding = [{WEIGHT: max(pair)} for pair in zip([1e-4, *plain[1:]], other, strict=True)]
    (row,) = typical(accounts["plan"], [accounts["plain"], accounts["other"]], rounding)
    assert row.ratio <= TYPICAL


def test_an_error_of_one_size_is_held_against_errors_of_one_size() -> None:
    accounts = _accounts({"plain": [1e-6] * 6, "other": [1e-6, 2e-6] * 3, "plan": [1e-5] * 6})
    rounding = [{WEIGHT: 2e-6}] * 6
    (row,) = typical(accounts["plan"], [accounts["plain"], accounts["other"]], rounding)
    assert row.ratio > TYPICAL


@pytest.mark.parametrize(("error", "parity"), [(2e-6, "fp32-equivalent"), (1e-4, "broken")])
def test_what_rounding_cancels_by_chance_at_one_state_is_no_measure(error: float, parity: str) -> None:
    """Rounding moves a loss by 1e-6 or so, and at one state by next to nothing; 1e-4 is no rounding anywhere."""
    loss = ("loss", "loss")
    usual, lucky = [1e-6, 2e-6, 1e-6, 3e-6, 2e-6], 5
    plain, plan = (
        Account(name, [{loss: size} for size in [*usual, last]]) for name, last in ((("plain"), 1e-9), ("plan", error))
    )
    plan.differs = "parameters/weight after step 1"
    evidence = Evidence([plain], [], [plan], State({}, {}), list(range(6)), [{loss: size} for size in [*usual, 1e-9]])
    found = judged_by_parity(plan, evidence, None)
    assert found["parity"] == parity, found["reason"]
    assert (found.get("first") == f"loss 'loss' at step {lucky + 1}") == (parity == "broken")


def test_one_program_s_class_does_not_depend_on_the_others() -> None:
    """An honest plan stays trusted beside others that are broken."""
    task = family("mlp", clip_norm=None)  # which would undo a scaled loss
    programs = [hotloop.lower(task, FORLOOP) for _ in range(3)]
    programs.append(hotloop.lower(task, Plan(accumulation=2)))
    for program in programs[:3]:
        loss_scaled(program)
    *broken, honest = prove_programs(task, programs)
    assert [one.parity for one in broken] == ["broken"] * 3
    assert all(one.first is not None and one.first.startswith("gradient") for one in broken)
    assert honest.parity == "fp32-equivalent", honest.reason


# ---------------------------------------------------------------- what can't be run


class Flattening(nn.Module):
    """Takes its images to lie in the usual order of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3), nn.Linear(4 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        return self.last(y.view(len(y), -1))  # type: ignore[no-any-return]


def pictures(**fields: Any) -> hotloop.Task:
    x = torch.randn(40, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    return a_task(**{"model": Flattening, "data": (x, x.flatten(1)[:, :3].argmax(1)), "epochs": 3} | fields)


def test_a_plan_whose_step_fails_is_broken_and_says_where() -> None:
    found = prove(pictures(), Plan(layout="channels_last"))
    assert found.parity == "broken" and found.first == "step 1"
    assert "raised RuntimeError: view size is not compatible" in found.reason


def test_a_harmless_change_that_the_model_can_t_take_is_left_out() -> None:
    task = pictures()
    program = hotloop.lower(task, Plan(optimizer="foreach"))
    (found,) = parity._compared(
        task, [program], None, lambda done, total: None, brief=False
    )  # beside channels_last, too
    assert found.parity in TRUSTED and found.states >= 16


def test_another_order_of_samples_that_changes_the_result_is_no_harmless_change() -> None:
    """Each sample is mixed with the one before it; what rounding comes to must not be read from that."""

    class Mixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(0.7 * x + 0.3 * x.roll(1, 0))

    def left_out(model: Callable[[], nn.Module]) -> set[str]:
        task = a_task(model=model, epochs=9)
        collector = Collector(
            Truth(task, torch.device("cpu")), baselines(task, "cpu", few=False), [], [lower(task, BASELINE)]
        )
        assert collector.collect().unproven is None
        return collector.left_out

    assert left_out(lambda: Mixed(6, 3)) == {"permuted"}
    assert left_out(lambda: nn.Linear(6, 3)) == set()


def test_a_step_that_fails_by_itself_is_one_line() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        raise ZeroDivisionError("of the user's own")

    with pytest.raises(hotloop.HotloopError, match="ZeroDivisionError: of the user's own"):
        hotloop.check(a_task(loss=loss, epochs=9), Plan(optimizer="foreach"))


def test_a_schedule_that_ends_before_the_free_run_is_not_passed() -> None:
    scheduled = lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)  # noqa: E731
    found = prove(a_task(epochs=2, schedule=scheduled), Plan(optimizer="foreach"))
    assert found.parity in TRUSTED and 0 < found.free_steps < 10
