"""Which plans can be run for a Task on a machine, and why not the others; without torch."""
