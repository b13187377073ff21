"""Task + Plan -> Program. `build.py` is the place to start reading."""
