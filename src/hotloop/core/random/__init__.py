"""Random numbers: hotloop's own streams, and the generators in users' objects."""
