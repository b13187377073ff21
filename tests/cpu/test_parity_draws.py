"""Plans that draw random numbers for each piece of a batch: trusted where these are as good as the baseline's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hotloop
from hotloop.lowering import Program, lower
from hotloop.parity import prove, prove_programs
from hotloop.parity.draws import Pieces, look
from hotloop.plan import Plan
from hotloop.verdicts import Parity
from tests.cpu.families import family
from tests.cpu.more_families import another_family
from tests.cpu.programs import a_task

HALVES = Plan(accumulation=2)
P = 0.4


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Dropping(nn.Module):
    """Drops along two paths, one of them with its dimensions turned; `p`, `noise` and `keep` are there to be spoilt."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 32), nn.Linear(8, 8), nn.Linear(32, 3)
        self.p, self.noise = P, 0.1

    def forward(self, x: Tensor) -> Tensor:
        turned = self.middle(self.first(x).view(-1, 4, 8).transpose(0, 1)).transpose(0, 1)
        hidden = F.dropout(turned, self.p, self.training).flatten(1)
        return self.last(hidden + self.noise * torch.randn_like(hidden))  # type: ignore[no-any-return]


def dropping() -> hotloop.Task:
    return a_task(model=Dropping, epochs=9)


@pytest.mark.parametrize(
    ("task", "plans"),
    [
        (family("vae"), [HALVES, Plan(accumulation=3), Plan(optimizer="fused")]),
        (another_family("encoder"), [HALVES, Plan(accumulation=3, optimizer="foreach")]),
        (dropping(), [HALVES, Plan(accumulation=4), Plan(accumulation=2, compile="step")]),
    ],
    ids=["vae", "transformer", "dropping"],
)
def test_honest_pieces_are_trusted_though_their_draws_are_others(task: hotloop.Task, plans: list[Plan]) -> None:
    for plan, found in zip(plans, prove_programs(task, [lower(task, plan) for plan in plans]), strict=True):
        in_pieces = plan.accumulation > 1
        assert found.parity == "fp32-equivalent" if in_pieces else found.parity in ("fp32-equivalent", "bitwise")
        assert ("for each piece of a batch" in found.reason) == in_pieces
        assert found.states >= 16 and found.free_steps >= 5


def with_another_rate(program: Program) -> None:
    program.model.p = 0.5  # type: ignore[assignment]


def with_another_scale(program: Program) -> None:
    program.model.noise = 0.11  # type: ignore[assignment]


def with_masks_of_the_first_piece(program: Program) -> None:
    """Each piece draws what the first one did."""
    parts = program._step.parts
    compute = parts.compute

    def repeated(model: nn.Module, batch: Any) -> Any:
        if program.model.training:
            torch.manual_seed(program.position.step)
        return compute(model, batch)

    program._step.parts = type(parts)(**{**vars(parts), "compute": repeated})


def with_the_same_masks_at_each_step(program: Program) -> None:
    seed = program._step.draws.seed
    program._step.draws.seed = lambda step: seed(0)  # type: ignore[method-assign]


PLANTS = [with_another_rate, with_another_scale, with_masks_of_the_first_piece, with_the_same_masks_at_each_step]


@pytest.fixture(scope="module")
def planted(one_thread: None) -> dict[str, Parity]:
    task = dropping()
    programs = [lower(task, HALVES) for _ in [*PLANTS, None]]
    for program, plant in zip(programs, PLANTS, strict=False):
        plant(program)
    *found, honest = prove_programs(task, programs)
    assert honest.parity == "fp32-equivalent", honest.reason
    return {plant.__name__: parity for plant, parity in zip(PLANTS, found, strict=True)}


@pytest.mark.parametrize("plant", [plant.__name__ for plant in PLANTS])
def test_a_planted_fault_in_the_draws_is_broken(planted: dict[str, Parity], plant: str) -> None:
    assert planted[plant].parity == "broken", planted[plant].reason


# ---------------------------------------------------------------- the draws by themselves


