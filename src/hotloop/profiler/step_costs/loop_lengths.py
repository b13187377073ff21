"""The lengths of the loops around a script's training step, from its source and the values of its names."""

from __future__ import annotations

import ast
import builtins
import linecache
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

_WRAPPERS = ("enumerate", "iter", "list", "reversed", "sorted", "tqdm", "track", "prepare")
"""Functions, and methods, of as many results as their first argument has."""

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}


def loop_lengths(frame: FrameType | None, is_left_out: Callable[[str], bool]) -> list[int | None]:
    """Returns the lengths of the loops that run now, the outermost first; None for a length that isn't known.

    Args:
        frame: the innermost; the loops of its callers count too.
        is_left_out: whether a file's loops don't count, such as torch's.
    """
    found: list[int | None] = []
    while frame is not None:
        if not is_left_out(frame.f_code.co_filename):
            found = [*(_length(loop, frame) for loop in _running_loops(frame)), *found]
        frame = frame.f_back
    return found


def _running_loops(frame: FrameType) -> Iterator[ast.For | ast.AsyncFor | ast.While]:
    """Yields the loops around the current line in the frame's function, the outermost first."""
    try:
        node: ast.AST = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except SyntaxError:
        return
    loops: list[ast.For | ast.AsyncFor | ast.While] = []
    line = frame.f_lineno
    while True:
        inner = next(
            (child for child in ast.iter_child_nodes(node) if _first_line(child) <= line <= _last_line(child)), None
        )
        if inner is None:
            break
        if isinstance(node, ast.For | ast.AsyncFor | ast.While) and any(inner is one for one in node.body):
            loops.append(node)
        if isinstance(inner, _SCOPES):
            loops = []
        node = inner
    yield from loops


def _first_line(node: ast.AST) -> int:
    return getattr(node, "lineno", 1 << 30)


def _last_line(node: ast.AST) -> int:
    return getattr(node, "end_lineno", 0) or 0


def _length(loop: ast.For | ast.AsyncFor | ast.While, frame: FrameType) -> int | None:
    if isinstance(loop, ast.While):
        return None
    with suppress(Exception):  # a name that isn't bound any more, or a length that the user's code refuses
        return _length_of(loop.iter, frame)
    return None


def _length_of(node: ast.expr, frame: FrameType) -> int | None:
    if not isinstance(node, ast.Call):
        value = _value(node, frame)
        return None if isinstance(value, str) else len(value)
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name in ("range", "trange"):
        return len(range(*(_value(one, frame) for one in node.args)))
    if name == "zip":
        lengths = [_length_of(one, frame) for one in node.args]
        return min(one for one in lengths if one is not None) if None not in lengths else None
    return _length_of(node.args[0], frame) if name in _WRAPPERS else None


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Returns the value of an expression of names, attributes, numbers and `len`; no other function is called."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return next(names[node.id] for names in (frame.f_locals, frame.f_globals, vars(builtins)) if node.id in names)
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        return _value(node.value, frame)[_value(node.slice, frame)]
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_value(node.left, frame), _value(node.right, frame))
    if isinstance(node, ast.List | ast.Tuple):
        return node.elts
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("len", "int"):
        return getattr(builtins, node.func.id)(_value(node.args[0], frame))
    raise ValueError(ast.dump(node))
