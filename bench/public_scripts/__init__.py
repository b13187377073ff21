"""Public training scripts that `bench.run_scripts` measures: where they are, how they are started, and their data."""
