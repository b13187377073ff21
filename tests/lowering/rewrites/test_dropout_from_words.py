"""Masks of dropout by words: the same in graph and eager mode, of the right rate, independent; and faults in them are seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop
from hotloop.core.state import differing_paths
from hotloop.errors import PlanError
from hotloop.lowering.build import lower
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.rewrites import dropout_from_words
from hotloop.lowering.rewrites.dropout_from_words import MIN_NUMBERS, WordDrawMode, draw_into, share_of_ones, word_limit
from hotloop.lowering.steps import compiled_step
from hotloop.lowering.task_facts import task_facts
from hotloop.parity.comparison import StepErrors
from hotloop.parity.rng_tests import check_word_draws
from hotloop.plan import Plan
from hotloop.tuning import candidates, step_profile
from tests.lowering.rewrites.test_rewrites import uncompiled  # noqa: F401
from tests.support.programs import a_task
from tests.support.rewritten_steps import Step, apart, assert_refused
from tests.support.tuning.fake_machines import a_machine

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 256
NAMED = Plan(compile="step", rewrites="draw_by_words")
bernoulli_ = torch.ops.aten.bernoulli_.float


class Dropping(nn.Module):
    """Drops as a layer, within attention, and where dimensions lie turned in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.first(x)).view(-1, 16, 16)
        h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.1 * self.training)
        return self.last(F.dropout(h.mT, 0.5, self.training).flatten(1))  # type: ignore[no-any-return]


def task(model: Callable[[], nn.Module] = Dropping, samples: int = 33, batch_size: int = 8) -> hotloop.Task:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    return a_task(model=model, data=(x, x[:, :3].argmax(1)), batch_size=batch_size, epochs=9)


