"""Kinds of training step: compiled, captured as a CUDA graph, of several ranks or optimizers."""
