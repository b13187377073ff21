"""One command that proves on a GPU what the CPU tests can't: `python -m bench.gpu`, or `make gpu`. See docs/how-to/gpus-and-clusters.md."""
