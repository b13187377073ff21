"""Pipeline parallelism: the split of a model into stages, and the way of microbatches through these."""
