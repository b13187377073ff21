"""The gradient of a pooling lies as its image does, once and not for each number of a window, and stays what it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch
from torch._inductor import config as inductor

import hotloop
from hotloop.lowering.rewrites import fx_nodes
from hotloop.plan import Plan
from tests.support.programs import advance
from tests.support.rewritten_steps import convolving

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = Plan(device="cpu", compile="step", rewrites="pool_as_max")


@pytest.fixture
def laid(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, Any]]]:
    """For each gradient whether its image has channels last, and how Inductor lays it then: strides, smallest as 0."""
    found: list[tuple[bool, Any]] = []
    lowered = fx_nodes._lower_layout

    def noted(given: Any, image: Any) -> Any:
        from torch._inductor.ir import get_stride_order

        made = lowered(given, image)
        last = fx_nodes._has_channels_last(image)
        found.append((last, get_stride_order(made.get_stride()) if last else made is given))
        return made

    monkeypatch.setattr(fx_nodes, "_lower_layout", noted)
    fx_nodes.register_layout_op.cache_clear()
    # What a cache keeps isn't lowered again.
    with functorch.patch(enable_autograd_cache=False), inductor.patch(fx_graph_cache=False):
        yield found
    monkeypatch.undo()
    fx_nodes.register_layout_op.cache_clear()


def assert_trains_as_eagerly(task: hotloop.Task) -> None:
    found, expected = programs = [hotloop.lower(task, plan) for plan in (PLAN, Plan(device="cpu"))]
    for program in programs:
        advance(program, 3)
    torch.testing.assert_close(found.state().parameters, expected.state().parameters, rtol=1e-5, atol=1e-5)


@pytest.mark.more
def test_before_a_dense_layer_it_is_laid_as_the_convolution_lays(laid: list[tuple[bool, Any]]) -> None:
    layers = nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d((2, 4)), nn.Dropout(0.2)
    assert_trains_as_eagerly(convolving(*layers, size=12))
    assert laid and set(map(repr, laid)) == {repr((True, [3, 0, 2, 1]))}


@pytest.mark.more
def test_an_image_in_the_usual_order_leaves_it_alone(laid: list[tuple[bool, Any]]) -> None:
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)  # one channel: both orders are the same
    assert_trains_as_eagerly(convolving(*layers, channels=1))
    assert laid and set(laid) == {(False, True)}


def test_operation_by_operation_it_is_the_same_tensor_again() -> None:
    given, image = torch.randn(2, 3, 2, 2), torch.randn(2, 3, 4, 4)
    made = fx_nodes.to_layout_of(given, image)
    assert made.equal(given) and made.data_ptr() != given.data_ptr()
