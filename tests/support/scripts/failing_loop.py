"""Ends in one of several ways in the middle of training; which is the first argument."""

import atexit
import os
import sys
import time

import torch
from torch import nn

how = sys.argv[1]
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


class Broken(nn.Module):
    def forward(self, inputs):
        raise ValueError("broken on purpose")


def stop(step):
    if how == "raise":
        raise RuntimeError(f"at {step}")
    if how == "forward":
        nn.Sequential(Broken())(torch.ones(1))
    elif how == "backward":
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        loss.backward()
    elif how == "exit":
        sys.exit(3)
    elif how == "exit with words":
        sys.exit("no more")
    elif how == "interrupted":
        raise KeyboardInterrupt
    elif how == "interrupted, then a text":  # by evaluating one Python forgets that it was interrupted
        atexit.register(lambda: exec("pass"))
        raise KeyboardInterrupt
    elif how == "os._exit":
        os._exit(4)


for step in range(1_000_000):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 4)).pow(2).sum()
    loss.backward()
    optimizer.step()
    if how == "wait":
        if step == 40:
            print("waiting", flush=True)
        time.sleep(0.01)
    elif step == int(sys.argv[2]):
        stop(step)
