"""Text that can be shown: control characters never reach a terminal as they are."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""All but tab and newline; with them the marks that reverse the direction of text, and bytes of names that are no UTF-8."""

_LONGEST = 160
"""Characters of a value in a message."""


def printable(text: str) -> str:
    """`text` with escapes such as `\\x1b` in place of control characters."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def meant(name: str, known: Iterable[str]) -> str:
    """`did you mean 'epochs'?`, for a name that is like a known one; empty for others."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def shortened(value: object) -> str:
    """A value for a message, as Python writes it, in a line of limited length."""
    text = repr(value) if not isinstance(value, os.PathLike) else os.fspath(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"
