"""Processes: signals, deadlines, and child processes that end with their parent."""
