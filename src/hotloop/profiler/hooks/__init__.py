"""Hooks into torch: modules, optimizers, data loaders, phases; process resources."""
