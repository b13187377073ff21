"""The engine axis: a step in array operations of `hotloop.arrays`."""
