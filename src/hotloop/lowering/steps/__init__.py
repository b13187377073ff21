"""Kinds of training step: compiled, as a CUDA graph, of several ranks, of several optimizers."""
