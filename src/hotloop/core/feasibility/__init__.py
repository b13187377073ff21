"""Decides which plans can run for a Task on a machine, without torch."""
