"""Whether a search compiles: what that should win of a run, and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hotloop.core.random.rng import generator_states
from hotloop.lowering.build import lower
from hotloop.plan import Plan
from hotloop.tuning import search as module
from hotloop.tuning import step_profile
from hotloop.tuning.economics import Budget, Payoff, estimate_compile_gain, estimate_compile_s, rate_candidates
from hotloop.tuning.step_profile import StepProfile, profile_step
from tests.support.programs import a_task
from tests.support.tasks.model_families import family
from tests.support.tuning.fake_races import HALF, STEP_MS, Races, searching
from tests.tuning.search.test_candidates import Stays

WAYS = [Plan(compile="package"), Plan(compile="step"), Plan(compile="forward")]


def rated(ways: list[Plan], made: StepProfile, step_s: float, budget: Budget, **given: Any) -> dict[Plan, Payoff]:
    steps = None if budget.run_s is None else round(budget.run_s / step_s)
    return rate_candidates(ways, made, step_s, steps, budget, **given)


def test_a_longer_step_takes_longer_to_compile_and_an_unknown_one_longest() -> None:
    assert estimate_compile_s(50) < estimate_compile_s(1000) and estimate_compile_s(50, "step") < estimate_compile_s(
        50, "package"
    ) < estimate_compile_s(None)


@pytest.mark.parametrize(
    ("budget", "order"),
    [
        (Budget(80.0, 2.0), ["step", "package", "forward"]),
        (Budget(1000.0, 20.0), ["package", "step", "forward"]),
        (Budget(5.0, 20.0, least_s=0.0), ["package", "step", "forward"]),  # the user gave the time, for runs to come
        (Budget(None, 20.0), ["package", "step", "forward"]),
    ],
    ids=["short", "long", "time limit", "stream"],
)
def test_the_way_that_is_compiled_sooner_comes_first_where_time_is_short(budget: Budget, order: list[str]) -> None:
    found = rated(WAYS, HALF, STEP_MS / 1e3, budget)
    assert [plan.compile for plan in found] == order
    assert budget.run_s is None or all(one.saves_s < budget.run_s for one in found.values())


def test_recurrent_layers_are_dear_to_compile_and_not_to_record() -> None:
    """A CUDA graph alone writes nothing out."""
    ways = [Plan(device="cuda:0", graphs="step"), Plan(device="cuda:0", compile="step")]
    plain, recurrent = (
        list(rated(ways, StepProfile(400), 1e-3, Budget(1000.0, 20.0), recurrent=recurrent).values())
        for recurrent in (False, True)
    )
    assert recurrent[0] == plain[0] and recurrent[0].compile_s < estimate_compile_s(None) == recurrent[1].compile_s
    assert recurrent[1].saves_s < plain[1].saves_s


@pytest.mark.parametrize(("speed", "counts"), [(1.0, True), (1.3, False)])
def test_a_proof_counts_where_the_eager_plan_needs_none(
    monkeypatch: pytest.MonkeyPatch, speed: float, counts: bool
) -> None:
    asked: list[float] = []

    def seen(*given: Any, proof_s: float, **axes: Any) -> dict[Plan, Payoff]:
        asked.append(proof_s)
        return rate_candidates(*given, proof_s=proof_s, **axes)

    monkeypatch.setattr(module, "rate_candidates", seen)
    searching(monkeypatch, Races(optimizer__fused=speed), steps=10_000, compiler=True).run()
    assert asked == [250 * STEP_MS / 1e3 if counts else 0.0]


def test_a_proof_and_a_race_are_part_of_what_a_compilation_costs() -> None:
    """Of 600 steps of a second each a compiler may win 140 s, and the proof alone takes 250."""
    slow = StepProfile(100, step_s=1.0, library_s=0.4, other_s=0.4)
    budget = Budget.of(1.0, 600, None)
    alone, proven = (rated(WAYS, slow, 1.0, budget, proof_s=proof_s)[WAYS[0]] for proof_s in (0.0, 250.0))
    assert alone.is_worthwhile and not proven.is_worthwhile
    assert alone.race_s == 24.0  # twelve rounds of two plans


def test_looks_at_each_epoch_take_from_what_a_compilation_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def seen(*given: Any, checks: int, **axes: Any) -> dict[Plan, Payoff]:
        asked.append(checks)
        return rate_candidates(*given, checks=checks, **axes)

    monkeypatch.setattr(module, "rate_candidates", seen)
    for task in a_task(), a_task(callbacks=[print]):
        searching(monkeypatch, Races(), steps=10_000, compiler=True, task=task).run()
    assert asked == [0, 2000]  # of five batches
    budget = Budget(1000.0, 20.0)
    never, often = (rated(WAYS, HALF, STEP_MS / 1e3, budget, checks=checks)[WAYS[0]] for checks in (0, 100))
    assert never.saves_s - often.saves_s == pytest.approx(100 * 0.6e-3 * HALF.operations)


@pytest.mark.parametrize(("steps", "raced"), [(8_000, 0), (400_000, 3)])
def test_changes_of_a_plan_that_compiles_are_raced_where_their_compilations_pay(
    monkeypatch: pytest.MonkeyPatch, steps: int, raced: int
) -> None:
    lowered = module.ProgramPool.get_program
    monkeypatch.setattr(
        module.ProgramPool, "get_program", lambda held, name, plan: lowered(held, name, plan.with_axes(compile="none"))
    )
    base = Plan(device="cpu", compile="step")
    races = Races()
    given = dict(base=base, fixed={"device", "compile"}, steps=steps, compiler=True, threads=2)
    searching(monkeypatch, races, **given).run()
    assert len([name for name in races.raced if name.startswith("compile=step ") or " compile=step" in name]) <= raced
    assert not any("optimizer" in name for name in races.raced)  # a compiler writes the update its own way
    assert ("compile=step" in races.raced) and (len(races.raced) > 2) is bool(raced)


@pytest.mark.parametrize(("channels", "side", "stays"), [(1, 3, False), (2, 3, False), (3, 3, True), (1, 5, True)])
@pytest.mark.parametrize("padding", [1, "same"])
def test_a_convolution_of_many_weights_stays_with_the_library(
    channels: int, side: int, stays: bool, padding: Any
) -> None:
    layer = nn.Conv2d(channels, 8, side, padding=padding)
    with Stays(rewrites=True) as seen:
        layer(torch.zeros(4, channels, 28, 28)).sum().backward()
    assert seen.found == [stays, stays]


@pytest.mark.parametrize(
    ("pool", "rewrites", "stays"),
    [
        (nn.MaxPool2d(2), True, False),
        (nn.MaxPool2d((3, 2)), True, False),
        (nn.MaxPool2d(2), False, True),
        (nn.MaxPool2d(3, stride=2), True, True),  # windows overlap
        (nn.MaxPool2d(2, padding=1), True, True),
        (nn.MaxPool2d(5), True, True),  # leaves out a column
        (nn.MaxPool2d(6), True, True),  # many numbers in a window
    ],
)
def test_pooling_stays_with_the_library_where_no_rewrite_takes_it(pool: nn.Module, rewrites: bool, stays: bool) -> None:
    with Stays(rewrites, "max_pool2d_with_indices") as seen:
        pool(torch.zeros(2, 3, 12, 12, requires_grad=True) + 0).sum().backward()
    assert seen.found == [stays, stays]


@pytest.mark.parametrize(
    ("behind", "rewritten"),
    [
        ([nn.MaxPool2d(2)], True),
        ([nn.ReLU(), nn.MaxPool2d(2)], True),
        ([nn.ReLU(inplace=True), nn.MaxPool2d(2)], True),
        ([nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(2)], False),  # the second one's result is pooled
        ([nn.BatchNorm2d(4), nn.MaxPool2d(2)], False),
        ([nn.ReLU(), nn.MaxPool2d(3, stride=2)], False),
        ([], False),
    ],
)
def test_a_convolution_counts_as_rewritten_where_its_result_is_pooled(
    behind: list[nn.Module], rewritten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, whatever they take."""
    seconds = iter(range(10_000))
    monkeypatch.setattr(step_profile.time, "perf_counter", lambda: float(next(seconds)))  # each operation takes one
    layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *behind)
    with step_profile._OperatorTimer(rewrites=True) as seen:
        layers(torch.zeros(2, 1, 8, 8)).sum().backward()
    assert sum(seen._convolved_s.values()) == 2
    assert seen.library_s + seen.other_s == seen.count
    assert seen.other_s - seen._other_s == (2 if rewritten else 0)


