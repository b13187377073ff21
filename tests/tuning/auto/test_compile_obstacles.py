"""What speaks against compiling beside its costs: batches, memory, layers, and what was found before."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.hardware.probe import probe_hardware
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.race import TRUSTED_CLASSES, Timing, Verdict
from hotloop.core.state import differing_paths
from hotloop.parity.proof import prove_programs
from hotloop.plan import BASELINE, Plan
from hotloop.tuning.auto.auto import list_options
from hotloop.tuning.search import auto_search, payoff
from tests.support.programs import a_task, labelled
from tests.support.runs import lower_requested
from tests.support.tuning.fake_compilation import (
    AS_USUAL,
    AUTO,
    CPU,
    REWRITTEN,
    Samples,
    finding,
    images,
    make_any_run_long,
    pretend_to_compile,
)
from tests.support.tuning.fake_races import proving

HAS_BF16 = any("bf16" in device.precisions for device in probe_hardware("cpu").devices if device.kind == "cpu")


@pytest.fixture
def long(monkeypatch) -> None:
    make_any_run_long(monkeypatch)


@pytest.fixture
def pretended(monkeypatch) -> list[Plan]:
    return pretend_to_compile(monkeypatch)


@pytest.fixture
def found(monkeypatch) -> Callable[..., None]:
    return finding(monkeypatch)


def test_batches_are_made_as_the_baseline_makes_them(pretended) -> None:
    """Whatever the eager plan has read into memory."""

    class Slow(Samples):
        def __getitem__(self, index: int) -> Any:
            time.sleep(2e-3)
            return super().__getitem__(index)

    task = a_task(data=Slow(), batch_size=5, epochs=1000)
    program = hotloop.lower(task, Plan(device="cpu", residency="host"))
    hope = payoff.estimate_payoff(program, 100_000, way="package", rewrites=False)
    assert isinstance(hope, payoff.Payoff) and hope.load_s >= 5 * 2e-3


def test_batches_of_several_shapes_are_not_compiled_for(long, pretended) -> None:
    """Padded to the longest of each batch."""

    def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        x = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)
        return x, torch.tensor([label for _, label in samples])

    lines = [(torch.ones(3 + number, 4), number % 3) for number in range(24)]

    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mean(1))

    loader = torch.utils.data.DataLoader(lines, batch_size=5, collate_fn=padded)
    said: list[str] = []
    lower_requested(a_task(data=loader, batch_size=None, model=lambda: Reads(4, 3), epochs=1000), AUTO, said.append)
    assert {plan.compile for plan in pretended} == {"none"}
    assert said[1] == (
        "auto goes on eagerly: its batches differ in keys or shapes, and a compiled step is for batches that are alike"
    )


def test_an_incomplete_last_batch_speaks_not_against_compiling(long, pretended, found) -> None:
    found(compile__package=2.0)
    lower_requested(a_task(batch_size=10), AUTO)  # 10, 10 and 4
    assert pretended[-1] == Plan(compile="package")


@pytest.mark.parametrize(
    "axes",
    [
        {"accumulation": 2},
        pytest.param({"precision": "bf16"}, marks=pytest.mark.skipif(not HAS_BF16, reason="this CPU has no bf16")),
    ],
    ids=["accumulation", "precision"],
)
def test_where_memory_may_be_too_small_for_the_baseline_nothing_runs_beside_it(
    axes: dict[str, Any], long, pretended
) -> None:
    said: list[str] = []
    lower_requested(a_task(), PlanRequest(Plan(device="cpu", **axes), is_auto=True), said.append)
    assert {(plan.compile, *(getattr(plan, axis) for axis in axes)) for plan in pretended} == {("none", *axes.values())}
    assert said[-2].startswith(
        "auto goes on eagerly: a race of compiled plans needs memory for whole batches in the baseline's precision"
    )


def test_a_baseline_that_fails_shows_before_anything_is_compiled(long, pretended, monkeypatch) -> None:
    plain = auto_search.lower

    def failing(task: Any, plan: Plan, *told: Any) -> Any:
        program = plain(task, plan, *told)
        if plan == BASELINE:
            monkeypatch.setattr(program, "advance", lambda steps: torch.empty(1 << 50))
        return program

    monkeypatch.setattr(auto_search, "lower", failing)
    said: list[str] = []
    assert lower_requested(a_task(), AUTO, said.append).parts.plan == Plan(optimizer="fused")
    assert {plan.compile for plan in pretended} == {"none"}
    assert said[-2].startswith("auto goes on eagerly: its plans couldn't be raced (")


def test_a_proof_has_the_memory_of_all_plans_but_one(long, pretended, found, monkeypatch) -> None:
    found(compile__package=2.0, rewrites__all=1.5)
    made, held, plain = list[weakref.ref[Any]](), list[int](), auto_search.lower
    classes = iter(["broken", "bitwise"])

    def noted(task: Any, plan: Plan, *told: Any) -> Any:
        program = plain(task, plan, *told)
        made.append(weakref.ref(program))
        return program

    def proves(task: Any, programs: Any) -> Any:
        held.append(sum(one() is not None for one in made))
        return proving(next(classes))(programs)

    monkeypatch.setattr(auto_search, "lower", noted)
    monkeypatch.setattr(auto_search, "prove_programs", proves)
    lower_requested(images(), AS_USUAL)
    assert held == [1, 1] and pretended[-1] == Plan(compile="package")


def test_choosing_leaves_the_callers_generators_alone(long, pretended, found) -> None:
    found(compile__package=2.0, rewrites__all=1.5)  # which a model with dropout may have
    torch.manual_seed(3)
    first = torch.rand(2)
    torch.manual_seed(3)
    lower_requested(a_task(model=lambda: nn.Sequential(nn.Dropout(), nn.Linear(6, 3))), AUTO).close()
    assert pretended[-1] == REWRITTEN and torch.equal(torch.rand(2), first)


def test_data_in_an_order_of_its_own_is_not_compiled_for(long, pretended) -> None:
    x, y = labelled()
    data = torch.utils.data.TensorDataset(x, y)
    weighted = torch.utils.data.WeightedRandomSampler(torch.ones(24), 24)
    loader = torch.utils.data.DataLoader(data, batch_size=5, sampler=weighted)
    said: list[str] = []
    lower_requested(a_task(data=loader, batch_size=None), AUTO, said.append)
    assert {plan.compile for plan in pretended} == {"none"}
    assert "auto goes on eagerly: its data has an order of its own" in said[0]


def raced_before(**figures: Any) -> Timing:
    given: dict[str, Any] = dict(ratio=2.0, ratio_low=1.9, ratio_high=2.1, verdict="faster", parity="bitwise")
    return Timing(name="compile=package", plan=Plan(compile="package").model_dump(), **given | figures)


LEFT_OUT: dict[str, Any] = dict(ratio_low=None, ratio_high=None, windows=4, verdict=None, parity=None, left_out=True)
UNDECIDED: dict[str, Any] = dict(ratio=1.07, ratio_low=0.9, ratio_high=1.2, verdict="no difference", parity=None)
BEFORE = {
    "too short then": (raced_before(), ""),
    "failed": (Timing(name="", plan=Plan(compile="package").model_dump(), failure="no luck"), "it failed before (no luck)"),
    "broken": (raced_before(parity="broken", parity_reason="NaN"), "it was found broken: NaN"),
    "slower": (raced_before(ratio=0.8, verdict="slower", parity=None), "it was raced before, and isn't faster"),
    "left out early": (raced_before(ratio=0.8, **LEFT_OUT), "it was raced before, and isn't faster"),
    "left out beside a faster one": (raced_before(ratio=1.5, **LEFT_OUT), ""),
    "faster, and not proven": (raced_before(parity=None), ""),
    "undecided": (raced_before(**UNDECIDED), ""),
    "undecided for long": (
        raced_before(windows=8, **UNDECIDED),
        "it was raced before for as long as a search races, and isn't clearly faster",
    ),
}  # fmt: skip


@pytest.mark.few("failed", "broken", "slower", "left out early", "undecided for long")
@pytest.mark.parametrize("name", BEFORE)
def test_what_was_found_before_is_not_tried_again(name: str, long, pretended, found) -> None:
    found(compile__package=2.0)
    before, why = BEFORE[name]
    said: list[str] = []
    lower_requested(a_task(), AUTO, said.append, memory=payoff.RaceHistory([before]))
    assert (Plan(compile="package") in pretended) is not bool(why)
    assert (f"auto leaves out compile=package: {why}" in said) is bool(why)


def test_what_was_raced_before_is_compiled_where_the_run_pays_for_its_proof() -> None:
    memory = payoff.RaceHistory([raced_before(parity=None)])
    why = {
        steps: memory.why_not_again(Plan(compile="package"), Plan(), TRUSTED_CLASSES, steps)
        for steps in (500, 501, None)
    }
    assert why == {500: "it was raced before, and its proof takes longer than it saves", 501: "", None: ""}
    looking = payoff.RaceHistory([raced_before(parity=None, step_ms=5.0, looking_ms=4.0)])  # of the baseline's 10 ms
    assert [
        bool(looking.why_not_again(Plan(compile="package"), Plan(), TRUSTED_CLASSES, steps)) for steps in (501, 2600)
    ] == [
        True,
        False,
    ]


@pytest.mark.more
def test_a_compiled_step_is_proven_and_remembered_and_begins_with_what_has_run_no_step(found, monkeypatch) -> None:
    """All but the times of the race is real: the compiler, the proof, and what is kept of them."""
    found(compile__package=2.0)
    monkeypatch.setattr(auto_search, "prove_programs", prove_programs)
    monkeypatch.setattr(payoff, "_COMPILE_TIME_FACTOR", 0.0)  # what a compilation takes doesn't count
    task, verdicts = a_task(epochs=10_000), list[Verdict]()
    program = lower_requested(task, AUTO, memory=payoff.RaceHistory(save_verdict=verdicts.append))
    assert program.parts.plan == Plan(compile="package")
    assert differing_paths(program.state(), hotloop.lower(task, Plan()).state()) == []
    [verdict] = verdicts
    timing = verdict.plan("compile=package")
    assert timing.parity in TRUSTED_CLASSES and timing.compile_s and timing.compile_warm_s is not None
    assert verdict.winner == "compile=package" and verdict.plan(verdict.baseline).plan == Plan().model_dump()


def test_what_can_t_be_timed_goes_on_eagerly_to_fail_in_training(long, pretended, monkeypatch) -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise ValueError("planted")
            return super().forward(x)

    said: list[str] = []
    lower_requested(a_task(model=lambda: Fails(6, 3)), AUTO, said.append)
    assert said[0].startswith("auto goes on eagerly: its steps couldn't be timed (ValueError: planted")


class Reader(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[:, None])[0][:, -1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_not_compiled(kind: type[nn.Module], long) -> None:
    task, said = a_task(model=lambda: Reader(kind(6, 4, batch_first=True))), list[str]()
    choices = list_options(task, CPU).choices
    assert {choice.plan.compile for choice in choices} == {"none"}
    assert any("compile=none: a captured step unrolls recurrent layers" in why for why in choices[0].why)
    assert lower_requested(task, AUTO, said.append).parts.plan.compile == "none"
    assert len([line for line in said if "recurrent layers" in line]) == 1
    assert list_options(task, Plan(device="cpu", compile="step")).choices[0].plan.compile == "step"  # asked for
