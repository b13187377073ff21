"""Keeps the compiler of torch away from what watches: it would compile a watching function that it meets on its way."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

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
