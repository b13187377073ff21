"""What the rules of `auto` choose on this machine for a small Task with Adam or SGD, beside what tests are about."""

from __future__ import annotations

from hotloop.plan import Plan
from hotloop.probe import allocator

KEPT = {"allocator": "keep"} if allocator.in_use() else {}
"""Only glibc can be told to keep memory."""

FUSED = {"optimizer": "fused", **KEPT}
BY_RULES = Plan(**FUSED)
