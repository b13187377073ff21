"""What went wrong while training, in one line that names the place and what to do."""

from hotloop.trouble.explain import explained
from hotloop.trouble.figures import nonfinite_figure
from hotloop.trouble.nonfinite import find_nonfinite
from hotloop.trouble.of_callback import explained_of_callback
from hotloop.trouble.of_rank import explained_of_rank, nonfinite_of_ranks

__all__ = [
    "explained",
    "explained_of_callback",
    "explained_of_rank",
    "find_nonfinite",
    "nonfinite_figure",
    "nonfinite_of_ranks",
]
