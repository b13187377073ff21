"""What all parts of the profiler use: steps, phases, call sites."""
