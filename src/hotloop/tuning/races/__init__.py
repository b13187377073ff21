"""Measures plans side by side, in alternating windows; `measure.py` has the main function."""
