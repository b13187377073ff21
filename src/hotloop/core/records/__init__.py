"""Frozen records of trainings, races, profiles and machines, as stored in files; without torch."""
