"""Batches that are views with gaps, as slices are: what is proven is the program that training runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotloop.data.batch_tree import copy_tree
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.parity.proof import prove_programs
from hotloop.plan import Plan
from tests.support.programs import a_task


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base[:, :-1],
        lambda base: base[:, 1:],
        lambda base: base.t(),
        lambda base: base[:1].expand(5, 6),
        lambda base: base[::2, ::3],
        lambda base: base[:, 2],
        lambda base: base[:0, 1:],
    ],
    ids=["cut", "cut in front", "turned", "expanded", "strided", "column", "empty"],
)
def test_a_copy_lies_as_the_original(view: Callable[[Tensor], Tensor]) -> None:
    base = torch.arange(30.0).reshape(5, 6)
    given = view(base)
    (copy,) = copy_tree((given,))
    assert torch.equal(copy, given) and (copy.stride() == given.stride() or not given.numel())
    base += 1
    assert not given.numel() or not torch.equal(copy, given)


class Cropped(torch.utils.data.Dataset):
    """Rows with more columns than are used."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        row = torch.randn(8, generator=torch.Generator().manual_seed(sample))
        return row, int(row[0] > 0)


def crop(images: Tensor, draws: Any) -> Tensor:
    return images[:, 1:-1]


def program() -> Program:
    task = a_task(data=Cropped(), model=lambda: nn.Linear(6, 2), augment=crop, epochs=3)
    return lower(task, Plan(device="cpu", compile="step"))


@pytest.mark.more
def test_the_compiled_program_is_what_is_proven() -> None:
    made = program()
    honest = prove_programs(made.parts.task, [made])[0]
    assert honest.parity in ("bitwise", "fp32-equivalent")
    assert made.compiled_steps is not None and made.compiled_steps > 16
    runner = made._step._runner  # type: ignore[attr-defined]
    made._step._runner = lambda flat: [1.01 * (outputs := runner(flat))[0], *outputs[1:]]  # type: ignore[attr-defined]
    planted = prove_programs(made.parts.task, [made])[0]
    assert planted.parity == "broken" and "loss" in planted.reason


@pytest.mark.more
def test_a_program_that_no_compared_step_takes_is_unproven() -> None:
    made = program()
    made._step._signature = ()  # type: ignore[attr-defined]
    found = prove_programs(made.parts.task, [made])[0]
    assert found.parity == "unproven" and "took its compiled program" in found.reason
