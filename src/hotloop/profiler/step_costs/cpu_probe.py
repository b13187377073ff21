"""Measures a CPU's rates by small probes: one operator each, forward and backward, and the host's work around them.

Other programs can only slow a probe, so each figure is the best of many short windows. The probes' tensors rotate, so
that most come from the last-level cache, as in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.step_costs import CpuRates, OperatorCost, Points
from hotloop.profiler.step_costs.cpu_probe_operators import PRODUCT_PROBES, TRAFFIC_PROBES, Probe
from hotloop.profiler.step_costs.operator_recorder import StepRecorder

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