@pytest.mark.parametrize(
    ("layer", "image", "written"),
    [
        (nn.Conv2d(8, 8, 3, groups=8), torch.zeros(2, 8, 6, 6), True),
        (nn.Conv2d(8, 4, 1), torch.zeros(2, 8, 6, 6), True),
        (nn.Conv2d(8, 8, 3, groups=8), torch.zeros(2, 8, 6, 6).to(memory_format=torch.channels_last), False),
        (nn.Conv2d(8, 4, 3), torch.zeros(2, 8, 6, 6), False),
        (nn.Conv2d(8, 8, 7, groups=8), torch.zeros(2, 8, 7, 7), False),
        (nn.Conv1d(8, 8, 3, groups=8), torch.zeros(2, 8, 6), False),
    ],
)
def test_convolutions_that_are_faster_with_channels_last_count_as_written_in_part(
    layer: nn.Module, image: torch.Tensor, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, each by as much as compiled steps of three networks were found to save there."""
    seconds = iter(range(10_000))
    monkeypatch.setattr(step_profile.time, "perf_counter", lambda: float(next(seconds)))  # each operation takes one
    with step_profile._OperatorTimer(rewrites=False) as seen:
        layer(image.requires_grad_()).sum().backward()
    others = seen.count - 2
    assert seen.library_s + seen.other_s == pytest.approx(seen.count)
    assert (seen.other_s > others + 0.5) == written and seen.other_s < others + 1.5


def test_a_step_with_a_convolution_without_padding_is_looked_at() -> None:
    layers = lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding="valid"), nn.Flatten(), nn.LazyLinear(5))  # noqa: E731

    def model() -> nn.Module:
        made = layers()
        made(torch.zeros(1, 3, 6, 6))
        return made

    made = profile_step(lower(family("mlp", model=model)))
    assert made is not None and made.library_s


def test_a_transposed_convolution_stays_with_the_library() -> None:
    with Stays(rewrites=True) as seen:
        nn.ConvTranspose2d(1, 2, 3)(torch.zeros(2, 1, 6, 6)).sum().backward()
    assert seen.found == [True, True]


def test_a_look_at_a_step_leaves_the_callers_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searching(monkeypatch, Races(), task=a_task())
    torch.manual_seed(5)
    before = generator_states()
    assert search._profile_step("baseline", search.baseline) is not None
    assert generator_states() == before


def test_a_step_of_which_nothing_is_known_gains_little() -> None:
    assert 1 < estimate_compile_gain(None, 1e-3) < 1.05
