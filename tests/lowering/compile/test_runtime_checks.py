"""An index out of bounds in a late batch is the eager step's error under a compiled step too, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop
from hotloop.core.state import differing_paths
from hotloop.errors import DataError
from hotloop.lowering.compile.capture import CapturedStep
from hotloop.lowering.compile.runtime_checks import IndexBounds, IndexRange
from hotloop.lowering.program import Program
from hotloop.lowering.steps import compiled_step
from hotloop.plan import Plan
from tests.conftest import RunCli
from tests.lowering.failures.test_explanation import Loaded
from tests.support.programs import a_task, trained

# --- as users meet it

TOKENS = """
import torch
from torch import nn
import hotloop

class Tokens:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        words = torch.full((64,), index)
        words[7] = 100 if index == 50 else index
        return words, words.clamp(max=99)

def task():
    return hotloop.Task(
        model=lambda: nn.Sequential(nn.Embedding(100, 128), nn.Linear(128, 100)),
        loss=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=Tokens(),
        batch_size=16,
        shuffle=False,
        epochs=1,
    )
"""


@pytest.mark.more
def test_a_token_beyond_the_vocabulary_ends_training_in_one_line_and_not_the_process(
    run_cli: RunCli, tmp_path: Path
) -> None:
    """What a kernel on two threads throws would be `std::terminate`."""
    (tmp_path / "tokens.py").write_text(TOKENS)
    axes = ("--set", "compile=package", "--set", "threads=2", "--set", "residency=stream")
    done = run_cli("train", "tokens.py", "--run", "run", *axes)
    assert done.returncode == 1
    assert "step 4 (epoch 1, batch 4): an index is out of range in '0' (Embedding), which has 100 rows" in done.stderr
    assert "frame #" not in done.stderr


@pytest.mark.few("compile=forward")
@pytest.mark.parametrize("plan", [Plan(compile="package"), Plan(compile="forward")], ids=Plan.brief)
def test_a_label_out_of_range_is_named_with_its_sample(plan: Plan, tmp_path: Path) -> None:
    data = Loaded(lambda index, x, y: (x, y if index != 18 else torch.tensor(3)))
    with pytest.raises(DataError, match=r"step 4 .* has label 3 in sample 18, but the model has 3 outputs"):
        trained(a_task(data=data, shuffle=False), tmp_path / "run", plan=plan)


class Tenths(nn.Module):
    """Indices that come of floats, at which nobody looks before."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 10).round().long()


@pytest.mark.more
def test_what_a_program_stumbles_over_is_told_as_the_eager_step_tells_it(tmp_path: Path) -> None:
    model = lambda: nn.Sequential(Tenths(), nn.Embedding(17, 2), nn.Flatten(), nn.Linear(12, 3))  # noqa: E731
    data = Loaded(lambda index, x, y: (x * 0 + index / 10, y))
    task = a_task(model=model, data=data, shuffle=False)
    with pytest.raises(DataError, match=r"step 4 .* out of range in '1' \(Embedding\), which has 17 rows"):
        trained(task, tmp_path / "run", plan=Plan(compile="package", threads=1))


# --- whatever is indexed


