"""Scripts that checks run as a user would."""
