"""Text for messages: control characters become escapes, and long values are shortened."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, marks that reverse text direction, and surrogates of invalid UTF-8."""

_LONGEST = 160
"""Largest number of characters of a value in a message."""


def printable(text: str) -> str:
    """Returns the text with escapes such as `\\x1b` in place of control characters."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def meant(name: str, known: Iterable[str]) -> str:
    """Returns `did you mean 'epochs'?` for a name that resembles a known name; empty for other names."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def shortened(value: object) -> str:
    """Returns a value's `repr`, or a path, shortened for a message."""
    text = repr(value) if not isinstance(value, os.PathLike) else os.fspath(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"
