"""Checks of a Task before and during its first steps: mistakes that torch doesn't report."""
