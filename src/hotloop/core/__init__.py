"""What all packages stand on: values, files, processes and random numbers."""
