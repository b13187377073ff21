"""The engine axis: a step written out in array operations of `hotloop.arrays`."""
