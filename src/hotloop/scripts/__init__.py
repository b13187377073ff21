"""Runs an unmodified script in a process of its own, and calls a hotloop function there before the script starts."""
