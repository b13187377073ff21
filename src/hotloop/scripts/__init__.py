"""Runs an unmodified script in a process of its own, with a function of hotloop's called inside before the script starts."""
