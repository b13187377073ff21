"""Models wrapped for several ranks: DDP, FSDP, whole-batch statistics and random numbers."""
