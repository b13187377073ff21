"""Watches training steps: of a Task in this process, and of an unmodified script in a process of its own.

Importing this package imports nothing, since it is imported in the script's process, which may not use torch at all.
"""
