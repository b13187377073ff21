"""FLOPs and bytes of operators and layers, and the least time that a machine can take for them. No torch."""

from hotloop.counting.calls import Counts
from hotloop.counting.limits import least_ms, limits_of, precision_in, precision_of
from hotloop.counting.operators import operator_counts
from hotloop.counting.shares import with_limit_shares

__all__ = ["Counts", "least_ms", "limits_of", "operator_counts", "precision_in", "precision_of", "with_limit_shares"]