class Given(nn.Module):
    """A function of a weight (7, 4) and the inputs, and a linear layer."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function, self.last = nn.Parameter(torch.randn(7, 4)), function, nn.Linear(4, 3)
        self.register_buffer("offsets", torch.tensor([0, 4]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.weight, x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """A function of a weight and indices (batch, 2), and indices in a batch that are out of bounds."""

    function: Callable[[Any, Tensor], Tensor]
    wrong: int = 7
    right: int = 6


CASES = {
    "embedding": Case(lambda weight, x: F.embedding(x, weight).mean(1)),
    "a negative index of an embedding": Case(lambda weight, x: F.embedding(x, weight).mean(1), wrong=-1),
    "a bag": Case(lambda weight, x: F.embedding_bag(x, weight)),
    "gather": Case(lambda weight, x: weight[:, :1].expand(7, 4).gather(0, x.repeat(1, 2))),
    "rows": Case(lambda weight, x: weight[x].mean(1)),
    "rows from the end": Case(lambda weight, x: weight[x].mean(1), wrong=-8, right=-7),
    "index_select": Case(lambda weight, x: weight.index_select(0, x[:, 1])),
    "a slice of what is arranged": Case(lambda weight, x: weight[x.T.contiguous()[1]]),
    "what is computed of it": Case(
        lambda weight, x: F.embedding(x[:, 1:] - torch.tensor([1]), weight).mean(1), wrong=8
    ),
    "int32": Case(lambda weight, x: F.embedding(x.int(), weight).mean(1)),
}


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(captured: CapturedStep, *others: Any) -> Callable[[list[Tensor]], Any]:
        return lambda flat: captured.graph(*flat)

    monkeypatch.setattr(compiled_step, "_compile", run)


def batch(value: int) -> tuple[Tensor, Tensor]:
    x = torch.ones(5, 2, dtype=torch.int64)
    x[3, 1] = value
    return x, torch.tensor([0, 1, 2, 0, 1])


def looks(program: Program) -> IndexBounds:
    step: Any = program._step
    return step._indices  # type: ignore[no-any-return]


def lowered(function: Any) -> tuple[Program, list[int]]:
    program = hotloop.lower(a_task(model=lambda: Given(function), data=batch(1)), Plan(compile="step"))
    eager: list[int] = []
    step: Any = program._step
    run = step._run_eagerly
    step._run_eagerly = lambda *given: (eager.append(given[-1]), run(*given))[1]
    program.step(batch(1))
    return program, eager


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("uncompiled")
def test_what_a_batch_indexes_is_looked_at_before_the_program_runs(name: str) -> None:
    case = CASES[name]
    program, eager = lowered(case.function)
    program.step(batch(case.right))
    before = program.state()
    assert not eager
    with pytest.raises((IndexError, RuntimeError)):
        program.step(batch(case.wrong))
    assert eager == [2]
    assert differing_paths(program.state(), before) == []
    program.step(batch(case.right))
    assert eager == [2]


@pytest.mark.parametrize("label", [3, -1])
@pytest.mark.usefixtures("uncompiled")
def test_labels_are_indices_and_those_that_are_left_out_are_none(label: int) -> None:
    program, eager = lowered(lambda weight, x: weight[x].mean(1))
    x, y = batch(1)
    program.step((x, torch.where(torch.arange(5) == 2, -100, y)))
    program.step((x, torch.full((5,), -100)))
    assert not eager
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        program.step((x, torch.where(torch.arange(5) == 2, label, y)))
    assert eager == [3]


@pytest.mark.usefixtures("uncompiled")
def test_an_index_that_is_drawn_or_comes_of_weights_is_not_computed_twice() -> None:
    def function(weight: Tensor, x: Tensor) -> Tensor:
        drawn = torch.randint(0, 7, x.shape) + 0 * x
        return weight[drawn].mean(1) + weight[(weight.argmax(0)[:2] + 0 * x)].mean(1)

    program, _ = lowered(function)
    plain = hotloop.lower(program.parts.task)
    plain.step(batch(1))
    torch.testing.assert_close(program.state().parameters, plain.state().parameters)
    assert looks(program)._bounds == [IndexRange(3, ignored=-100)]  # of the labels


def shifted(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The usual input of a decoder: a first token, and the others one place later."""

    def function(weight: Tensor, x: Tensor) -> Tensor:
        moved = make(x)
        moved[:, 0] = 2
        moved[:, 1:] = x[:, :-1]
        return F.embedding(moved, weight).mean(1)

    return function


def padded(weight: Tensor, x: Tensor) -> Tensor:
    tokens = x.clone()
    first, _ = tokens.split(1, 1)
    first.clamp_(min=0)
    return F.embedding(tokens, weight).mean(1)


WRITTEN = {
    "empty": shifted(torch.empty_like),
    "impossible before": shifted(lambda x: torch.full_like(x, -1)),
    "possible before": shifted(torch.zeros_like),
    "a piece of a copy": padded,
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.usefixtures("uncompiled")
def test_what_is_written_over_after_it_was_made_is_not_taken_for_what_it_was(name: str) -> None:
    program, eager = lowered(WRITTEN[name])
    program.step(batch(6))
    x = torch.full((5, 2), -1) if name == "a piece of a copy" else batch(6)[0]
    x[:, 1] = 1
    program.step((x, batch(1)[1]))
    assert not eager
    assert looks(program)._bounds == [IndexRange(3, ignored=-100)]  # of the labels


@pytest.mark.usefixtures("uncompiled")
def test_a_look_into_what_was_drawn_in_another_order_is_left_out() -> None:
    def function(weight: Tensor, x: Tensor) -> Tensor:
        noise = torch.rand_like(weight.t())
        return weight[x].mean(1) + 0 * noise.gather(1, x.t().repeat(2, 1)[:4]).sum()

    program, eager = lowered(function)
    program.step(batch(6))
    assert not eager
