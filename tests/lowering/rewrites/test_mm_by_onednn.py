"""`mm_by_onednn`: products of fp32 matrices by oneDNN, in compiled steps."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch
from torch._inductor import config as inductor

import hotloop
from hotloop.core.hardware.probe import probe_hardware
from hotloop.core.records.race import TRUSTED_CLASSES
from hotloop.errors import PlanError
from hotloop.lowering.build import lower
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.rewrites import mm_by_onednn
from hotloop.lowering.rewrites.fx_nodes import replace_product
from hotloop.lowering.task_facts import task_facts
from hotloop.parity.proof import prove
from hotloop.plan import Plan
from hotloop.tuning import candidates, step_profile
from tests.lowering.compile.test_optimizer_scalars import uncompiled  # noqa: F401  a fixture
from tests.support.programs import advance

WIDTH = 128


class Several(nn.Module):
    """Products of several kinds: with and without bias, by a transposed matrix, by a part of one, of a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.plain = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.free = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.plain(self.first(x).relu())
        alike = x.t() @ x / len(x)
        shifted = (x @ self.free[:, WIDTH:]).mean()  # its gradient is one number everywhere, without a place of its own
        return self.out(x @ self.free[:, :WIDTH] + x @ alike) + shifted


def task(model: Callable[[], nn.Module] = Several, **fields: Any) -> hotloop.Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(640, WIDTH, generator=generator)
    given: dict[str, Any] = dict(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-3),
        data=(x, x[:, :3].argmax(1)),
        batch_size=128,
        epochs=8,
    )
    return hotloop.Task(**(given | fields))


NAMED = Plan(device="cpu", compile="step", rewrites="mm_by_onednn")


def assert_trains_as_eagerly(given: hotloop.Task, said: list[str]) -> None:
    rewritten, eager = lower(given, NAMED, said.append), lower(given, Plan(device="cpu"))
    for program in (rewritten, eager):
        advance(program, 3)
    torch.testing.assert_close(rewritten.state().parameters, eager.state().parameters, rtol=1e-5, atol=1e-5)


@pytest.mark.more
@pytest.mark.usefixtures("uncompiled")
def test_products_of_all_kinds_are_found_and_come_to_the_same() -> None:
    """Six forward and eleven backward; the last layer's are small."""
    said: list[str] = []
    assert_trains_as_eagerly(task(), said)
    assert "rewrote the step: mm_by_onednn 17" in said


@pytest.mark.more
def test_a_package_has_them_too() -> None:
    assert prove(task(), NAMED.with_axes(compile="package")).parity in TRUSTED_CLASSES


@pytest.mark.more
def test_a_product_that_is_off_is_seen_and_one_that_is_not_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    small = task(lambda: nn.Linear(WIDTH, WIDTH))
    assert prove(small, NAMED).parity in TRUSTED_CLASSES

    def off(graph: Any, node: Any, by: Any) -> None:
        replace_product(graph, node, lambda *values: 1.0001 * by(*values))

    monkeypatch.setattr(mm_by_onednn, "replace_product", off)
    assert prove(small, NAMED).parity == "broken"


@pytest.mark.parametrize(
    "model", [lambda: nn.Linear(WIDTH, 3), lambda: nn.Linear(WIDTH, WIDTH).double()], ids=["small", "in fp64"]
)
def test_where_there_is_none_to_win_by_that_is_said(model: Callable[[], nn.Module]) -> None:
    x, y = task().data
    data = (x.to(next(model().parameters()).dtype), y)
    with pytest.raises(PlanError, match="a product of two fp32 matrices of at least 2 MFLOP"):
        lower(task(model, data=data), NAMED)


@pytest.mark.parametrize(("processor", "slow"), [("AMD EPYC", True), ("Intel(R) Xeon(R)", False), (None, False)])
def test_all_has_it_where_mkl_is_slow(processor: str | None, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(candidates, "is_mkl_slow", mm_by_onednn.is_mkl_slow)
    monkeypatch.setattr(mm_by_onednn, "is_mkl_slow_here", lambda: mm_by_onednn.is_mkl_slow(processor))
    machine = probe_hardware("cpu")
    hardware = replace(machine, processor=replace(machine.processor, model=processor))
    facts = task_facts(LoweringContext.from_task(task(), Plan()))
    assert bool(candidates.rewrite_changes(facts, hardware, Plan(device="cpu", compile="step"))) is slow
    function, args = torch.ops.aten.mm.default, (torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, 8 * WIDTH))
    assert step_profile._is_library_call(function, args, True) is not slow
    assert step_profile._is_library_call(function, args, False)
    assert step_profile._is_library_call(function, (torch.ones(WIDTH, 8 * WIDTH).t(), args[0]), True), "a narrow result"


@pytest.mark.parametrize(
    ("rows", "terms", "columns", "by_rows", "by_columns"),
    [
        (2048, 128, 784, True, True),  # the gradient of a wide layer's weights
        (128, 128, 9216, True, True),
        (128, 2048, 128, True, False),
        (576, 1576, 192, True, False),
        (1576, 192, 768, True, False),  # wide, but of many terms
        (8, 100, 96, False, False),  # small
    ],
)
def test_all_leaves_products_to_mkl_for_which_it_is_faster(
    rows: int, terms: int, columns: int, by_rows: bool, by_columns: bool
) -> None:
    """By how the first matrix lies; the second may lie either way."""
    one, other = torch.empty(rows, terms), torch.empty(terms, columns)
    for second in other, other.t().contiguous().t():
        assert mm_by_onednn.is_slow_by_mkl(one, second) is by_rows
        assert mm_by_onednn.is_slow_by_mkl(one.t().contiguous().t(), second) is by_columns


@pytest.mark.more
def test_in_a_step_all_takes_those_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five: the gradient of the first layer's weights is narrow, with a first operand by columns."""
    monkeypatch.setattr(mm_by_onednn, "is_mkl_slow_here", lambda: True)
    model = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.ReLU(), nn.Linear(8 * WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    for which, many in ("mm_by_onednn", 5), ("all", 4):
        said: list[str] = []
        lower(task(lambda: deepcopy(model)), NAMED.with_axes(rewrites=which), said.append).close()
        assert f"rewrote the step: mm_by_onednn {many}" in said


@pytest.mark.more
def test_of_a_wide_result_the_first_matrix_is_row_major(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the second layer's weights, (WIDTH, batch) by (batch, 8 * WIDTH)."""
    laid: list[list[int]] = []
    by_rows = mm_by_onednn._row_major

    def noted(given: Any) -> Any:
        laid.append([int(size) for size in given.get_size()])
        return by_rows(given)

    monkeypatch.setattr(mm_by_onednn, "_row_major", noted)
    model = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.ReLU(), nn.Linear(8 * WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    # What a cache keeps isn't lowered again.
    with functorch.patch(enable_autograd_cache=False), inductor.patch(fx_graph_cache=False):
        assert_trains_as_eagerly(task(lambda: deepcopy(model)), [])
    assert [WIDTH, 128] in laid
