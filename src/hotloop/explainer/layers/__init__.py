"""The equations of layers, one file for each family."""
