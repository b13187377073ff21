"""Faults to plant into a Program's eager step, by kind."""
