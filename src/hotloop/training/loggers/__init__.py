"""Thin adapters of libraries that record figures of trainings, and the thread that calls them."""
