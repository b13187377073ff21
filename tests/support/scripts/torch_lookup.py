"""Asks whether torch could be imported before it imports it, as libraries do; then trains."""

import importlib.util

for name in ("torch", "cProfile", "torch"):
    assert importlib.util.find_spec(name) is not None

import torch  # noqa: E402
from torch import nn  # noqa: E402

print(vars(torch.__spec__.loader), importlib.util.find_spec("torch._inductor.compile_fx").name)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(60):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 4)).pow(2).sum()
    loss.backward()
    optimizer.step()
print(importlib.util.find_spec("torch") is torch.__spec__)
