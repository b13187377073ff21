"""Windows of a script's steps with and without exchanges."""
