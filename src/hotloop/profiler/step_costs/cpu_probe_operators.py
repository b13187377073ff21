"""The operators that are timed on a CPU, at sizes on a coarse grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_POOL_BYTES = 2**23  # of the rotating copies of a probe's tensors: more than a core's own caches
_MOST_COPIES = 16
_SIZES = (64, 4096, 32768, 262144, 2097152, 6291456, 12582912)  # elements; the last exceeds malloc's largest block

_MOST_ELEMENTS = 2097152  # of operators other than _LARGE
_LARGE = ("relu", "clone", "add_", "sqrt", "div", "lerp_", "addcmul_", "addcdiv_", "mul_", "zeros_like")


@dataclass(frozen=True)
class Probe:
    """One operator of one size: `build` returns the call, on new tensors."""

    name: str
    build: Callable[[], Callable[[], Any]]
    elements: int
    has_backward: bool = True

    @property
    def copies(self) -> int:
        return max(1, min(_MOST_COPIES, _POOL_BYTES // (4 * max(self.elements, 1))))


def _random(*shape: int, trained: bool = True) -> Tensor:
    return torch.randn(*shape, requires_grad=trained)


def _of_input(function: Callable[[Tensor], Tensor], *shape: int) -> Callable[[], Tensor]:
    x = _random(*shape)
    return lambda: function(x)


def _of_activations(function: Callable[[Tensor], Tensor], *shape: int) -> Callable[[], Tensor]:
    x = F.relu(torch.randn(*shape)).requires_grad_()  # equal numbers make a maximum faster
    return lambda: function(x)


def _of_pair(function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> Callable[[], Tensor]:
    x, y = _random(*shape), _random(*shape, trained=False)
    return lambda: function(x, y)


def _in_place(function: Callable[..., Any], tensors: int, *shape: int) -> Callable[[], Any]:
    values = [torch.rand(*shape) + 0.5 for _ in range(tensors)]
    return lambda: function(*values)


def _of_module(module: Callable[[], nn.Module], *shape: int) -> Callable[[], Any]:
    made, x = module(), _random(*shape)

    def call() -> Any:
        result = made(x)
        return result[0] if isinstance(result, tuple) else result

    return call


def _linear(m: int, n: int, k: int) -> Callable[[], Tensor]:
    x, weight, bias = _random(m, k), _random(n, k), _random(n)
    return lambda: F.linear(x, weight, bias)


def _batched(batch: int, m: int, n: int, k: int) -> Callable[[], Tensor]:
    x, y = _random(batch, m, k), _random(batch, k, n)
    return lambda: torch.bmm(x, y)


def _attention(rows: int, heads: int, length: int, width: int) -> Callable[[], Tensor]:
    q, k, v = (_random(rows, heads, length, width) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _embedding(words: int, width: int, indices: int) -> Callable[[], Tensor]:
    table, chosen = _random(words, width), torch.randint(words, (indices,))
    return lambda: F.embedding(chosen, table)


def _rows_of(rows: int, width: int) -> Callable[[], Tensor]:
    table, chosen = torch.randn(4 * rows, width), torch.randperm(4 * rows)[:rows]
    return lambda: torch.index_select(table, 0, chosen)


def _cross_entropy(rows: int, classes: int) -> Callable[[], Tensor]:
    scores, target = torch.randn(rows, classes).log_softmax(1).requires_grad_(), torch.randint(classes, (rows,))
    return lambda: F.nll_loss(scores, target)


_LINEAR_SIZES = (
    (1, 64, 64), (8, 16, 128), (8, 128, 1024), (8, 1024, 1024), (32, 32, 32), (32, 256, 2048), (64, 16, 128),
    (64, 1024, 256), (128, 128, 128), (128, 16, 1024), (256, 1024, 1024), (512, 16, 64), (512, 128, 1024),
    (512, 512, 2048), (1024, 256, 256), (2048, 1024, 256), (2048, 32, 256), (2, 2048, 2048), (4096, 256, 64),
    (1, 1024, 8192), (4, 4096, 4096), (16, 2048, 512),
)  # fmt: skip
_CONVOLUTION_SIZES = (  # rows, channels before, side, channels after, kernel, stride, groups
    (4, 1, 28, 8, 3, 1, 1), (64, 1, 28, 16, 3, 1, 1), (16, 1, 28, 32, 5, 1, 1), (4, 3, 32, 64, 3, 1, 1),
    (16, 3, 64, 32, 3, 2, 1), (1, 3, 160, 32, 7, 2, 1), (1, 3, 192, 48, 3, 1, 1), (8, 16, 28, 32, 3, 1, 1),
    (32, 24, 16, 48, 3, 1, 1), (2, 64, 32, 64, 3, 1, 1), (16, 64, 16, 96, 3, 1, 1), (2, 96, 56, 96, 3, 1, 1),
    (8, 128, 16, 160, 3, 2, 1), (16, 160, 8, 160, 3, 1, 1), (16, 384, 4, 384, 3, 1, 1), (1, 192, 28, 256, 3, 1, 1),
    (2, 384, 14, 384, 3, 1, 1), (8, 128, 16, 192, 1, 1, 1), (8, 96, 16, 192, 1, 2, 1), (8, 64, 16, 64, 3, 1, 64),
)  # fmt: skip
_RECURRENT_SIZES = (
    (16, 8, 32, 64), (16, 64, 64, 128), (32, 32, 128, 192), (24, 96, 32, 320), (8, 16, 96, 224),
    (8, 128, 96, 192), (6, 64, 128, 512), (16, 8, 48, 288),
)  # fmt: skip


def _product_probes() -> Iterator[Probe]:
    for m, n, k in _LINEAR_SIZES:
        yield Probe("linear", partial(_linear, m, n, k), m * k + n * k + m * n)
    for batch, m, n, k in ((4, 32, 32, 32), (16, 64, 64, 64), (32, 128, 128, 32), (8, 256, 64, 256)):
        yield Probe("batched product", partial(_batched, batch, m, n, k), batch * (m * n + m * k + n * k))
    for rows, before, side, after, kernel, stride, groups in _CONVOLUTION_SIZES:
        module = partial(nn.Conv2d, before, after, kernel, stride, kernel // 2, groups=groups)
        yield Probe("convolution", partial(_of_module, module, rows, before, side, side), rows * side * side * after)
    for rows, heads, length, width in ((1, 4, 64, 32), (4, 4, 128, 64), (2, 8, 320, 64), (1, 4, 512, 64)):
        yield Probe("attention", partial(_attention, rows, heads, length, width), rows * heads * length * width * 3)
    for steps, rows, inputs, width in _RECURRENT_SIZES:
        layer = partial(nn.LSTM, inputs, width, batch_first=True)
        yield Probe("recurrent", partial(_of_module, layer, rows, steps, inputs), 16 * steps * rows * width)


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "clone": torch.clone,
    "sum": torch.sum,
    "square": lambda x: x * 0.5,
}
_UPDATES: dict[str, tuple[Callable[..., Any], int]] = {
    "add_": (lambda x, y: x.add_(y, alpha=1e-9), 2),
    "mul_": (lambda x: x.mul_(1.0), 1),
    "div_": (lambda x: x.div_(1.0), 1),
    "lerp_": (lambda x, y: x.lerp_(y, 0.1), 2),
    "addcmul_": (lambda x, y: x.addcmul_(y, y, value=1e-9), 2),
    "addcdiv_": (lambda x, y, z: x.addcdiv_(y, z, value=-1e-9), 3),
    "sqrt": (torch.sqrt, 1),
    "div": (lambda x: x / 2.0, 1),
    "copy_": (lambda x, y: x.copy_(y), 2),
    "zeros_like": (torch.zeros_like, 1),
    "fill_": (lambda x: x.fill_(1.0), 1),
    "bernoulli_": (lambda x: x.bernoulli_(0.5), 1),
    "_foreach_add_": (lambda x, y: torch._foreach_add_([x], [y], alpha=1e-9), 2),
}


def _traffic_probes() -> Iterator[Probe]:
    for size in _SIZES:
        for name, function in _UNARY.items():
            if size > _MOST_ELEMENTS and name not in _LARGE:
                continue
            yield Probe(name, partial(_of_input, function, size), size)
        for name, (update, tensors) in _UPDATES.items():
            if size > _MOST_ELEMENTS and name not in _LARGE:
                continue
            yield Probe(name, partial(_in_place, update, tensors, size), tensors * size, has_backward=False)
        yield Probe("add", partial(_of_pair, torch.add, size), 2 * size)
        yield Probe("mul", partial(_of_pair, torch.mul, size), 2 * size)
        if size <= _MOST_ELEMENTS:
            yield Probe("mse", partial(_of_pair, F.mse_loss, size), 2 * size)
    for side in (8, 64, 256, 1024, 2048):
        square = (side, side)
        yield Probe("softmax", partial(_of_input, partial(torch.softmax, dim=1), *square), side * side)
        yield Probe("log_softmax", partial(_of_input, partial(torch.log_softmax, dim=1), *square), side * side)
        yield Probe("layer_norm", partial(_of_module, partial(nn.LayerNorm, side), *square), side * side)
        yield Probe("sum of rows", partial(_in_place, lambda x: x.sum(0, keepdim=True), 1, *square), side * side, False)
        yield Probe("rows", partial(_rows_of, side, side), side * side, has_backward=False)
        yield Probe("embedding", partial(_embedding, 64, side, side), side * side)
        yield Probe("cross_entropy", partial(_cross_entropy, side * side // 16, 16), side * side)
    for rows, channels, side in ((1, 8, 8), (8, 16, 16), (8, 64, 32), (32, 64, 32), (4, 64, 160)):
        shape, elements = (rows, channels, side, side), rows * channels * side * side
        yield Probe("max_pool", partial(_of_activations, partial(F.max_pool2d, kernel_size=2), *shape), elements)
        yield Probe("average", partial(_of_input, partial(F.adaptive_avg_pool2d, output_size=1), *shape), elements)
        if rows > 1:
            yield Probe("batch_norm", partial(_of_module, partial(nn.BatchNorm2d, channels), *shape), elements)
            yield Probe("group_norm", partial(_of_module, partial(nn.GroupNorm, 4, channels), *shape), elements)


PRODUCT_PROBES = tuple(_product_probes())
TRAFFIC_PROBES = tuple(_traffic_probes())
