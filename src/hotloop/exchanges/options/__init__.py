"""Options of the whole process that make steps faster."""
