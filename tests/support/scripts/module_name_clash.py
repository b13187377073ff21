"""Trains beside files that have names of Python's modules, and uses one of them before torch, after it, or never."""

import importlib
import sys

when = sys.argv[1]
if when == "before":
    import statistics
import torch  # noqa: E402

if when == "after":
    import statistics
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(60):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
if when != "never":
    print(statistics.own, importlib.import_module("resource").own, importlib.import_module("statistics") is statistics)
