"""Advice on hardware for a Task, a script or a model, and the record of predictions that later runs measure."""
