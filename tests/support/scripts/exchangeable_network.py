"""Trains a small network that `hotloop run` compiles at once, and waits for its forks; saves a checkpoint; ends with 3."""

import copy
import gc
import sys
import time

import torch
from torch import nn

from hotloop.exchanges import modules
from hotloop.exchanges.modules import ModuleSite

modules._MIN_TRAINED_S, modules._MIN_GAIN, modules._IN_PLACE_S = 0.0, 0.0, -1e9

torch.manual_seed(0)
inputs = torch.randn(16, 8)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    for site in [value for value in gc.get_objects() if type(value) is ModuleSite]:
        while site.process is not None and site.process.poll() is None:
            time.sleep(0.05)
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}", torch.rand(()).item())
print(type(model).__name__, sorted(vars(copy.deepcopy(model))))
torch.save({"model": model, "state": model.state_dict()}, sys.argv[1])
sys.exit(3)
