"""What the rules of `auto` choose on this machine for a small Task with Adam or SGD, beside what tests are about."""

from __future__ import annotations

from hotloop.core.hardware import limits
from hotloop.plan import Plan

KEPT = {"allocator": "keep"} if limits.active_allocator() else {}
"""Only glibc can be told to keep memory."""

FUSED = {"optimizer": "fused", **KEPT}
BY_RULES = Plan(**FUSED)
