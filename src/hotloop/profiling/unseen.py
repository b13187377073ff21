"""Keeps what watches out of sight: of torch's compiler, which would compile a watching function, of warnings, errors, pickles."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from pkgutil import resolve_name
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, TracebackType
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


def by_name(watching: Callable[..., Any], original: Any) -> Any:
    """What stands in place of an original: a module's function is pickled by its name, others are methods that bind.

    A plain function would have to be found where its name says; but what is replaced is one of several names of it, and
    it may be held for longer than it stands there.
    """
    is_function = isinstance(original, FunctionType) and original.__qualname__ == original.__name__
    if not (is_function or isinstance(original, BuiltinFunctionType | _Function)):
        return watching
    kind = type("function", (_Function,), {"__call__": staticmethod(watching)})
    return update_wrapper(kind(), original)


class _Function:
    """Looks like the function that it calls, by whose name it is known to others."""

    __call__: Callable[..., Any]
    __wrapped__: Any

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        binds = instance is not None and hasattr(self.__wrapped__, "__get__")
        return MethodType(self, instance) if binds else self

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self).__call__, name)

    def __repr__(self) -> str:
        return repr(type(self).__call__)

    def __copy__(self) -> _Function:
        return self

    def __deepcopy__(self, memo: Any) -> _Function:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        inside = bare(self)
        how = inside.__qualname__ if isinstance(inside, FunctionType) else inside.__reduce__()
        return (resolve_name, (f"{inside.__module__}:{how}",)) if isinstance(how, str) else how


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
