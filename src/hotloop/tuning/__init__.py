"""Looks for the fastest plan that is proven equal."""
