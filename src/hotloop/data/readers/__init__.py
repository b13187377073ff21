"""Data sets from the user's own files: folders of images, and CSV files."""
