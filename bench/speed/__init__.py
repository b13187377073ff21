"""hotloop beside what a user would pick instead: the same workload, on the same machine, in the same run."""
