"""Errors of a training as one line that names the place and what to do."""
