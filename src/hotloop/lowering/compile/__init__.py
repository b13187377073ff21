"""Captures a step as one graph and compiles the graph."""
