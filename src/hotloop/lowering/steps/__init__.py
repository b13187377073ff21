"""The kinds of training step: compiled, recorded, of several ranks."""
