"""Hides profiler functions from torch's compiler, from warnings and tracebacks, and from pickle."""

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

from hotloop.scripts.child import HIDDEN

Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])

_SKIP_FRAME = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
"""Dynamo runs the function itself uncompiled; functions that it calls are compiled as usual."""


def hide_from_compiler(target: Wrapper) -> Wrapper:
    """Excludes a function, or all functions of a class, from compilation."""
    functions = vars(target).values() if isinstance(target, type) else [target]
    for function in functions:
        function = getattr(function, "__func__", None) or getattr(function, "fget", None) or function
        if isinstance(function, FunctionType):
            eval_frame.set_code_exec_strategy(function.__code__, _SKIP_FRAME)
    return target


def hide_from_warnings(factory: Wrapper) -> Wrapper:
    """Decorates a factory of wrapper functions: warnings name the line of the wrapper's caller."""
    factory.__code__ = _hidden_code(factory.__code__)
    return factory


def as_replacement(wrapper: Callable[..., Any], original: Any) -> Any:
    """Returns the object that replaces an original: methods bind as usual; a module's function is pickled by name.

    A plain function would be pickled by its own name; but the replaced name is one of several names of the original,
    and user code may hold the replacement after its removal.
    """
    is_function = isinstance(original, FunctionType) and original.__qualname__ == original.__name__
    if not (is_function or isinstance(original, BuiltinFunctionType | _ReplacementFunction)):
        return wrapper
    kind = type("function", (_ReplacementFunction,), {"__call__": staticmethod(wrapper)})
    return update_wrapper(kind(), original)


class _ReplacementFunction:
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
    while getattr(getattr(function, "__code__", None), "co_filename", "") == HIDDEN:
        function = function.__wrapped__
    return function


def _hidden_code(code: CodeType) -> CodeType:
    """Code with a file name that `warnings` skips when it counts frames, as it skips Python's import frames."""
    consts = tuple(_hidden_code(const) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_filename=HIDDEN, co_consts=consts)


def strip_frame(error: BaseException) -> TracebackType | None:
    """Returns the error's traceback without the frame that caught the error; a bare `raise` adds none."""
    trace = error.__traceback__
    return None if trace is None else trace.tb_next


_HAS_SHARED_LOCALS = sys.version_info < (3, 13)

_OWN_REFERENCES = 3
"""References to a dictionary without other owners: the frame's, the local variable's, the argument's."""


def can_keep_locals(code: CodeType) -> bool:
    """Returns whether a function may store its own dictionary of variables, which must not be changed then."""
    return _HAS_SHARED_LOCALS and not {"locals", "f_locals"}.isdisjoint(code.co_names)


@hide_from_compiler
def frame_variables(frame: FrameType) -> dict[str, Any] | None:
    """Returns a function's variables by name; None if the function may store the dictionary, and for other code."""
    if not frame.f_code.co_flags & CO_OPTIMIZED or can_keep_locals(frame.f_code):
        return None
    found = dict(frame.f_locals)
    clear_frame_variables(frame)
    return found


@hide_from_compiler
def clear_frame_variables(frame: FrameType) -> None:
    """Empties the dictionary, which would keep its values alive, unless the dictionary has another owner."""
    if not _HAS_SHARED_LOCALS or not frame.f_code.co_flags & CO_OPTIMIZED or can_keep_locals(frame.f_code):
        return
    variables = frame.f_locals
    if sys.getrefcount(variables) <= _OWN_REFERENCES:
        variables.clear()


_MAX_LIMIT = 2**31 - 1


class RecursionHeadrooms:
    """All headrooms of this process; they may be given back in any order."""

    def __init__(self) -> None:
        self.count, self.original_limit, self.own_limit = 0, 0, 0

    def change(self, by: int) -> None:
        """Adds headrooms; a limit that the script has set meanwhile becomes the original limit."""
        now = sys.getrecursionlimit()
        if not self.count or now != self.own_limit:
            self.original_limit = now
        self.count += by
        self.own_limit = min(self.original_limit + self.count * (self.original_limit // 2), _MAX_LIMIT)
        with suppress(RecursionError):  # the current call depth exceeds the new limit
            sys.setrecursionlimit(self.own_limit)


_HEADROOMS = RecursionHeadrooms()


class RecursionHeadroom:
    """Allows half as many nested calls again, for the profiler's frames."""

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
