"""Costs of a script's use of autograd: unused gradients, repeated forward passes."""
