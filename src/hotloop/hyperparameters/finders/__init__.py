"""Finders of a single hyper-parameter without a study: the learning rate, and the batch size."""
