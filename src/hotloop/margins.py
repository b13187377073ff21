"""Margins of races, for code that needs no records."""

MARGIN = 0.02
"""Smallest relevant difference between step times, as a share."""

FIRST_PAIRS, FAR_BEHIND = 4, 0.05
"""Number of pairs after which a search may drop a plan, and the lag that is required with so few pairs."""

FAR_SLOWER = 2
"""Ratio of times at which a search drops a plan after still fewer pairs."""
