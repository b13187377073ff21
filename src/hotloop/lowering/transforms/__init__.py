"""One file for each axis of a plan, which changes the context of lowering."""
