"""Layers as equations, with the shapes of a batch, compared with autograd."""
