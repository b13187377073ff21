"""What went wrong while training, in one line that names the place and what to do."""

from hotloop.trouble.explain import explained
from hotloop.trouble.figures import nonfinite_figure
from hotloop.trouble.nonfinite import find_nonfinite

__all__ = ["explained", "find_nonfinite", "nonfinite_figure"]
