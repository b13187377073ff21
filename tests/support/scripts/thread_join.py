"""Trains, pickles a tensor now and then, waits for all threads that there are, and says how many are left."""

import io
import pickle
import threading
import time

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(20, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
writer = threading.Thread(target=time.sleep, args=(0.2,))
writer.start()
written = 0
for _ in range(25):
    loss = net(torch.randn(16, 20)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    written += len(pickle.dumps(net.weight.detach()))
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
try:
    io.StringIO().fileno()
except io.UnsupportedOperation as error:
    print(type(error) is io.UnsupportedOperation)
print(written, threading.active_count(), f"{float(loss):.9g}")
