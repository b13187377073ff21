"""Where the time of a training step goes, of a Task or of an unmodified script, and what would make it faster.

Importing this package imports nothing, since it is imported in the script's process, which may not use torch at all.
"""
