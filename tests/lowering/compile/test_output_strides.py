"""A capture says how what libraries compute will lie in memory, and a compiler reads it so, without asking."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Interpreter, Node
from torch.utils.checkpoint import checkpoint

import hotloop
from hotloop.data.batch_tree import flatten_tree
from hotloop.lowering.compile import inductor_patches
from hotloop.lowering.compile.capture import CapturedStep, capture_step
from hotloop.lowering.compile.inductor_patches import significant_strides
from hotloop.parity.proof import prove
from hotloop.plan import Plan
from tests.support.eager_comparison import STEP
from tests.support.programs import advance, seeing

pytestmark = pytest.mark.more

PACKAGE = Plan(compile="package")
aten = torch.ops.aten
BY_LIBRARIES = (
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class Patches(nn.Module):
    """ConvNeXt's block (Liu et al., 2022): norms and products over channels that come last, between convolutions."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.stem, self.scale = nn.Conv2d(1, 8, 2, stride=2), scale
        self.norm, self.within = nn.LayerNorm(8), nn.LayerNorm(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.wide, self.narrow, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        rows = self.within(self.depthwise(x).permute(0, 2, 3, 1))
        x = x + self.scale * self.narrow(nn.functional.gelu(self.wide(rows))).permute(0, 3, 1, 2)
        return self.out(x.mean((2, 3)))  # type: ignore[no-any-return]


class Mixing(nn.Module):
    """A convolution among tokens, as in SegFormer (Xie et al., 2021): their channels come last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 2, stride=2), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.depthwise, self.out = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.stem(x).flatten(2).transpose(1, 2))
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        side = math.isqrt(tokens.shape[1])
        image = self.depthwise(tokens.transpose(1, 2).unflatten(2, (side, side)))
        return self.out(image.flatten(2).transpose(1, 2).mean(1))  # type: ignore[no-any-return]


class Rows(nn.Module):
    """An LSTM over the rows of what a convolution makes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(8, 4)
        self.lstm = nn.LSTM(4 * 12, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows, _ = self.lstm(self.stem(x).permute(0, 2, 1, 3).flatten(2))
        return self.out(rows[:, -1])  # type: ignore[no-any-return]


class Lying(Interpreter):
    """Runs a captured step, and notes what libraries laid out otherwise than was captured."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self.seen, self.otherwise = 0, list[str]()

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.target in BY_LIBRARIES:
            for there, said in zip(*(flatten_tree(value)[0] for value in (result, n.meta["val"])), strict=True):
                if isinstance(there, Tensor) and there.numel():
                    self.seen += 1
                    if significant_strides(there) != significant_strides(said):
                        self.otherwise.append(f"{n.name}: {there.stride()} for {said.stride()}")
        return result


def captured(task: hotloop.Task) -> CapturedStep:
    program = hotloop.lower(task, Plan())
    advance(program, 1)
    batch = tuple(value[:16] for value in task.data)  # type: ignore[union-attr]
    return capture_step(program._step, batch, 16, {}, whole=True)


def laid_otherwise(task: hotloop.Task) -> list[str]:
    found = captured(task)
    lying = Lying(found.graph)
    with torch.no_grad():
        lying.run(*(real(one) for one in found.examples))
    assert lying.seen
    return lying.otherwise


def real(example: Tensor) -> Tensor:
    value = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype)
    return value.uniform_(0.1, 0.2) if value.is_floating_point() else value.zero_()


class Again(Rows):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", [Rows, Again])
def test_no_layer_of_onednn_s_is_captured_that_the_compiler_does_not_know(model: type[nn.Module]) -> None:
    names = {str(node.target) for node in captured(seeing(model)).graph.graph.nodes}
    assert not any("mkldnn" in name for name in names)
    assert any("convolution" in name for name in names)


NETWORKS = {"patches": Patches, "mixing": Mixing, "rows": Rows}


@pytest.mark.parametrize("name", NETWORKS)
def test_libraries_lay_out_what_they_compute_as_captured(name: str) -> None:
    assert not laid_otherwise(seeing(NETWORKS[name]))


nnpack = pytest.mark.skipif(
    not torch.backends.nnpack.is_available(), reason="without oneDNN it is NNPACK that lays out otherwise"
)


@pytest.fixture
def unasked(nothing_compiled: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All is captured without oneDNN, as an LSTM is; torch remembers how convolutions lay."""
    without = torch.backends.mkldnn.flags
    monkeypatch.setattr(inductor_patches, "reset_stride_cache", lambda: without(enabled=False))
    FakeTensorMode.cache_clear()
    yield
    FakeTensorMode.cache_clear()


@nnpack
@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize("name", ["patches", "mixing"])
def test_unasked_they_are_captured_otherwise(name: str) -> None:
    assert laid_otherwise(seeing(NETWORKS[name]))


@pytest.mark.parametrize(
    ("name", "plan"), [pytest.param("patches", STEP, marks=pytest.mark.more), ("patches", PACKAGE), ("mixing", PACKAGE)]
)
def test_a_compiled_step_goes_by_it(name: str, plan: Plan) -> None:
    found = prove(seeing(NETWORKS[name]), plan)
    assert found.parity in ("fp32-equivalent", "bitwise"), found.reason


@nnpack
@pytest.mark.usefixtures("unasked")
def test_a_package_for_another_layout_is_seen_to_be_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It doesn't ask how what it gets from a library lies in memory; in ConvNeXt such a branch begins with a millionth."""
    monkeypatch.setattr(
        inductor_patches, "use_real_output_strides", nullcontext
    )  # this patch corrects the strides, too
    assert prove(seeing(lambda: Patches(1e-3), seed=1), PACKAGE).parity == "broken"
