"""How fast plans are, side by side. `racing.py` is the place to start reading."""

from hotloop.measuring.racing import Entrant, measure

__all__ = ["Entrant", "measure"]
