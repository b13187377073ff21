"""Keeps what watches out of sight: of torch's compiler, which would compile a watching function, of warnings and errors."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType, TracebackType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

from hotloop.profiling.sites import HIDDEN

Watching = TypeVar("Watching", bound=Callable[..., Any])

_SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
"""The function itself runs as it is; what it calls is looked at as before."""


def unseen(watching: Watching) -> Watching:
    """Marks a function, or all functions of a class."""
    functions = vars(watching).values() if isinstance(watching, type) else [watching]
    for function in functions:
        function = getattr(function, "__func__", None) or getattr(function, "fget", None) or function
        if isinstance(function, FunctionType):
            eval_frame.set_code_exec_strategy(function.__code__, _SKIPPED)
    return watching


def out_of_warnings(makes: Watching) -> Watching:
    """For what makes functions that stand around others: warnings from inside name the caller's line, not theirs."""
    makes.__code__ = _hidden(makes.__code__)
    return makes


def bare(function: Any) -> Any:
    """What stands inside of all functions that were put around it."""
    while getattr(getattr(function, "__code__", None), "co_filename", "") == HIDDEN:
        function = function.__wrapped__
    return function


def _hidden(code: CodeType) -> CodeType:
    """The code under a file name over which `warnings` counts no frame, as over those of Python's own import."""
    consts = tuple(_hidden(const) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_filename=HIDDEN, co_consts=consts)


def beyond(error: BaseException) -> TracebackType | None:
    """An error's traceback without the frame that has just caught it; a bare `raise` adds none."""
    trace = error.__traceback__
    return None if trace is None else trace.tb_next
