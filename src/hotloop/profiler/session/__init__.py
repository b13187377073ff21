"""The profiler session: which steps are recorded, and how."""