def drawn(spoil: Callable[[Pieces], None] = lambda pieces: None, steps: int = 16) -> Pieces:
    """What two pieces of 16 samples draw in so many steps."""
    program = lower(dropping(), Plan())
    seen = look(program)
    assert len(seen.places) == 2 and not seen.odd
    pieces = Pieces(program.device, 2, seen.places)
    spoil(pieces)
    torch.manual_seed(1)
    for step in range(steps):
        list(pieces.drawn(step, 32))
    return pieces


def spoilt(make: Callable[[Tensor, int], Tensor]) -> Callable[[Pieces], None]:
    """Changes what the first draw of a piece comes to; gets how often it has been drawn before."""

    def spoil(pieces: Pieces) -> None:
        first, *others = pieces.places
        draw, count = first.drawing.draw, [0]

        def changed(shape: tuple[int, ...], order: Any = None) -> Tensor:
            count[0] += 1
            return make(draw(shape, order), count[0] - 1) if shape[0] == 16 else draw(shape, order)

        pieces.places = (replace(first, drawing=replace(first.drawing, draw=changed)), *others)

    return spoil


def like_the_piece_before() -> Callable[[Tensor, int], Tensor]:
    last: list[Tensor] = []

    def make(value: Tensor, count: int) -> Tensor:
        last[:] = [value] if count % 2 == 0 else last
        return last[0].clone()

    return make


def like_the_step_before() -> Callable[[Tensor, int], Tensor]:
    last: list[Tensor] = []

    def make(value: Tensor, count: int) -> Tensor:
        if len(last) < 2:
            last.append(value)
        return last[count % 2].clone()

    return make


def test_draws_of_pieces_are_as_they_should_be() -> None:
    assert drawn().wrong() is None


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoilt(lambda value, count: torch.empty_like(value).bernoulli_(0.5)), "another rate or scale in piece 1"),
        (spoilt(lambda value, count: value * 1.1), "another rate or scale in piece 1"),
        (spoilt(like_the_piece_before()), "of piece 2 depends on that of the first piece"),
        (spoilt(like_the_step_before()), "of piece 1 depends on that of the step before"),
    ],
    ids=["rate", "scale", "pieces", "steps"],
)
def test_draws_that_are_wrong_in_themselves_are_named(spoil: Callable[[Pieces], None], says: str) -> None:
    wrong = drawn(spoil).wrong()
    assert wrong is not None and wrong.startswith("draw 1 of a piece (bernoulli_)") and says in wrong


# ---------------------------------------------------------------- what can't be put together


class Shaken(nn.Linear):
    """Noise on its weights, once for a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + 0.01 * torch.randn_like(self.weight), self.bias)


def test_what_is_drawn_once_for_a_batch_is_unproven() -> None:
    found = prove(a_task(model=lambda: Shaken(6, 3), epochs=9), HALVES)
    assert found.parity == "unproven"
    assert "drawn once for a batch is drawn once for each piece" in found.reason


class Recomputed(nn.Module):
    """Draws again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda h: F.dropout(F.relu(self.first(h)), 0.3), x, use_reentrant=False)
        return self.last(hidden)  # type: ignore[no-any-return]


class Otherwise(nn.Module):
    """Drops more where gradients are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x, 0.3 if torch.is_grad_enabled() else 0.2))  # type: ignore[no-any-return]


class Growing(nn.Module):
    """Drops more from step to step."""

    def __init__(self, begin: float) -> None:
        super().__init__()
        self.layer, self.p = nn.Linear(6, 3), begin

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.p = min(0.5, self.p + 0.01)
        return self.layer(F.dropout(x, self.p)) if self.p else self.layer(x)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """Draws from NumPy's generator as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x, 0.3)) + 0.0 * float(np.random.beta(2, 2))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Recomputed, "more often than a first look has shown"),
        (Otherwise, "bernoulli_ draws otherwise than a first look has shown"),
        (lambda: Growing(0.0), ""),
        (Mixed, "Python's or NumPy's generator"),
    ],
    ids=["recomputed", "otherwise", "growing from nothing", "mixed"],
)
def test_what_cannot_be_put_together_is_unproven_and_not_broken(model: Callable[[], nn.Module], says: str) -> None:
    found = prove(a_task(model=model, epochs=9), HALVES)
    assert found.parity == "unproven", found.reason
    assert says in found.reason
