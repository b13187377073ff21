"""Times of tiny operations in the script's process, with the debugging modes that the script has switched on."""

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
    """Returns the microseconds of a tiny operator under the current modes."""
    return _measure_us(torch.zeros(1))


_TRACEBACK_PREFIX = "traceback_"
"""Key of a node's metadata under which torch's anomaly detection stores the lines of the stack."""


def traceback_lines(node: Any) -> int:
    """Returns the number of stack lines that anomaly detection stored for a node; 0 without it."""
    return len(node.metadata.get(_TRACEBACK_PREFIX, ()))


def anomaly_mode_us() -> float:
    """Returns how much longer an operator takes under anomaly detection, in microseconds per line of the stack.

    The measurement runs in a new thread, without the profiler's frames on the stack, which may take longer than the
    script's.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_measure_anomaly_mode_us).result()


def _measure_anomaly_mode_us() -> float:
    tiny = torch.zeros(1, requires_grad=True).neg()  # not a leaf: an operator on a leaf creates a further node
    _measure_us(tiny)  # warm-up: anomaly detection reads the source files once
    anomaly_us, node = _measure_us(tiny), tiny.neg().grad_fn
    with torch.autograd.set_detect_anomaly(False):
        return max(0.0, anomaly_us - _measure_us(tiny)) / max(1, traceback_lines(node))


@cache
def create_graph_us() -> float:
    """Returns how many microseconds longer a backward node takes if it also creates a graph."""
    _backward_node_us(True)
    return max(0.0, min(_backward_node_us(True) for _ in range(3)) - min(_backward_node_us(False) for _ in range(3)))


def _backward_node_us(creating: bool) -> float:
    """Calls the engine directly, without the hooks around `torch.autograd.grad`."""
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
    """Returns the shapes, such as `3000x3000`, of identity matrices from which operators take rows.

    A shape is returned if all plain tensors (no parameters) of that shape are identities.
    """
    shapes = {operator["shapes"][0] for operator in operators if operator["name"] in TAKE_ROWS and operator["shapes"]}
    square_shapes = {shape for shape in shapes if _is_square(shape)}
    if not square_shapes:
        return []
    identities: dict[str, bool] = {}
    with torch._C._DisableTorchDispatch():  # hidden from the script's dispatch modes
        for value in gc.get_objects():
            # Subclasses, such as parameters, may store their data elsewhere.
            shape = "x".join(map(str, value.shape)) if type(value) is Tensor else ""
            if shape in square_shapes:
                identities[shape] = identities.get(shape, True) and _is_identity(value)
    return sorted(shape for shape, all_are in identities.items() if all_are)


def _is_square(shape: str) -> bool:
    sides = shape.split("x")
    return len(sides) == 2 and sides[0] == sides[1] and int(sides[0]) > 1


def _is_identity(value: Tensor) -> bool:
    matrix = value.detach()
    if matrix.layout != torch.strided or matrix.is_meta:
        return False
    return bool((matrix.diagonal() == 1).all()) and int(matrix.count_nonzero()) == len(matrix)
