"""Steps that draw from Python's and NumPy's generators: never, always, or only after a while."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import DataLoader

import hotloop
from hotloop.core.random.rng import StepSeeds
from hotloop.lowering.compile.compiled_rng import has_no_draws
from hotloop.lowering.steps import compiled_step
from hotloop.plan import Plan
from tests.support.killed_training import Killed, at_step, events, kill
from tests.support.processes.resumed_training import disagreements
from tests.support.programs import a_task, labelled

FROM = {"never": 10**9, "always": 0, "late": 25}


class Drawing(nn.Module):
    """Scales its output by draws of one library, from one step on; the number of the step is a buffer."""

    def __init__(self, draw: str, first: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.draw, self.first = draw, first
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.training:
            self.steps += 1
            if int(self.steps) > self.first:
                x = x * (1 + (random.random() if self.draw == "python" else float(np.random.standard_normal())))
        return x


def drawing(draw: str, when: str, **options: Any) -> hotloop.Task:
    return a_task(model=lambda: Drawing(draw, FROM[when]), epochs=12, **options)


def fitted(task: hotloop.Task, path: Path, *, until: int | None = None, **options: Any) -> None:
    """Trains with spans of their own length, or goes on; killed after step `until`."""
    callbacks = [at_step(until, kill)] if until else []
    try:
        options = {"checkpoint_every": "10"} | options
        hotloop.fit(task, run=path, resume=path.exists(), device="cpu", progress=False, callbacks=callbacks, **options)
    except Killed:
        return


@pytest.mark.few("always-python")
@pytest.mark.parametrize("draw", ["python", "numpy"])
@pytest.mark.parametrize("when", FROM)
def test_the_result_is_that_of_seeding_both_generators_before_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: str, when: str
) -> None:
    fitted(drawing(draw, when), tmp_path / "run")
    seed = StepSeeds.seed
    with monkeypatch.context() as patch:
        patch.setattr(StepSeeds, "seed", lambda self, step: (self.begin_span(), seed(self, step)))
        fitted(drawing(draw, when), tmp_path / "seeded")
    assert disagreements(tmp_path / "seeded", tmp_path / "run") == []
    assert events(tmp_path / "run", "resume") == []


@pytest.mark.few("python-20", "numpy-40")
@pytest.mark.parametrize("until", [20, 40])
@pytest.mark.parametrize("draw", ["python", "numpy"])
def test_killed_before_or_after_the_first_draw_it_ends_the_same(tmp_path: Path, draw: str, until: int) -> None:
    fitted(drawing(draw, "late"), tmp_path / "whole")
    fitted(drawing(draw, "late"), tmp_path / "run", until=until)
    fitted(drawing(draw, "late"), tmp_path / "run")
    assert disagreements(tmp_path / "whole", tmp_path / "run") == []


def test_draws_that_are_not_noticed_would_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that reading the generators' marks after each step guards against."""
    fitted(drawing("python", "late"), tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(StepSeeds, "note", lambda self: None)
        fitted(drawing("python", "late"), tmp_path / "blind")
    assert disagreements(tmp_path / "run", tmp_path / "blind") != []


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0, 1),
        np.random.rand,
        np.random.standard_normal,
        lambda: np.random.rand(312),  # as many words as the generator holds
        lambda: random.getrandbits(624 * 32),
        lambda: random.seed(1),
        lambda: np.random.seed(1),
    ],
)
def test_any_draw_is_noticed(draw: Any) -> None:
    draws = StepSeeds(3)
    draws.seed(7)
    draws.note()
    assert not draws.drawn
    draw()
    draws.note()
    assert draws.drawn


def test_another_generator_in_numpys_place_is_seeded_at_each_step() -> None:
    draws, before = StepSeeds(3), np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.MT19937(5))
        draws.seed(7)
        assert draws.always
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("how", ["samples", "augment", "loader"])
def test_data_that_reseed_in_this_process_are_no_draw_of_the_step(tmp_path: Path, how: str) -> None:
    x, y = labelled()
    samples = list(zip(x, y, strict=True))
    fields: dict[str, Any] = {
        "samples": {"data": samples},
        "augment": {"augment": lambda inputs, draws: inputs + 0.1 * random.random()},
        "loader": {"data": DataLoader(samples, sampler=range(len(x)), batch_size=5)},
    }[how]
    fitted(a_task(epochs=12, **fields), tmp_path / "run")
    assert events(tmp_path / "run", "resume") == []


MAY_DRAW: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({}, False),
    "dropout": ({"model": lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))}, True),
    "a schedule": ({"schedule": lambda of, steps: torch.optim.lr_scheduler.LambdaLR(of, lambda epoch: 1.0)}, True),
    "a weight": ({"weight": lambda batch: len(batch[0])}, True),
}


@pytest.mark.parametrize("name", MAY_DRAW)
def test_a_compiled_step_that_draws_nothing_leaves_torchs_generator_alone(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(compiled_step, "_compile", lambda captured, *others: lambda flat: captured.graph(*flat))
    fields, draws = MAY_DRAW[name]
    program = hotloop.lower(a_task(**fields), Plan(compile="step"))
    program.advance(1)  # eagerly, for the optimizer's state
    before = torch.get_rng_state()
    program.advance(2)
    assert program.compiled_steps
    assert torch.equal(before, torch.get_rng_state()) == (not draws)
    program.seed_all()
    program.advance(1)
    assert not torch.equal(before, torch.get_rng_state())


def test_an_operation_that_is_not_torchs_own_may_draw() -> None:
    noisy = torch.library.custom_op(
        "hotloop_tests::noisy", lambda x: x + torch.rand(()), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    noisy.register_fake(torch.empty_like)
    assert has_no_draws(make_fx(torch.sin)(torch.ones(2)))
    assert not has_no_draws(make_fx(noisy)(torch.ones(2)))
