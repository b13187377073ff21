"""Faults of torch for which there are patches: a test that fails here means that its patch can go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.lowering.compile.test_stride_simplification import LONG, X

aten = torch.ops.aten


def symbolic_mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> tuple[GraphModule, list[Tensor]]:
    with (mode := symbolic_mode()):
        examples = [mode.from_tensor(value) for value in inputs]
        return make_fx(function)(*examples), examples


def compiled(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    from torch._inductor.compile_fx import compile_fx

    graph, examples = graph_of(function, *inputs)
    with torch.no_grad():
        program: Any = compile_fx(graph, examples, config_patches={"fallback_random": True})
        return program(*inputs)  # type: ignore[no-any-return]


def test_torch_s_meta_kernel_refuses_fp32() -> None:
    left, right, ends = torch.rand(32, 16), torch.rand(4, 24, 16).mT, torch.tensor([8, 8, 20, 32], dtype=torch.int32)
    assert torch._grouped_mm(left, right, offs=ends).shape == (32, 24)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=r"BF16|BFloat16"):
        torch._grouped_mm(mode.from_tensor(left), mode.from_tensor(right), offs=mode.from_tensor(ends))


def test_torch_captures_onednn_s_lstm() -> None:
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings

    lstm = nn.LSTM(4, 3, batch_first=True)
    names = [name for name, _ in lstm.named_parameters()]

    def gradients(x: Tensor, *weights: Tensor) -> Any:
        output, _ = torch.func.functional_call(lstm, dict(zip(names, weights, strict=True)), (x,))
        return torch.autograd.grad(output.sum(), weights)

    weights = [value.detach().requires_grad_() for value in lstm.parameters()]
    graph, _ = graph_of(gradients, torch.rand(2, 5, 4), *weights)
    backward = aten.mkldnn_rnn_layer_backward.default
    assert graph.graph.find_nodes(op="call_function", target=backward)
    assert backward not in lowerings and backward not in decompositions


@pytest.mark.skipif(not torch.backends.nnpack.is_available(), reason="NNPACK alone has other strides than oneDNN")
def test_torch_s_cache_of_strides_ignores_onednn_s_switch() -> None:
    image, weight = torch.rand(16, 8, 6, 6).to(memory_format=torch.channels_last), torch.rand(8, 1, 3, 3)

    def strides(x: Tensor, w: Tensor) -> tuple[int, ...]:
        return torch.conv2d(x, w, groups=8, padding=1).stride()

    FakeTensorMode.cache_clear()
    with FakeTensorMode() as mode:
        fakes = mode.from_tensor(image), mode.from_tensor(weight)
        strides(*fakes)
    with torch.backends.mkldnn.flags(enabled=False):
        with mode:
            cached = strides(*fakes)
        assert cached != strides(image, weight)
    FakeTensorMode.cache_clear()


@pytest.mark.more
def test_torch_s_lerp_asks_for_its_weight() -> None:
    with pytest.raises(symbolic_shapes.GuardOnDataDependentSymNode, match=r">= 0\.5"):
        compiled(lambda a, b, w: a.lerp_(b, w.item()), torch.ones(3), torch.ones(3), torch.tensor(0.1).double())


def test_torch_proves_that_the_base_of_a_root_is_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[str] = []
    expect = symbolic_shapes.expect_true
    monkeypatch.setattr(symbolic_shapes, "expect_true", lambda cond: proved.append(str(cond)) or expect(cond))
    graph_of(lambda step: step * (1 - 0.9 ** step.item()) ** 0.5, torch.tensor(3.0))
    assert any(">= 0" in condition for condition in proved)


def test_torch_s_symbols_import_the_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    summary = ShapeEnv._get_stack_summary
    monkeypatch.setattr(
        ShapeEnv, "_get_stack_summary", lambda self, *args, **kw: found.append("line") or summary(self, *args, **kw)
    )
    graph_of(lambda step: step * step.item(), torch.tensor(3.0))
    assert found


def test_torch_simplifies_long_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import sizevars

    asked: list[int] = []
    simplify = sympy.simplify
    monkeypatch.setattr(sympy, "simplify", lambda index: asked.append(index.count_ops()) or simplify(index))
    sizevars.stride_at.__wrapped__(LONG, X)
    assert max(asked) > 8


@pytest.mark.more
def test_torch_adds_up_an_embedding_s_gradient_on_one_thread() -> None:
    from torch._inductor.utils import run_and_get_cpp_code

    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        run = torch.compile(lambda gradient, words: aten.embedding_dense_backward(gradient, words, 20, -1, False) * 2)
        _, code = run_and_get_cpp_code(run, torch.rand(64, 8), torch.randint(20, (64,)))
    finally:
        torch.set_deterministic_debug_mode(before)
    assert "index_put_" in code and "aten.embedding_dense_backward" not in code


@pytest.mark.more
def test_inductor_drops_the_factor_of_a_sum() -> None:
    values = torch.rand(4, 4), torch.rand(4, 4), torch.rand(4, 4)

    def update(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a.add(b @ c, alpha=-0.1)

    assert not torch.allclose(compiled(update, *values), update(*values))


@pytest.mark.more
def test_inductor_keeps_the_strides_of_a_single_operand() -> None:
    def joined(cache: Tensor, x: Tensor) -> Tensor:
        return torch.cat([cache, (x + 1).permute(1, 2, 0)], -1).view(-1)

    assert joined(torch.empty(0), torch.rand(2, 3, 4)).shape == (24,)
    with pytest.raises(ValueError, match="Cannot view"):
        compiled(joined, torch.empty(0), torch.rand(2, 3, 4))


@pytest.mark.more
def test_inductor_draws_in_another_order() -> None:
    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return mixed * torch.empty_like(mixed).bernoulli_(0.5)

    values = [torch.rand(2, 3, 8, 4) for _ in range(3)]
    torch.manual_seed(0)
    expected = dropped(*values)
    torch.manual_seed(0)
    assert not torch.allclose(compiled(dropped, *values), expected)
