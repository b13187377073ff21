"""Processes that share a training (ranks): launch, process group, watchdog, DDP, FSDP and Ray."""
