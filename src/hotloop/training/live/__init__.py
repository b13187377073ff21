"""Trainings that change their plan between two steps: the search while training goes on, and the replay of a run."""
