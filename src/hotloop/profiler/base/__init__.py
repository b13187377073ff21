"""What all parts of the profiler stand on: steps, phases, call sites."""
