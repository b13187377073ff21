"""Proof that a plan computes the same as the baseline."""
