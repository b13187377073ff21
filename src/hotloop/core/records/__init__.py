"""Frozen records of trainings, races, profiles and machines, as files hold them. No torch."""
