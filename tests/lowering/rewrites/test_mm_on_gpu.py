"""`mm_as_sum`, `mm_in_parts`, and what `conv_in_pool` does otherwise for a GPU: the step stays the same, on a CPU as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.errors import PlanError
from hotloop.lowering.rewrites import apply_rewrite, conv_in_pool, mm_on_gpu
from hotloop.lowering.rewrites.mm_on_gpu import MOST_OF_SUM, split_count
from tests.support.programs import a_task
from tests.support.rewritten_steps import Step, apart, convolving

pytestmark = pytest.mark.usefixtures("one_thread")


class Dense(nn.Module):
    def __init__(self, width: int, hidden: int = 6) -> None:
        super().__init__()
        self.first, self.plain = nn.Linear(width, hidden), nn.Linear(hidden, 20, bias=False)
        self.free = nn.Parameter(torch.randn(20, 3, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.plain(self.first(x).tanh())
        return hidden @ self.free + (hidden.t() @ hidden).mean()


def dense(width: int, rows: int = 4, **sizes: int) -> hotloop.Task:
    x = torch.randn(3 * rows, width, generator=torch.Generator().manual_seed(2))
    task = dict(data=(x, x[:, :3].argmax(1)), batch_size=rows, optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    return a_task(model=lambda: Dense(width, **sizes), **task)


def rewritten(step: Step, which: str = "all") -> dict[str, int]:
    return {name: times for name, times in apply_rewrite(step.captured.graph, which, device="cuda").items() if times}


@pytest.mark.few("True-many terms")
@pytest.mark.parametrize("width", [5, 40], ids=["few terms", "many terms"])
@pytest.mark.parametrize("double", [False, True])
def test_small_products_are_sums(width: int, double: bool) -> None:
    step = Step(dense(width), double)
    plain, products = step.after(step.captured), step.captured.graph.code.count("mm.default(")
    assert rewritten(step) == {"mm_as_sum": products} and products > 8
    assert "mm.default(" not in step.captured.graph.code
    assert apart(step.after(step.captured), plain) < (1e-12 if double else 1e-4)


def test_products_of_many_terms_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mm_on_gpu, "MOST_OF_SUM", 0)
    step = Step(dense(1024), double=True)
    plain = step.after(step.captured)
    assert rewritten(step) == {"mm_in_parts": 1}  # the first layer's forward: the gradient of its weights has 4 terms
    assert "bmm" in step.captured.graph.code
    assert apart(step.after(step.captured), plain) < 1e-12


def wrong_sum(a: Tensor, b: Tensor) -> Tensor:
    return (a[:, 1:, None] * b[None, 1:]).sum(1)


def wrong_parts(a: Tensor, b: Tensor, parts: int) -> Tensor:
    return (a.unflatten(1, (parts, -1)).transpose(0, 1) @ b.unflatten(0, (parts, -1)))[1:].sum(0)


@pytest.mark.parametrize(
    ("name", "fault", "most"), [("_sum_products", wrong_sum, MOST_OF_SUM), ("_product_in_parts", wrong_parts, 0)]
)
def test_terms_that_are_left_out_are_seen(
    name: str, fault: Callable[..., Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mm_on_gpu, "MOST_OF_SUM", most)
    monkeypatch.setattr(mm_on_gpu, name, fault)
    step = Step(dense(1024), double=True)
    plain = step.after(step.captured)
    assert rewritten(step)
    assert apart(step.after(step.captured), plain) > 1e-6


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ((8, 1960, 100), 14),
        ((128, 9216, 128), 32),
        ((128, 1960, 100), 14),
        ((64, 784, 128), 4),
        ((128, 2048, 2048), 1),  # tiles enough for half of the cores
        ((128, 784, 10), 4),
        ((128, 500, 10), 1),  # too few terms
        ((128, 1021, 10), 1),  # a prime
        ((4096, 4096, 4096), 1),
    ],
)
def test_terms_are_cut_where_cores_would_have_nothing_to_do(sizes: tuple[int, int, int], parts: int) -> None:
    assert split_count(*sizes) == parts
    assert sizes[1] % (4 * parts) == 0 or parts == 1


def test_what_they_are_not_for_is_refused_in_one_line() -> None:
    step = Step(dense(300, rows=16, hidden=600))
    with pytest.raises(PlanError, match=r"rewrites=mm_in_parts changes nothing.*very long sums") as caught:
        apply_rewrite(step.captured.graph, "mm_in_parts", device="cuda")
    assert "\n" not in str(caught.value)


@pytest.mark.more
@pytest.mark.parametrize("image_by_image", [True, False])
def test_a_pooled_convolution_adds_up_either_way(image_by_image: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_in_pool, "_sum_by_image", lambda gradient: image_by_image)
    step = Step(convolving(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), double=True)
    plain = step.after(step.captured)
    assert rewritten(step, "conv_in_pool") == {"conv_in_pool": 1}
    assert apart(step.after(step.captured), plain) < 1e-12
