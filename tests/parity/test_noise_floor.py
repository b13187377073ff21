"""The floor that plans are held against: who makes it, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotloop.core.records.race import TRUSTED_CLASSES
from hotloop.core.state import State, differing_paths
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.margins import TYPICAL_LIMIT
from hotloop.parity import proof as parity
from hotloop.parity.comparison import Evidence, StepErrors, relative_errors, run_one_step
from hotloop.parity.free_run import compare_free_runs
from hotloop.parity.noise_floor import typical_errors
from hotloop.parity.proof import prove_programs
from hotloop.parity.references import (
    Float64Reference,
    ReferenceRun,
    SequentialSums,
    baseline_references,
    reduced_precision_references,
)
from hotloop.parity.step_collector import StepCollector
from hotloop.parity.trajectory import PathState
from hotloop.parity.verdict import classify as judged_by_parity
from hotloop.plan import BASELINE, Plan
from tests.support.programs import a_task
from tests.support.tasks.model_families import family

pytestmark = pytest.mark.usefixtures("one_thread")


def _accounts(sizes: dict[str, list[float]]) -> dict[str, StepErrors]:
    return {name: StepErrors(name, [{WEIGHT: size} for size in errors]) for name, errors in sizes.items()}


WEIGHT = ("gradient", "weight")


def test_errors_of_two_sizes_have_a_floor_of_two_sizes() -> None:
    """Rounding switches a maximum at every third state or so of a baseline, and of a plan at more than half of them."""
    plain, other = [1e-6, 1e-6, 1e-4, 1e-6, 1e-6, 1e-6], [1e-6, 1e-4, 1e-6, 1e-6, 1e-4, 1e-6]
    accounts = _accounts({"plain": plain, "other": other, "plan": [1e-4, 1e-4, 1e-6, 1e-4, 1e-6, 1e-4]})
    rounding = [{WEIGHT: max(pair)} for pair in zip([1e-4, *plain[1:]], other, strict=True)]
    (row,) = typical_errors(accounts["plan"], [accounts["plain"], accounts["other"]], rounding)
    assert row.ratio <= TYPICAL_LIMIT


def test_an_error_of_one_size_is_held_against_errors_of_one_size() -> None:
    accounts = _accounts({"plain": [1e-6] * 6, "other": [1e-6, 2e-6] * 3, "plan": [1e-5] * 6})
    rounding = [{WEIGHT: 2e-6}] * 6
    (row,) = typical_errors(accounts["plan"], [accounts["plain"], accounts["other"]], rounding)
    assert row.ratio > TYPICAL_LIMIT


class Pooled(nn.Module):
    """The mean over tokens of a layer: the gradient of its bias is a sum of equal numbers, which round alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, None] * torch.linspace(0.5, 1.5, 60)[:, None]
        return self.head(self.layers(tokens).mean(1))  # type: ignore[no-any-return]


@pytest.mark.more
def test_sums_that_a_compiler_writes_in_a_row_are_no_fault() -> None:
    task = a_task(model=Pooled, epochs=9)
    (found,) = prove_programs(task, [lower(task, Plan(compile="forward"))])
    assert found.parity == "fp32-equivalent", found.reason


@pytest.mark.parametrize(("shape", "dims"), [((999, 3), [0]), ((3, 999), [-1]), ((7, 2, 150), [0, 2]), ((9000,), [0])])
def test_in_a_row_means_one_after_the_other(shape: tuple[int, ...], dims: list[int]) -> None:
    values = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    with SequentialSums():
        one, kept, mean = values.sum(dims), values.sum(dims, keepdim=True), values.mean(dims)
    rows = values.movedim(dims, list(range(len(dims)))).flatten(0, len(dims) - 1).numpy()
    parts = [np.add.accumulate(rows[at : at + 4096], axis=0)[-1] for at in range(0, len(rows), 4096)]
    expected = torch.from_numpy(np.asarray(parts)).sum(0)
    assert (
        one.equal(expected)
        and kept.shape == values.sum(dims, keepdim=True).shape
        and kept.flatten().equal(one.flatten())
    )
    assert torch.allclose(mean, values.mean(dims)) and not values.double().sum(dims).float().equal(one)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("places", [(), (13, 11)])
def test_cross_entropy_is_summed_in_a_row_too(places: tuple[int, ...], reduction: str, weighted: bool) -> None:
    draws = torch.Generator().manual_seed(1)
    scores = torch.randn(64, 5, *places, generator=draws)
    target = torch.randint(0, 5, (64, *places), generator=draws)
    target[::3] = 7
    scores[0] = -torch.inf  # where nothing is asked for, whatever stands there
    scores[0, 0] = 0.0
    weight = torch.rand(5, generator=draws) if weighted else None

    def loss(scores: Tensor) -> Tensor:
        given = None if weight is None else weight.to(scores.dtype)
        return F.cross_entropy(scores, target, given, ignore_index=7, reduction=reduction)

    with SequentialSums():
        found = loss(scores)
    torch.testing.assert_close(found, loss(scores), rtol=1e-5, atol=0)
    if reduction == "sum" and not weighted:
        each = F.cross_entropy(scores, target, ignore_index=7, reduction="none").flatten().numpy()
        rows = [np.add.accumulate(each[at : at + 4096])[-1] for at in range(0, len(each), 4096)]
        assert float(found) == float(torch.tensor(rows).sum())


