"""Lowers a Plan onto a Task, which gives a Program; `build.py` has the main function."""
