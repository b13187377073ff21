"""Measures a CPU's rates by small probes: one operator each, forward and backward, and the host's work around them.

Other programs can only slow a probe, so each figure is the best of many short windows. The probes' tensors rotate, so
that most come from the last-level cache, as in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.step_costs import CpuRates, OperatorCost, Points
from hotloop.profiler.step_costs.operator_recorder import StepRecorder

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


METHOD = 1
"""Version of the probes; stored rates of another version are measured anew."""

WINDOW_S, LEAST_WINDOWS = 0.0004, 2
LEAST_S = 1e-6  # of an operator in the backward pass, from which the engine's time is subtracted
_FAULT_BYTES, _COLD_BYTES, _PART_BYTES = 2**27, 2**28, 2**19
_USUAL_CACHE_BYTES = 2**25
PRODUCTS = ("linear", "batched_product", "convolution", "attention", "recurrent")
_CHAIN, _TINY_PARAMETERS = 64, 16


def measure_cpu_rates(budget_s: float = 0.02, tick: Callable[[str], None] = lambda _: None) -> CpuRates:
    """Returns the rates of this CPU with torch's current number of threads.

    Args:
        budget_s: per probe; about 250 probes run.
        tick: called with each probe's name.
    """
    products: dict[str, list[tuple[tuple[float, ...], float]]] = {}
    traffic: dict[str, dict[float, float]] = {}
    with preserve_generators():
        overhead = _host_overhead(budget_s)
        for probe in [*PRODUCT_PROBES, *TRAFFIC_PROBES]:
            tick(probe.name)
            for cost, seconds in _measure(probe, budget_s, overhead["engine"]):
                if cost.kind in PRODUCTS and cost.flops:
                    point = (tuple(map(float, cost.shape)), cost.flops / seconds)
                    products.setdefault(f"{cost.name}/{cost.phase}", []).append(point)
                else:
                    points = traffic.setdefault(cost.name, {})
                    points[cost.bytes] = min(seconds, points.get(cost.bytes, seconds))
        in_order = {name: _increasing(points) for name, points in traffic.items()}
        overhead |= _update_overhead(budget_s, in_order)
        fault_s, cold_s = _memory_overhead(budget_s)
    rates = {name: tuple(points) for name, points in products.items()}
    return CpuRates(rates, in_order, overhead, fault_s, cold_s, _cache_bytes(), torch.get_num_threads())


def _memory_overhead(budget_s: float) -> tuple[float, float]:
    """Returns seconds per byte of memory that the system zeroes, and of memory that no cache has."""
    reused = torch.zeros(_FAULT_BYTES // 4)
    new = min(best_seconds(lambda: torch.empty(_FAULT_BYTES // 4).fill_(1.0), 2 * budget_s) for _ in range(3))
    old = min(best_seconds(lambda: reused.fill_(1.0), 2 * budget_s) for _ in range(3))
    fault = (new - old) / _FAULT_BYTES
    parts = torch.zeros(_COLD_BYTES // 4).split(_PART_BYTES // 4)
    turns = cycle(parts)
    cold = best_seconds(lambda: [next(turns).add_(1.0) for _ in parts], 4 * budget_s) / _COLD_BYTES
    warm = best_seconds(lambda: parts[0].add_(1.0), 4 * budget_s) / _PART_BYTES
    return max(fault, 0.0), max(cold - warm, 0.0) / 2  # each byte is read and written


def _cache_bytes() -> int:
    """Returns the bytes of the largest cache that the system reports."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) * 1024 for size in sizes if size.endswith("K")), default=_USUAL_CACHE_BYTES)


def _increasing(points: dict[float, float]) -> Points:
    """Returns ((bytes), seconds) by size; a probe that took longer than a larger one was interrupted."""
    least, found = float("inf"), []
    for size, seconds in sorted(points.items(), reverse=True):
        least = min(least, seconds)
        found.append(((float(size),), least))
    return tuple(reversed(found))


def best_seconds(work: Callable[[], object], budget_s: float) -> float:
    """Returns the seconds per call in the best window within the budget."""
    work()
    calls = 1
    while (took := _seconds(work, calls)) < WINDOW_S:
        calls *= 2
    windows = [took]
    while sum(windows) < budget_s or len(windows) < LEAST_WINDOWS:
        windows.append(_seconds(work, calls))
    return min(windows) / calls


