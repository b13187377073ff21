"""Packed trials: trials of one shape that train together in one program."""
