"""Downloads of built-in data sets, and readers of their files."""