def _seconds(work: Callable[[], object], calls: int) -> float:
    start = perf_counter()
    for _ in range(calls):
        work()
    return perf_counter() - start


def _measure(probe: Probe, budget_s: float, engine_s: float) -> Iterator[tuple[OperatorCost, float]]:
    """Yields the main operator and its seconds, of the forward pass and of the backward pass if it has one."""
    works = [probe.build() for _ in range(probe.copies)]
    turns = cycle(works)
    seconds = best_seconds(lambda: next(turns)(), budget_s)
    main = _main_operator(works[0], "forward")
    yield main, seconds
    result = works[0]()
    if not probe.has_backward or not isinstance(result, Tensor) or not result.requires_grad:
        return
    results = [work() for work in works]
    gradients = [torch.randn_like(one) for one in results]
    inputs = [_leaves(one) for one in results]
    backward = cycle(
        [
            (
                lambda one=one, leaves=leaves, gradient=gradient: torch.autograd.grad(
                    one, leaves, gradient, retain_graph=True
                )
            )
            for one, leaves, gradient in zip(results, inputs, gradients, strict=True)
        ]
    )
    seconds = best_seconds(lambda: next(backward)(), budget_s)
    costs = _operators(lambda: next(backward)(), "backward")
    if not costs:
        return  # the gradient is a view
    main = max(costs, key=lambda one: (one.flops * one.count, one.bytes))
    share = main.flops * main.count / max(sum(one.flops * one.count for one in costs), 1)
    each = max(seconds - engine_s, LEAST_S) * (share if main.kind in PRODUCTS else 1.0) / main.count
    yield main, each


def _leaves(result: Tensor) -> list[Tensor]:
    """Returns the leaves of a result's graph that take gradients."""
    leaves, ahead, seen = [], [result.grad_fn], set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        ahead += [following for following, _ in node.next_functions]
    return leaves


def _operators(work: Callable[[], object], phase: Any) -> list[OperatorCost]:
    recorder = StepRecorder()
    recorder.is_recording, recorder.phase = True, phase
    with recorder:
        work()
    return [one for one in recorder.operators if one.kind != "view"]


def _main_operator(work: Callable[[], object], phase: Any) -> OperatorCost:
    return max(_operators(work, phase), key=lambda one: (one.flops, one.bytes))


def _host_overhead(budget_s: float) -> dict[str, float]:
    number = torch.ones(1)
    trained = torch.ones(1, requires_grad=True)
    product = trained * number
    single = best_seconds(lambda: torch.autograd.grad(product, trained, number, retain_graph=True), 3 * budget_s)
    chain = trained
    for _ in range(_CHAIN):
        chain = chain * number
    many = best_seconds(lambda: torch.autograd.grad(chain, trained, number, retain_graph=True), 3 * budget_s)
    node = (many - single) / (_CHAIN - 1)
    modules = nn.Sequential(*(nn.Identity() for _ in range(_CHAIN)))
    square = torch.ones(4, 4, requires_grad=True)
    return {
        "engine": max(single - node, 0.0),
        "node": node,
        "module": best_seconds(lambda: modules(number), 3 * budget_s) / _CHAIN,
        "view": best_seconds(lambda: square.t(), 3 * budget_s),
    }


def _update_overhead(budget_s: float, traffic: dict[str, Points]) -> dict[str, float]:
    """Returns the seconds of an Adam step beside its operators: of the step, and of each parameter."""

    def step_s(count: int) -> tuple[float, float]:
        values = [torch.ones(4, requires_grad=True) for _ in range(count)]
        for value in values:
            value.grad = torch.ones(4)
        optimizer = torch.optim.Adam(values)
        optimizer.step()
        seconds = best_seconds(optimizer.step, 3 * budget_s)
        costs = _operators(optimizer.step, "update")
        return seconds, sum(one.count * min(s for _, s in traffic.get(one.name, [((), 1e-6)])) for one in costs)

    (one, one_operators), (many, many_operators) = step_s(1), step_s(_TINY_PARAMETERS)
    parameter = ((many - many_operators) - (one - one_operators)) / (_TINY_PARAMETERS - 1)
    return {"parameter": max(parameter, 0.0), "optimizer": max(one - one_operators - parameter, 0.0)}
