"""Margins of races and limits of proofs, for code that needs no records."""

MARGIN = 0.02
"""Smallest relevant difference between step times, as a share."""

FIRST_PAIRS, FAR_BEHIND = 4, 0.05
"""Number of pairs after which a search may drop a plan, and the lag that is required with so few pairs."""

FAR_SLOWER = 2
"""Ratio of times at which a search drops a plan after still fewer pairs."""

# Fixed on five architectures and tried on five others: bench/parity_thresholds.py, docs/concepts/proof.md.
TYPICAL_LIMIT = 4.0
"""Limit of a tensor's median error, in multiples of the noise floor."""

WORST_LIMIT = 32.0
"""Limit of an error at one state, in multiples of the rounding error there."""

FREE_RUN_LIMIT = 8.0
"""Limit of a free run's drift, in multiples of the harmless baselines' drift."""

REDUCED_PRECISION_LIMIT = 8.0
"""Replaces the last two limits in a reduced precision, where rounding errors are large."""
