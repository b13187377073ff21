"""The profiler's base: step detection, phases, schedule, call sites."""
