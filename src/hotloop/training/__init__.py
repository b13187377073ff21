"""One training from start to end: loop, run folder, checkpoints, early stopping."""
