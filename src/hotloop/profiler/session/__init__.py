"""One profile: its steps, its schedule and its observers."""