def images() -> hotloop.Task:
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.25), nn.MaxPool2d(2), nn.Dropout2d(0.5)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3))
    x = torch.randn(130, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return a_task(model=lambda: deepcopy(model), data=(x, x.flatten(1)[:, :3].argmax(1)), batch_size=64, epochs=9)


# ---------------------------------------------------------------- where it applies


@pytest.mark.parametrize("double", [False, True])
def test_the_step_is_that_of_the_same_masks(double: bool) -> None:
    """Loss, gradients as the update shows them, and all else."""
    step = Step(task(), double)
    torch.manual_seed(3)
    other = step.after(step.captured)
    with WordDrawMode():
        torch.manual_seed(3)
        plain = step.after(step.captured)
    assert step.rewritten("draw_by_words") == {"draw_by_words": 3}
    torch.manual_seed(3)
    found = step.after(step.captured)
    assert apart(found, plain) < 1e-12 and apart(found, other) > 1e-3


def test_gradients_are_those_of_a_mask_made_by_hand() -> None:
    x = torch.randn(8, WIDTH, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    mask = draw_into(torch.empty_like(x), 0.75)
    (wanted,) = torch.autograd.grad((x * mask / 0.75).square().sum(), x)
    torch.manual_seed(3)
    with WordDrawMode():
        (found,) = torch.autograd.grad(F.dropout(x, 0.25).square().sum(), x)
    assert apart([found], [wanted]) < 1e-15 and 0.6 < mask.mean() < 0.9


def few(x: Tensor) -> Tensor:
    return F.dropout(x[:, : MIN_NUMBERS // 8 - 1])


def by_chances_of_their_own(x: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.full_like(x, 0.5))


def by_a_generator_of_its_own(x: Tensor) -> Tensor:
    return x * torch.empty_like(x).bernoulli_(0.5, generator=torch.Generator())


def with_a_chance_of(share: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * torch.empty_like(x).bernoulli_(share)


@pytest.mark.few("by_chances_of_their_own", "few")
@pytest.mark.parametrize("draw", [few, by_chances_of_their_own, with_a_chance_of(0.0), with_a_chance_of(1.0)])
def test_what_it_is_not_for_is_left_alone(draw: Callable[[Tensor], Tensor]) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, WIDTH), nn.LazyLinear(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(draw(self.first(x)))  # type: ignore[no-any-return]

    assert_refused(Step(task(Other)), "draw_by_words")
    assert_refused(Step(task(Other)), "all")


def test_in_evaluation_nothing_is_drawn_and_a_generator_of_ones_own_is_asked_itself() -> None:
    with WordDrawMode():
        before = torch.get_rng_state()
        F.dropout(torch.ones(MIN_NUMBERS), training=False)
        by_a_generator_of_its_own(torch.ones(MIN_NUMBERS))
        assert torch.equal(torch.get_rng_state(), before)


def test_pieces_of_a_batch_draw_as_before() -> None:
    with pytest.raises(PlanError, match="each piece draws its own"):
        lower(task(), NAMED.with_axes(accumulation=2))
    with pytest.raises(PlanError, match="changes nothing"):
        lower(task(), Plan(compile="step", rewrites="all", accumulation=2))


# ---------------------------------------------------------------- the numbers themselves


@pytest.mark.parametrize("share", [0.5, 0.25, 0.75, 1 / 256, 0.9, 1 - 0.9, 1 / 3, 1e-6, 1 - 2**-31])
def test_of_all_numbers_the_share_lies_below_the_limit(share: float) -> None:
    dtype, limit = word_limit(share)
    lowest, bits = torch.iinfo(dtype).min, torch.iinfo(dtype).bits
    assert abs((limit - lowest) / 2**bits - share) <= (0.0 if dtype == torch.int8 else 2**-33)
    assert share_of_ones(bernoulli_, (torch.empty(MIN_NUMBERS), share), {}) == share


@pytest.mark.parametrize("share", [0.0, 1.0, 2**-40, 1 - 2**-40, -0.5, 1.5, float("nan")])
def test_what_is_as_good_as_none_or_all_is_left_to_torch(share: float) -> None:
    assert share_of_ones(bernoulli_, (torch.empty(MIN_NUMBERS), share), {}) is None


Draw = Callable[[Tensor, float], Tensor]
SIZE, STEPS = 1 << 15, 4


def wrong(draw: Draw, share: float) -> str:
    """What is wrong with masks, two in each of some steps: a figure off by what chance does once in ten million."""

    def both(step: int) -> Tensor:
        torch.manual_seed(step)
        return torch.stack([draw(torch.empty(SIZE), share) for _ in range(2)])

    masks = torch.stack([both(step) for step in range(STEPS)]).double()
    if not torch.equal(masks[0], both(0).double()):
        return "it isn't repeated by the same seed"
    if set(masks.unique().tolist()) != {0.0, 1.0}:
        return "other numbers than 0 and 1"
    spread = (share * (1 - share)) ** 0.5
    if abs(float(masks.mean()) - share) > 5.3 * spread / masks.numel() ** 0.5:
        return "the rate"
    masks = (masks - share) / spread
    pairs = {"steps": (masks[:-1], masks[1:]), "draws": (masks[:, 0], masks[:, 1])}
    pairs |= {f"neighbours {by} apart": (masks[..., :-by], masks[..., by:]) for by in (1, 2, 3, 4, 7, 8, 16, 64)}
    for name, (one, other) in pairs.items():
        if abs(float((one * other).mean())) > 5.3 / one.numel() ** 0.5:
            return name
    return ""


@pytest.mark.parametrize("share", [0.75, 0.5, 0.25, 0.9, 0.1])
def test_masks_have_their_rate_and_are_independent(share: float) -> None:
    assert wrong(draw_into, share) == wrong(lambda value, share: value.bernoulli_(share), share) == ""


def of_another_rate(value: Tensor, share: float) -> Tensor:
    return draw_into(value, share * 0.96)


def the_same_at_each_step(value: Tensor, share: float) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return draw_into(value, share)


def the_same_in_both(value: Tensor, share: float) -> Tensor:
    """What begins where the step has begun."""
    torch.manual_seed(torch.initial_seed())
    return draw_into(value, share)


def by_fewer_words(value: Tensor, share: float) -> Tensor:
    """Each byte is taken for two neighbours."""
    return value.copy_(draw_into(torch.empty(value.numel() // 2), share).repeat_interleave(2).view(value.shape))


def by_words_again(value: Tensor, share: float) -> Tensor:
    """Each word serves for the next eight numbers too."""
    words = draw_into(torch.empty(value.numel() // 2), share).view(-1, 1, 8)
    return value.copy_(words.expand(-1, 2, -1).reshape(value.shape))


FAULTS = {
    of_another_rate: "the rate",
    the_same_at_each_step: "steps",
    the_same_in_both: "draws",
    by_fewer_words: "neighbours 1 apart",
    by_words_again: "neighbours 8 apart",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_masks_is_seen_here(fault: Draw) -> None:
    assert wrong(fault, 0.75) == FAULTS[fault]


def test_they_come_in_the_order_of_memory_whatever_the_shape() -> None:
    torch.manual_seed(0)
    plain = draw_into(torch.empty(5, 7, 31), 0.5)
    torch.manual_seed(0)
    turned = draw_into(torch.empty(5, 7, 31).permute(2, 0, 1), 0.5)
    assert torch.equal(turned.permute(1, 2, 0), plain)


# ---------------------------------------------------------------- under a plan


@pytest.mark.more
@pytest.mark.usefixtures("uncompiled")
def test_a_run_that_goes_on_draws_what_it_would_have_and_so_does_an_eager_one() -> None:
    program, resumed, eager = (lower(task(), NAMED) for _ in range(3))
    eager.run_eagerly()
    for one in (program, eager):
        one.advance(5)  # the last of them on a smaller batch
    resumed.advance(2)
    state = resumed.state()
    resumed.advance(1)
    resumed.restore(state)
    resumed.advance(3)
    assert differing_paths(resumed.state(), program.state()) == []
    ends = [list(one.state().parameters.values()) for one in (eager, program, lower(task(), Plan()))]
    assert apart(ends[0], ends[1]) < 1e-6


@pytest.mark.more
@pytest.mark.few("{'compile': 'forward'}")
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("axes", [{}, {"layout": "channels_last"}, {"compile": "forward"}], ids=str)
def test_it_is_trusted_with_the_same_draws_for_everybody(axes: dict[str, Any]) -> None:
    found = hotloop.check(images(), NAMED.with_axes(**axes))
    assert found.parity == "fp32-equivalent", found.reason
    assert "the baseline drew the plan's random numbers, which are cut out of random words" in found.reason
    assert "the plan's random numbers have the baseline's rate and scale, and are independent" in found.reason


@pytest.mark.more
@pytest.mark.parametrize(
    ("make", "way"),
    [(images, "package"), pytest.param(task, "step", marks=pytest.mark.more)],
    ids=["images", "attention"],
)
def test_compiled_steps_are_trusted(make: Callable[[], hotloop.Task], way: str) -> None:
    found = hotloop.check(make(), Plan(compile=way, rewrites="all"))
    assert found.parity == "fp32-equivalent", found.reason
    assert "cut out of random words" in found.reason


def test_plans_are_proven_each_by_its_own_draws() -> None:
    from hotloop.parity.proof import _group_by_draws

    programs = [lower(task(), plan) for plan in (Plan(), Plan(optimizer="foreach"), Plan(optimizer="forloop"))]
    programs[1]._step.draws_by_words = True
    (words, by_words), (nothing, others) = _group_by_draws(task(), programs)
    assert (by_words, others, nothing) == ([programs[1]], [programs[0], programs[2]], None) and words is not None


def _limits(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    return iter(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.lt.Scalar))


def off_by_a_hundredth(graph: torch.fx.GraphModule) -> None:
    """The rate of the first."""
    node = next(_limits(graph))
    node.update_arg(1, node.args[1] - 3)  # type: ignore[operator]


def without_a_sign(graph: torch.fx.GraphModule) -> None:
    node = next(_limits(graph))
    node.update_arg(1, node.args[1] + 128)  # type: ignore[operator]


def one_for_two(graph: torch.fx.GraphModule) -> None:
    first, *others = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.randint.low)
    second = next(one for one in others if one.args[2] == first.args[2])
    second.replace_all_uses_with(first)


def each_time_the_same(graph: torch.fx.GraphModule) -> None:
    @cache
    def once(lowest: int, highest: int, count: int) -> Tensor:
        return torch.randint(lowest, highest, (count,))

    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.randint.low):
        node.target, node.args, node.kwargs = once, (*node.args[:2], *node.args[2]), {}


def in_another_order(graph: torch.fx.GraphModule) -> None:
    first, second, *_ = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.randint.low)
    first.prepend(second)


@pytest.mark.more
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "fault",
    [
        off_by_a_hundredth,
        each_time_the_same,
        *(pytest.param(one, marks=pytest.mark.more) for one in (without_a_sign, one_for_two, in_another_order)),
    ],
)
def test_a_fault_of_the_program_is_seen_by_check(
    fault: Callable[[torch.fx.GraphModule], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = compiled_step.apply_rewrite

    def faulty(graph: torch.fx.GraphModule, which: str, *others: Any) -> dict[str, int]:
        found = honest(graph, which, *others)
        fault(graph)
        graph.recompile()
        return found

    monkeypatch.setattr(compiled_step, "apply_rewrite", faulty)
    found = hotloop.check(task(), NAMED)
    assert found.parity == "broken", found.reason


SEEN: dict[Draw, str] = {
    of_another_rate: "has another rate or scale than the baseline's",
    the_same_at_each_step: "depends on that of the step before",
    the_same_in_both: "draw 2 (bernoulli_) depends on draw 1",
}


@pytest.mark.parametrize("fault", SEEN)
def test_the_draws_that_everybody_follows_are_looked_at_by_themselves(
    fault: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers agree then, since all draw the same."""
    plain, honest, faulty = lower(images(), Plan()), StepErrors("honest"), StepErrors("faulty")
    check_word_draws(plain.state(), plain, [honest])
    assert (honest.has_tested_draws, honest.draws) == (True, None)
    monkeypatch.setattr(dropout_from_words, "draw_into", fault)
    check_word_draws(plain.state(), plain, [faulty])
    assert SEEN[fault] in str(faulty.draws)


@pytest.mark.more
@pytest.mark.usefixtures("uncompiled")
def test_another_rate_for_everybody_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout_from_words, "draw_into", of_another_rate)
    found = hotloop.check(task(), NAMED)
    assert found.parity == "broken" and "draw 1 (bernoulli_) has another rate" in found.reason, found.reason


# ---------------------------------------------------------------- whether it is tried


class Attending(nn.Module):
    """Has dropout as a number of attention's alone."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(6, 2, share), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(x, x, x)[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "drops"),
    [
        (Dropping, True),
        (lambda: Attending(0.1), True),
        (lambda: Attending(0.0), False),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.0)), False),
    ],
    ids=["a layer", "attention", "none of attention", "none"],
)
def test_a_search_tries_it_where_a_layer_drops(model: Callable[[], nn.Module], drops: bool) -> None:
    facts = task_facts(LoweringContext.from_task(task(model), Plan()))
    changes = candidates.rewrite_changes(facts, a_machine(), Plan(device="cpu", compile="step"))
    assert facts.drops == bool(changes) == drops


def test_a_mask_is_reckoned_to_stay_a_call_unless_it_is_rewritten() -> None:
    large, small = torch.empty(MIN_NUMBERS), torch.empty(MIN_NUMBERS - 1)
    assert not step_profile._is_library_call(bernoulli_, (large, 0.9), True)
    assert step_profile._is_library_call(bernoulli_, (large, 0.9), False) and step_profile._is_library_call(
        bernoulli_, (small, 0.9), True
    )
    assert step_profile._is_library_call(bernoulli_, (large, 0.9), True, {"generator": torch.Generator()})
