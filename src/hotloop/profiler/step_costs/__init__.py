"""The costs of one training step, traced without memory for its tensors: operators, FLOPs, bytes and peak memory."""
