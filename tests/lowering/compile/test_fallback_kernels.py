"""What the compiler leaves to PyTorch is read where it lies, also where PyTorch says otherwise beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes as no_fake_tensors

from hotloop.lowering.compile import inductor_patches
from hotloop.parity.proof import prove
from hotloop.plan import Plan
from tests.support.eager_comparison import STEP
from tests.support.programs import seeing

PACKAGE = Plan(compile="package")
aten = torch.ops.aten


class Edged(nn.Module):
    """Images whose channels come last and whose edges are repeated: the gradient of that lies otherwise than torch says."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.edges = nn.Conv2d(1, 8, 2, stride=2), nn.LayerNorm(8), nn.ReplicationPad2d(1)
        self.conv, self.out = nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out(self.conv(self.edges(x)).relu().mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.more
@pytest.mark.parametrize(
    "plan",
    [pytest.param(Plan(compile="forward"), marks=pytest.mark.more), STEP, PACKAGE],
    ids=lambda plan: plan.compile,
)
def test_a_compiled_step_reads_a_result_where_it_lies(plan: Plan) -> None:
    found = prove(seeing(Edged), plan)
    assert found.parity in ("fp32-equivalent", "bitwise"), found.reason


@pytest.mark.more
@pytest.mark.skipif(torch.__version__ >= "2.14", reason="a later torch may say what is true")
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("plan", [STEP, pytest.param(PACKAGE, marks=pytest.mark.more)], ids=lambda plan: plan.compile)
def test_by_what_torch_says_it_reads_something_else(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_patches, "use_real_output_strides", nullcontext)
    assert prove(seeing(Edged), plan).parity == "broken"


@torch.library.custom_op("hotloop_tests::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("kernel", "asked"),
    [
        (aten.replication_pad2d_backward.default, True),
        (aten.convolution_backward.default, True),
        (aten.index_put_.default, False),
        (torch.ops._c10d_functional.all_reduce.default, False),
        (torch.ops.hotloop_tests.counted.default, False),
    ],
    ids=str,
)
def test_only_what_surely_only_computes_is_asked(kernel: torch._ops.OpOverload, asked: bool) -> None:
    assert inductor_patches._is_pure(kernel) is asked


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        yield mode


def last(mode: FakeTensorMode, *shape: int) -> Tensor:
    return mode.from_tensor(torch.ones(shape).to(memory_format=torch.channels_last))


def test_a_result_lies_as_one_with_content_does(mode: FakeTensorMode) -> None:
    operation, asked = aten.replication_pad2d_backward.default, dict[str, Any]()
    image, gradient = last(mode, 2, 3, 4, 4), mode.from_tensor(torch.ones(2, 3, 6, 6))
    found = inductor_patches._infer_result(operation, asked)(gradient, image, [1, 1, 1, 1])
    with no_fake_tensors():
        there = operation(torch.ones(2, 3, 6, 6), torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), [1] * 4)
    assert found.stride() == there.stride() and isinstance(found, FakeTensor)
    assert len(asked) == 1
    assert inductor_patches._infer_result(operation, asked)(gradient, image, [1, 1, 1, 1]).stride() == there.stride()
    assert len(asked) == 1  # the same was asked before


@pytest.mark.parametrize(
    "run",
    [
        lambda mode: (aten.linalg_cholesky.default, (mode.from_tensor(torch.eye(3)),)),
        lambda mode: (aten.nonzero.default, (mode.from_tensor(torch.eye(3)),)),
        lambda mode: (aten.index.Tensor, (mode.from_tensor(torch.eye(3)), [mode.from_tensor(torch.eye(3) > 0)])),
        lambda mode: (aten.bernoulli.default, (last(mode, 2, 3, 4, 4),)),
        lambda mode: (aten.mul.Tensor, (last(mode, 2, 3, 4, 4), 2.0)),
    ],
    ids=["no result of zeros", "unknown sizes", "a mask", "draws", "as said"],
)
def test_else_it_lies_as_was_said(mode: FakeTensorMode, run: Callable[[FakeTensorMode], tuple[Any, Any]]) -> None:
    operation, given = run(mode)
    said, found = operation(*given), inductor_patches._infer_result(operation, {})(*given)
    assert found.ndim == said.ndim and (not inductor_patches._has_known_size(said) or found.stride() == said.stride())


def test_results_of_several_parts_may_lack_some(mode: FakeTensorMode) -> None:
    image, weight = last(mode, 2, 3, 4, 4), mode.from_tensor(torch.ones(3, 3, 1, 1))
    how: Any = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
    found = inductor_patches._infer_result(aten.convolution_backward.default, {})(image, image, weight, None, *how)
    assert found[0] is None and found[1].shape == weight.shape
