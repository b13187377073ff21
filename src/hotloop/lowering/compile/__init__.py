"""Capturing a step as one graph, and compiling it."""
