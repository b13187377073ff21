"""How fast plans are, side by side. `measure.py` is the place to start reading."""
