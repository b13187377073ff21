"""One file for each axis of a plan: what it changes in the parts of a step."""
