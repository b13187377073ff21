"""Hooks into torch: modules, optimizers, data loaders, the garbage collector."""
