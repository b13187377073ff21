"""Times of modules and of Python lines."""
