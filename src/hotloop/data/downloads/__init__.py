"""Downloads of built-in data sets, and the files that they come in."""
