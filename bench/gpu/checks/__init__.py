"""The checks, a file each; `run(part, setting)` runs one part. Which parts there are is in `bench.gpu.catalogue`."""
