"""Ranks: processes that share a training. Each file is one concern, on an engine of torch.distributed."""
