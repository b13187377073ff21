"""Keeps what watches out of sight: of torch's compiler, which would compile a watching function, of warnings, errors, pickles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import update_wrapper
from inspect import CO_OPTIMIZED
from pkgutil import resolve_name
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

from hotloop.scripts.traceback_frames import HIDDEN

Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])

_SKIP_FRAME = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
"""The function itself runs as it is; what it calls is looked at as before."""


def hide_from_compiler(watching: Wrapper) -> Wrapper:
    """Marks a function, or all functions of a class."""
    functions = vars(watching).values() if isinstance(watching, type) else [watching]
    for function in functions:
        function = getattr(function, "__func__", None) or getattr(function, "fget", None) or function
        if isinstance(function, FunctionType):
            eval_frame.set_code_exec_strategy(function.__code__, _SKIP_FRAME)
    return watching


def hide_from_warnings(makes: Wrapper) -> Wrapper:
    """For what makes functions that stand around others: warnings from inside name the caller's line, not theirs."""
    makes.__code__ = _hidden_code(makes.__code__)
    return makes


def as_replacement(watching: Callable[..., Any], original: Any) -> Any:
    """What stands in place of an original: a module's function is pickled by its name, others are methods that bind.

    A plain function would have to be found where its name says; but what is replaced is one of several names of it, and
    it may be held for longer than it stands there.
    """
    is_function = isinstance(original, FunctionType) and original.__qualname__ == original.__name__
    if not (is_function or isinstance(original, BuiltinFunctionType | _ReplacementFunction)):
        return watching
    kind = type("function", (_ReplacementFunction,), {"__call__": staticmethod(watching)})
    return update_wrapper(kind(), original)


class _ReplacementFunction:
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

    def __copy__(self) -> _ReplacementFunction:
        return self

    def __deepcopy__(self, memo: Any) -> _ReplacementFunction:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        inside = unwrap(self)
        how = inside.__qualname__ if isinstance(inside, FunctionType) else inside.__reduce__()
        return (resolve_name, (f"{inside.__module__}:{how}",)) if isinstance(how, str) else how


def unwrap(function: Any) -> Any:
    """What stands inside of all functions that were put around it."""
    while getattr(getattr(function, "__code__", None), "co_filename", "") == HIDDEN:
        function = function.__wrapped__
    return function


def _hidden_code(code: CodeType) -> CodeType:
    """The code under a file name over which `warnings` counts no frame, as over those of Python's own import."""
    consts = tuple(_hidden_code(const) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_filename=HIDDEN, co_consts=consts)


def strip_frame(error: BaseException) -> TracebackType | None:
    """An error's traceback without the frame that has just caught it; a bare `raise` adds none."""
    trace = error.__traceback__
    return None if trace is None else trace.tb_next


_HAS_SHARED_LOCALS = sys.version_info < (3, 13)

_OWN_REFERENCES = 3
"""References to a dictionary that nobody else has: the frame's, that of a variable here, and that of an argument."""


def can_keep_locals(code: CodeType) -> bool:
    """Whether a function may hold its own dictionary of variables, in which nothing must change behind its back."""
    return _HAS_SHARED_LOCALS and not {"locals", "f_locals"}.isdisjoint(code.co_names)


@hide_from_compiler
def frame_variables(frame: FrameType) -> dict[str, Any] | None:
    """Those of a function by name; None of other code, and of a function that may hold the dictionary itself."""
    if not frame.f_code.co_flags & CO_OPTIMIZED or can_keep_locals(frame.f_code):
        return None
    found = dict(frame.f_locals)
    clear_frame_variables(frame)
    return found


@hide_from_compiler
def clear_frame_variables(frame: FrameType) -> None:
    """Empties the dictionary, which would keep alive what is in it, unless somebody else has it too."""
    if not _HAS_SHARED_LOCALS or not frame.f_code.co_flags & CO_OPTIMIZED or can_keep_locals(frame.f_code):
        return
    kept = frame.f_locals
    if sys.getrefcount(kept) <= _OWN_REFERENCES:
        kept.clear()


_MAX_LIMIT = 2**31 - 1


class RecursionHeadrooms:
    """Those of this process, in whatever order they are given back.

    Attributes:
        made: how many there are.
        before: the limit without any.
        mine: as it was set last.
    """

    def __init__(self) -> None:
        self.count, self.original_limit, self.own_limit = 0, 0, 0

    def change(self, by: int) -> None:
        """A limit that the script has set meanwhile is the one that goes for it."""
        now = sys.getrecursionlimit()
        if not self.count or now != self.own_limit:
            self.original_limit = now
        self.count += by
        self.own_limit = min(self.original_limit + self.count * (self.original_limit // 2), _MAX_LIMIT)
        with suppress(RecursionError):  # calls are nested deeper by now
            sys.setrecursionlimit(self.own_limit)


_HEADROOMS = RecursionHeadrooms()


class RecursionHeadroom:
    """Lets calls nest half as deep again while it is made."""

    def __init__(self) -> None:
        self._made = False

    def make(self) -> None:
        if not self._made:
            self._made = True
            _HEADROOMS.change(1)

    def give_back(self) -> None:
        if self._made:
            self._made = False
            _HEADROOMS.change(-1)
