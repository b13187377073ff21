"""Each file trains a workload the way its library's documentation tells a user to; it runs as a process of its own.

`python -m bench.peers.tutorial W4 --epochs 1` runs one by hand.
"""
