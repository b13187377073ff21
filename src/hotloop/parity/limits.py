"""Limits of errors in proofs, in multiples of a noise floor."""

# Fixed on five architectures and tried on five others: bench/parity_thresholds.py, docs/concepts/proof.md.
TYPICAL_LIMIT = 4.0
"""Limit of a tensor's median error, in multiples of the noise floor."""

WORST_LIMIT = 32.0
"""Limit of an error at one state, in multiples of the rounding error there."""

FREE_RUN_LIMIT = 8.0
"""Limit of a free run's drift, in multiples of the harmless baselines' drift."""

REDUCED_PRECISION_LIMIT = 8.0
"""Replaces the last two limits in a reduced precision, where rounding errors are large."""
