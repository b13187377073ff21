"""Plan -> Program. `order.py` is the place to start reading."""

from hotloop.lowering.order import lower
from hotloop.lowering.program import Outcome, Program

__all__ = ["Outcome", "Program", "lower"]
