"""What operations of next to no work take while a script trains, with all that it has switched on."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hotloop.core.records.profile import TAKE_ROWS
from hotloop.profiler.base.transparency import hide_from_compiler

_TINY_NUMBERS = 20


def operator_us() -> float:
    """What an operator takes now."""
    return _measure_us(torch.zeros(1))


_TRACEBACK_PREFIX = "traceback_"
"""Where torch's anomaly detection keeps in a node's metadata who made it: the lines on the stack."""


def traceback_lines(node: Any) -> int:
    """Lines on the stack when a node was made under anomaly detection; 0 of others."""
    return len(node.metadata.get(_TRACEBACK_PREFIX, ()))


def anomaly_mode_us() -> float:
    """How much longer an operator that makes a node takes under anomaly detection, for each line on the stack.

    In a thread of its own, on whose stack is nothing of the watch's, in which lines may take longer than the script's do.
    """
    with ThreadPoolExecutor(1) as beside:
        return beside.submit(_measure_anomaly_mode_us).result()


def _measure_anomaly_mode_us() -> float:
    tiny = torch.zeros(1, requires_grad=True).neg()  # of a leaf another node is made each time
    _measure_us(tiny)  # the first time, source files are read
    remembering, node = _measure_us(tiny), tiny.neg().grad_fn
    with torch.autograd.set_detect_anomaly(False):
        return max(0.0, remembering - _measure_us(tiny)) / max(1, traceback_lines(node))


@cache
def create_graph_us() -> float:
    """How much longer a node of a backward takes if that makes a graph too."""
    _backward_node_us(True)
    return max(0.0, min(_backward_node_us(True) for _ in range(3)) - min(_backward_node_us(False) for _ in range(3)))


def _backward_node_us(creating: bool) -> float:
    """What a node takes, of a chain of them; the engine is called as it is, past what stands around it."""
    out = leaf = torch.ones(1, requires_grad=True)
    for _ in range(_TINY_NUMBERS):
        out = out * leaf
    run = torch.autograd.Variable._execution_engine.run_backward
    began = time.perf_counter()
    run((out,), (torch.ones(1),), True, creating, (leaf,), allow_unreachable=True, accumulate_grad=False)
    return (time.perf_counter() - began) / _TINY_NUMBERS * 1e6


def _measure_us(tiny: Tensor) -> float:
    began = time.perf_counter()
    for _ in range(_TINY_NUMBERS):
        tiny.neg()
    return (time.perf_counter() - began) / _TINY_NUMBERS * 1e6


@hide_from_compiler
def find_identities(operators: Iterable[dict[str, Any]]) -> list[str]:
    """The shapes that rows are taken of, as `3000x3000`, where all such matrices are identities, parameters left out."""
    asked = {one["shapes"][0] for one in operators if one["name"] in TAKE_ROWS and one["shapes"]}
    square = {shape for shape in asked if _is_square(shape)}
    if not square:
        return []
    found: dict[str, bool] = {}
    with torch._C._DisableTorchDispatch():  # the script's modes hear nothing
        for value in gc.get_objects():
            # Other classes, parameters among them, may keep their numbers elsewhere.
            shape = "x".join(map(str, value.shape)) if type(value) is Tensor else ""
            if shape in square:
                found[shape] = found.get(shape, True) and _is_identity(value)
    return sorted(shape for shape, all_are in found.items() if all_are)


def _is_square(shape: str) -> bool:
    sides = shape.split("x")
    return len(sides) == 2 and sides[0] == sides[1] and int(sides[0]) > 1


def _is_identity(value: Tensor) -> bool:
    matrix = value.detach()
    if matrix.layout != torch.strided or matrix.is_meta:
        return False
    return bool((matrix.diagonal() == 1).all()) and int(matrix.count_nonzero()) == len(matrix)
