"""What all packages use: values, files, processes and random numbers."""
