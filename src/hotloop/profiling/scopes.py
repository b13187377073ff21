"""Variables of functions that run, read without a trace.

Before Python 3.13 a frame keeps one dictionary of its variables, which `locals()` gives to the function itself, and which
is filled in anew by whoever reads or traces the frame.
"""

from __future__ import annotations

import sys
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType
from typing import Any

from hotloop.profiling.unseen import unseen

_SHARED = sys.version_info < (3, 13)
_OURS = 3
"""References to a dictionary that nobody else has: the frame's, that of a variable here, and that of an argument."""


def keeps_variables(code: CodeType) -> bool:
    """Whether a function may hold its own dictionary of variables, in which nothing must change behind its back."""
    return _SHARED and not {"locals", "f_locals"}.isdisjoint(code.co_names)


@unseen
def variables(frame: FrameType) -> dict[str, Any] | None:
    """Those of a function by name; None of other code, and of a function that may hold the dictionary itself."""
    if not frame.f_code.co_flags & CO_OPTIMIZED or keeps_variables(frame.f_code):
        return None
    found = dict(frame.f_locals)
    forget_variables(frame)
    return found


@unseen
def forget_variables(frame: FrameType) -> None:
    """Empties the dictionary, which would keep alive what is in it, unless somebody else has it too."""
    if not _SHARED or not frame.f_code.co_flags & CO_OPTIMIZED or keeps_variables(frame.f_code):
        return
    kept = frame.f_locals
    if sys.getrefcount(kept) <= _OURS:
        kept.clear()
