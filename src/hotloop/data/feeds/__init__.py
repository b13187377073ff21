"""Feeds: the batches of a Task from a position on, loaded, cut and copied to a device."""
