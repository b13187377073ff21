"""Warns, and prints the tracebacks of errors that it catches, in every step of any kind; ends by the argument."""

import logging
import sys
import threading
import traceback
import warnings

import torch
import torch.nn.functional as F
from torch import nn


class Warns(nn.Module):
    def forward(self, inputs):
        warnings.warn("whoever calls the model", stacklevel=4)
        return inputs


def fail():
    nn.Sequential(model)(torch.ones(3, 7))


logging.basicConfig(stream=sys.stdout)
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
total = 0.0
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    loss = F.mse_loss(Warns()(model(torch.ones(8, 4))), torch.zeros(8))
    loss.backward()
    optimizer.step()
    total += float(loss)
    schedule.step(step)
    print(f"{total:.6f}", loss, file=sys.stdout)
    thread = threading.Thread(target=fail, name="another")
    thread.start()
    thread.join()
    try:
        fail()
    except RuntimeError:
        traceback.print_exc()
    for wrong in (lambda: F.cross_entropy(torch.ones(3, 2), torch.zeros(7)), torch.ones(3).item, loss.backward):
        try:
            wrong()
        except (RuntimeError, ValueError):
            logging.exception("caught")
