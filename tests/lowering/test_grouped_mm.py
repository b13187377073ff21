"""Mixtures of experts, whose rows go to a matrix each: captured, compiled and proven, though torch's own parts don't know how."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import hotloop
from hotloop.errors import PlanError
from hotloop.lowering import grouped_mm
from hotloop.lowering.grouped_mm import multiply_groups, traceable_groups
from hotloop.lowering.pipeline.graph_split import LossModule, TracedForward
from hotloop.lowering.pipeline.piece_costs import infer_piece_shapes
from hotloop.parity.proof import prove
from hotloop.plan import Plan
from hotloop.profiler.operator_cost import count_operator
from tests.support.programs import a_task, advance, labelled, state_after

STEP, PACKAGE = Plan(compile="step"), Plan(compile="package")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


ENDS = torch.tensor([8, 8, 20, 32], dtype=torch.int32)
FORMS = {
    "rows": (drawn(32, 16), drawn(4, 24, 16).mT, ENDS),
    "rows, of a width that is no multiple of 16 bytes": (drawn(32, 16), drawn(4, 7, 16).mT, ENDS),
    "columns": (drawn(4, 24, 16), drawn(32, 16).mT, ENDS),
    "terms": (drawn(32, 16).mT, drawn(32, 24), ENDS),
    "terms, of a width that is no multiple of 16 bytes": (drawn(32, 16).mT, drawn(32, 8)[:, :7], ENDS),
    "stacks": (drawn(4, 24, 16), drawn(4, 16, 8), None),
}
"""One group of each has nothing in it."""


@pytest.mark.parametrize("form", FORMS)
def test_products_by_groups_are_torchs(form: str) -> None:
    left, right, ends = FORMS[form]
    expected = torch._grouped_mm(left, right, offs=ends)
    torch.testing.assert_close(multiply_groups(left, right, ends), expected)
    wide = multiply_groups(left.double(), right.double(), ends)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_without_content_they_have_the_shape_and_strides_that_they_have_with_it(form: str, dtype: torch.dtype) -> None:
    left, right, ends = FORMS[form]
    left, right = (torch.empty_strided(one.shape, one.stride(), dtype=dtype).copy_(one) for one in (left, right))
    expected = torch._grouped_mm(left, right, offs=ends)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, traceable_groups():
        given = [None if one is None else mode.from_tensor(one) for one in (left, right, ends)]
        found = torch._grouped_mm(*given[:2], offs=given[2])  # type: ignore[arg-type]
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_torch_is_as_it_was_afterwards() -> None:
    from torch import _meta_registrations

    before = _meta_registrations._meta_grouped_mm_common
    with pytest.raises(ValueError), traceable_groups():
        raise ValueError
    assert _meta_registrations._meta_grouped_mm_common is before


class Experts(nn.Module):
    """Each row goes to the two of four experts that it has most of, in the order of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.into = nn.Linear(6, 8)
        self.experts = nn.Parameter(0.3 * torch.randn(4, 12, 8))
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).softmax(1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        rows = self.into(x).repeat_interleave(2, 0)[order]
        ends = F.one_hot(chosen.flatten(), 4).sum(0).cumsum(0).int()
        made = F.grouped_mm(rows, self.experts.mT, offs=ends).relu()
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        mixed = (made[back] * shares.flatten()[:, None]).unflatten(0, (-1, 2)).sum(1)
        return self.out(mixed)  # type: ignore[no-any-return]


def experts() -> hotloop.Task:
    return a_task(model=Experts, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01), batch_size=8)


@pytest.mark.more
@pytest.mark.parametrize("plan", [pytest.param(STEP, marks=pytest.mark.more), PACKAGE], ids=Plan.brief)
def test_a_mixture_of_experts_is_compiled_and_proven(plan: Plan) -> None:
    found = prove(experts(), plan)
    assert found.parity in ("fp32-equivalent", "bitwise"), found.reason
    program = hotloop.lower(experts(), plan)
    advance(program, 5)
    assert program.compiled_steps
    torch.testing.assert_close(program.state().parameters, state_after(experts(), 5).parameters)


@pytest.mark.more
def test_a_truth_with_the_wrong_experts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(left: Tensor, right: Tensor, **how: Tensor) -> Tensor:
        return multiply_groups(left, right.flip(0) if right.ndim == 3 else right, **how)

    monkeypatch.setattr(grouped_mm, "multiply_groups", turned)
    assert prove(experts(), STEP).parity not in ("fp32-equivalent", "bitwise")


class Sorted(nn.Module):
    """Rows of two kinds, as many of each as there are, go to a layer each: with neither torch's product nor fixed sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor) -> Tensor:
        kind = (x[:, 0] > 0).long()
        order = kind.argsort(stable=True)
        parts = x[order].split(F.one_hot(kind, 2).sum(0).tolist())
        made = torch.cat([layer(part) for layer, part in zip(self.layers, parts, strict=True)])
        return torch.zeros_like(made).index_copy(0, order, made)


@pytest.mark.more
@pytest.mark.parametrize("plan", [pytest.param(STEP, marks=pytest.mark.more), PACKAGE], ids=Plan.brief)
def test_sizes_may_depend_on_the_batch(plan: Plan) -> None:
    task = a_task(model=Sorted)
    assert prove(task, plan).parity in ("fp32-equivalent", "bitwise")
    program = hotloop.lower(task, plan)
    advance(program, 8)
    assert program.compiled_steps == 8 - 1  # the last one of an epoch is incomplete


def test_what_has_no_size_of_its_own_is_not_rewritten() -> None:
    with pytest.raises(PlanError, match="changes nothing in this step"):
        hotloop.lower(a_task(model=Sorted), STEP.with_axes(rewrites="mm_by_onednn"))


def test_a_mixture_of_experts_accumulates() -> None:
    program = hotloop.lower(experts(), Plan(accumulation=2))
    advance(program, 4)
    torch.testing.assert_close(program.state().parameters, state_after(experts(), 4).parameters)


def test_one_can_be_split_by_layers() -> None:
    task = experts()
    batch = tuple(part[:8] for part in labelled())
    traced = TracedForward.from_task(LossModule(task.build_model(), task, batch), batch)
    pieces = traced.split([traced.cut_points()["into"], traced.cut_points()["out"]])
    found = infer_piece_shapes(pieces, batch, torch.device("cpu"), nullcontext)
    assert len(found) == 3 and found[2].leaving[0].shape == ()


def test_each_row_is_counted_once() -> None:
    """And of terms in groups, each term; of stacks each matrix."""
    float32 = ["float32", "float32", "int32"]
    rows = count_operator("aten::_grouped_mm", [[32, 16], [4, 16, 12], [4]], float32)
    columns = count_operator("aten::_grouped_mm", [[4, 12, 16], [16, 32], [4]], float32)
    terms = count_operator("aten::_grouped_mm", [[16, 32], [32, 12], [4]], float32)
    stacks = count_operator("aten::_grouped_mm", [[4, 12, 16], [4, 16, 8], []], ["float32", "float32", ""])
    assert rows is not None and columns is not None and terms is not None and stacks is not None
    assert rows.flops == columns.flops == terms.flops == 2 * 32 * 16 * 12
    assert stacks.flops == 4 * 2 * 12 * 16 * 8
    assert terms.bytes == 4 * (16 * 32 + 32 * 12 + 4 + 4 * 16 * 12)
