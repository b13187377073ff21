"""A ReLU that a plan switches by rounding more than a nudge does is no fault; one that nothing harmless switches is."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotloop.core.records.race import STATES, Parity
from hotloop.lowering.build import lower
from hotloop.parity import free_run, proof, references, step_collector
from hotloop.parity.free_run import STEPS
from hotloop.parity.proof import prove_programs
from hotloop.parity.references import Float64Reference, rounding_error
from hotloop.parity.step_collector import StepCollector
from hotloop.plan import Plan
from hotloop.task import Task
from tests.support.programs import a_task, seeing

pytestmark = pytest.mark.usefixtures("one_thread")

ULP = torch.finfo(torch.float32).eps


class Gated(nn.Module):
    """Lets more through where one number is larger than another, by some units in the last place.

    Attributes:
        at: the calls of each proof in which the difference comes out smaller by `off` units.
    """

    PROOF = STATES + 1 + STEPS

    def __init__(self, units: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.left, self.right = nn.Parameter(torch.tensor([1.0 + units * ULP])), nn.Parameter(torch.ones(1))
        self.at: Collection[int] = ()
        self.off, self.calls = 0, count()

    def forward(self, x: Tensor) -> Tensor:
        off = self.off * ULP if next(self.calls) % self.PROOF in self.at else 0.0
        gate = (self.left.detach() - self.right.detach() - off > 0).to(x.dtype)
        return self.layer(x) * (1 + 0.05 * gate)  # type: ignore[no-any-return]


def proven(units: int, off: int, *calls: int, model: type[Gated] = Gated) -> Parity:
    task = a_task(model=lambda: model(units), epochs=9)
    program = lower(task, Plan(optimizer="foreach"))
    program.model.at, program.model.off, program.model.calls = calls, off, count()  # type: ignore[assignment]
    return prove_programs(task, [program])[0]


CALLS = pytest.mark.parametrize("call", [6, STATES + 3], ids=["a single step", "the free run"])


@pytest.mark.more
@pytest.mark.few("*single*")
@CALLS
def test_what_rounding_may_switch_is_told_from_a_fault(call: int) -> None:
    found = proven(4, 6, call)
    assert found.parity == "fp32-equivalent", found.reason
    assert proven(2000, 2001, call).parity == "broken"


@pytest.mark.more
@CALLS
def test_nudges_of_the_usual_size_miss_it(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_collector, "FARTHER", 1.0)
    monkeypatch.setattr(free_run, "FARTHER", 1.0)
    assert proven(4, 6, call).parity == "broken"


def rounds_of(monkeypatch: pytest.MonkeyPatch) -> list[Float64Reference]:
    """One for each round of the proofs that follow."""
    truths: list[Float64Reference] = []

    def noted(task: Task, device: torch.device) -> Float64Reference:
        truths.append(Float64Reference(task, device))
        return truths[-1]

    monkeypatch.setattr(proof, "Float64Reference", noted)
    return truths


@pytest.mark.few("a switch")
@pytest.mark.parametrize(("units", "rounds"), [(4, 1), (2000, 2)], ids=["a switch", "a fault"])
def test_a_single_state_is_looked_at_closer_before_all_is_proven_again(
    units: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside all baselines a proof takes as long again and more."""
    counted = rounds_of(monkeypatch)
    proven(units, units + 2, 6)
    assert len(counted) == rounds


@pytest.mark.more
def test_so_is_each_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = rounds_of(monkeypatch)
    found = proven(4, 6, *range(2, STATES // 2 + 1))
    assert (found.parity, len(counted)) == ("fp32-equivalent", 1), found.reason


@pytest.mark.more
def test_what_is_off_at_most_states_is_a_fault_though_nudges_explain_each() -> None:
    """Rounding switches it the one way and the other; a plan that always does is another one."""
    assert proven(4, 6, *range(2, STATES)).parity == "broken"


@pytest.mark.more
def test_states_at_which_nothing_explains_it_are_soon_looked_at_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    closer = StepCollector._take_closer_look

    def noted(self: StepCollector, *given: Any) -> None:
        looked.append(len(self.evidence.steps))
        closer(self, *given)

    monkeypatch.setattr(StepCollector, "_take_closer_look", noted)
    assert proven(2000, 2001, *range(2, STATES)).parity == "broken"
    assert len(looked) <= 2 * step_collector._MAX_FRUITLESS < 2 * (STATES - 2)


class Picky(Gated):
    """Fails where its numbers were changed."""

    def forward(self, x: Tensor) -> Tensor:
        if self.right.item() != 1:
            raise ValueError("somebody has changed my number")
        return super().forward(x)


@pytest.mark.more
@CALLS
def test_a_nudge_that_is_not_harmless_excuses_nothing(call: int) -> None:
    found = proven(4, 6, call, model=Picky)
    assert found.parity == "broken" and "somebody" not in found.reason


def test_an_error_that_only_grows_with_the_nudge_is_none_of_rounding() -> None:
    assert rounding_error(8e-6, near=1e-6) == pytest.approx(1e-6)
    assert rounding_error(5e-5, near=1e-6) == pytest.approx(5e-5 / 8)
    assert rounding_error(1e-3, near=1e-6) == 1e-3


class Normed(nn.Module):
    """Images that are normalised over the batch, far from zero, so that their mean is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(16 if n else 1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
                for n in range(3)
            )
        )
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.convs(x + 30).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "few"),
    [(Normed, ["channels last", "without oneDNN"]), (lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 4)), [])],
    ids=["normed images", "others"],
)
def test_few_baselines_are_more_where_images_are_normalised(model: Callable[[], nn.Module], few: list[str]) -> None:
    names = [one.name for one in references.baseline_references(seeing(model), "cpu", few=True)]
    assert names == ["eager", "nudged", *few]
    every = [one.name for one in references.baseline_references(seeing(model), "cpu", few=False)]
    assert len(every) == len(set(every)) and set(names) < set(every)


@pytest.mark.more
@pytest.mark.parametrize(("known", "rounds"), [(True, 1), (False, 2)], ids=["few of them", "all of them"])
def test_means_over_images_with_channels_last_are_among_the_first_baselines(
    known: bool, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = rounds_of(monkeypatch)
    if not known:
        monkeypatch.setattr(references, "has_batch_normalization", lambda model: False)
    found = proof.prove(seeing(Normed), Plan(layout="channels_last"))
    assert (found.parity, len(counted)) == ("fp32-equivalent", rounds), found.reason