@pytest.mark.parametrize(("factor", "within"), [(1, True), (9, False)])
def test_what_a_compiled_step_shows_at_few_states_is_held_against_those(factor: float, within: bool) -> None:
    """Its gradients are seen where the step runs eagerly: in the first one and in a smaller batch, where rounding jumps."""
    plain = [1e-4, *[1e-6] * 6, 1e-4]
    account = StepErrors("plan", [{WEIGHT: factor * 1e-4}, *[{} for _ in range(6)], {WEIGHT: factor * 1e-4}])
    (row,) = typical_errors(account, [_accounts({"plain": plain})["plain"]], [{WEIGHT: size} for size in plain])
    assert (row.ratio <= TYPICAL_LIMIT) is within


@pytest.mark.parametrize(("error", "parity"), [(2e-6, "fp32-equivalent"), (1e-4, "broken")])
def test_what_rounding_cancels_by_chance_at_one_state_is_no_measure(error: float, parity: str) -> None:
    """Rounding moves a loss by 1e-6 or so, and at one state by next to nothing; 1e-4 is no rounding anywhere."""
    loss = ("loss", "loss")
    usual, lucky = [1e-6, 2e-6, 1e-6, 3e-6, 2e-6], 5
    plain, plan = (
        StepErrors(name, [{loss: size} for size in [*usual, last]])
        for name, last in ((("plain"), 1e-9), ("plan", error))
    )
    plan.differs = "parameters/weight after step 1"
    evidence = Evidence([plain], [], [plan], State({}, {}), list(range(6)), [{loss: size} for size in [*usual, 1e-9]])
    found = judged_by_parity(plan, evidence, None)
    assert found["parity"] == parity, found["reason"]
    assert (found.get("first") == f"loss 'loss' at step {lucky + 1}") == (parity == "broken")


@pytest.mark.parametrize(
    ("size", "often", "parity"), [(1e-4, False, "fp32-equivalent"), (1e-4, True, "broken"), (1e-2, False, "broken")]
)
def test_a_relu_that_rounding_switches_changes_the_size_of_an_update(size: float, often: bool, parity: str) -> None:
    """By how much is chance: the baseline's own update is off by 1e-4 there, and its size by far less."""
    update, along = ("update", "weight"), ("size of update", "weight")
    rounding = [{update: 1e-4, along: 1e-7} for _ in range(6)]
    errors = [{update: 1e-4, along: size if often or state == 3 else 1e-7} for state in range(6)]
    plain, plan = StepErrors("plain", rounding), StepErrors("plan", errors, differs="parameters/weight after step 1")
    found = judged_by_parity(plan, Evidence([plain], [], [plan], State({}, {}), list(range(6)), rounding), None)
    assert found["parity"] == parity, found["reason"]


def test_another_order_of_samples_that_changes_the_result_is_no_harmless_change() -> None:
    """Each sample is mixed with the one before it; what rounding comes to must not be read from that."""

    class Mixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(0.7 * x + 0.3 * x.roll(1, 0))

    def left_out(model: Callable[[], nn.Module]) -> set[str]:
        task = a_task(model=model, epochs=9)
        collector = StepCollector(
            Float64Reference(task, torch.device("cpu")),
            baseline_references(task, "cpu", few=False),
            [],
            [lower(task, BASELINE)],
        )
        assert collector.collect().unproven is None
        return {one.name for one in collector.references if not one.is_active}

    assert left_out(lambda: Mixed(6, 3)) == {"permuted"}
    assert left_out(lambda: nn.Linear(6, 3)) == set()


@pytest.mark.few("alone")
@pytest.mark.parametrize("few", [True, False], ids=["alone", "beside others"])
def test_the_baseline_s_step_stays_what_it_was_while_others_take_theirs(few: bool) -> None:
    """Witnesses may run in its own Program, in whose memory a step lies that isn't kept."""
    task = a_task(epochs=9)
    witnesses, apart = baseline_references(task, "cpu", few=few)[: 1 if few else None], lower(task, BASELINE)
    states: list[int] = []

    class Watching(StepCollector):
        def _run_candidate(self, program: Program, account: StepErrors, stop: PathState, known: Any) -> None:
            seen, after = run_one_step(apart, stop.state, stop.batch)
            _, _, eager, expected = known
            assert differing_paths(expected, after) == []
            assert not any(relative_errors(eager, seen, dict.fromkeys(seen, 1.0)).values())
            states.append(stop.state.position.step)
            super()._run_candidate(program, account, stop, known)

    collected = Watching(Float64Reference(task, torch.device("cpu")), witnesses, [], [lower(task, BASELINE)]).collect()
    assert collected.unproven is None and len(states) > 4
    assert collected.candidates[0].differs is None


