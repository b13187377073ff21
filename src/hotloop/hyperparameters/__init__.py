"""Hyper-parameter search: exact, resumable, and with the same result for any number of processes."""
