"""The profiler: where the time of a training step goes, of a Task or an unmodified script, and what would help.

This package imports nothing: the script's process imports the package, and may not use torch.
"""
