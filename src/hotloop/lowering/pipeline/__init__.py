"""A model in stages: where to cut it, and how microbatches pass through."""