class Keeping(nn.Module):
    """Keeps the last batch as it came: its features, and which of three kinds each sample is taken for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.keeps = nn.Linear(6, 3), (True, True)
        self.register_buffer("features", torch.zeros(5, 3))
        self.register_buffer("kinds", torch.zeros(5, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if self.keeps[0]:
            self.features[: len(x)] = out.detach()
        if self.keeps[1]:
            self.kinds[: len(x)] = out.detach().argmax(1)
        return out


@pytest.mark.more
def test_a_buffer_that_keeps_samples_has_no_floor_of_another_order() -> None:
    """The samples are written in another order then, which is no rounding: a plan that never writes would pass for that."""
    task = a_task(model=Keeping, epochs=9)
    programs = [lower(task, Plan(optimizer="foreach")) for _ in range(3)]
    for program, keeps in zip(programs, [(True, True), (False, True), (True, False)], strict=True):
        program.model.keeps = keeps  # type: ignore[assignment]
    honest, no_features, no_kinds = prove_programs(task, programs)
    assert honest.parity in TRUSTED_CLASSES, honest.reason
    assert [one.parity for one in (no_features, no_kinds)] == ["broken", "broken"]
    assert str(no_features.first).startswith("buffer 'features'") and str(no_kinds.first).startswith("buffer 'kinds'")


class Masked(nn.Module):
    def __init__(self, mask: float) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("mask", torch.full((6, 6), mask).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.norm(x)[:, :, None] + self.mask
        return self.layer((scores.softmax(-1) @ x[:, :, None]).flatten(1))  # type: ignore[no-any-return]


@pytest.mark.more
@pytest.mark.parametrize("mask", [-torch.inf, -1e9, torch.finfo(torch.float32).min])
def test_a_constant_buffer_hides_no_other_one(mask: float) -> None:
    task = a_task(model=lambda: Masked(mask), epochs=9)
    programs = [lower(task, Plan(optimizer="foreach")) for _ in range(2)]
    programs[1].model.norm.momentum = 0.0  # type: ignore[union-attr, assignment]
    honest, never_updated = prove_programs(task, programs)
    assert honest.parity in TRUSTED_CLASSES, honest.reason
    assert never_updated.parity == "broken" and str(never_updated.first).startswith("buffer 'norm.running_")


class Extremes(nn.Module):
    """Keeps the largest outputs, of which one is never seen; and a whole number that rounding changes at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.keeps = nn.Linear(6, 3), (True, True)
        self.register_buffer("largest", torch.full((4,), -torch.inf))
        self.register_buffer("digits", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if self.keeps[0]:
            self.largest[:3] = out.detach().amax(0)
        if self.keeps[1]:
            self.digits.copy_((out.detach().double().sum() * 1e12).long())
        return out


@pytest.mark.more
def test_what_is_not_finite_hides_nothing_beside_it_and_what_can_t_be_compared_must_be_bitwise_equal() -> None:
    task = a_task(model=Extremes, epochs=9)
    programs = [lower(task, Plan(optimizer="foreach")) for _ in range(3)]
    for program, keeps in zip(programs, [(True, True), (False, True), (True, False)], strict=True):
        program.model.keeps = keeps  # type: ignore[assignment]
    honest, no_largest, no_digits = prove_programs(task, programs)
    assert honest.parity in TRUSTED_CLASSES, honest.reason
    assert no_largest.parity == "broken" and str(no_largest.first).startswith("buffer 'largest'")
    assert no_digits.parity == "unproven" and "the buffer 'digits' can't be compared" in no_digits.reason


@pytest.mark.more
def test_a_peer_that_is_left_out_leaves_the_baseline_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are called `nudged`: the eager step in a reduced precision, and the one in fp32."""
    monkeypatch.setattr("hotloop.lowering.build._check_plan", lambda parts: None)  # this CPU may only emulate it
    task, plan = family("mlp"), Plan(precision="bf16")
    asked: list[list[str]] = []

    def failing(*given: Any, **how: Any) -> list[ReferenceRun]:
        found = reduced_precision_references(*given, **how)
        found[1].batch = lambda batch, number: None  # which no step can be taken with
        return found

    def noted(start: State, *who: Any, **how: Any) -> Any:
        asked.extend([one.name for one in witnesses] for witnesses in who[:2])
        return compare_free_runs(start, *who, **how)

    monkeypatch.setattr(parity, "reduced_precision_references", failing)
    monkeypatch.setattr(parity, "compare_free_runs", noted)
    (found,) = parity._compare_programs(task, [lower(task, plan)], None, lambda done, total: None, brief=False)
    assert found.parity == "reduced-precision", found.reason
    assert "nudged" in asked[0] and "nudged" not in asked[1]
