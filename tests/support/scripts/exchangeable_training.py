"""Trains a small network with an optimizer and a loader that can be exchanged; prints figures and saves a checkpoint."""

import argparse
import copy
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--checkpoint")
parser.add_argument("--resume")
parser.add_argument("--fork", action="store_true")
parser.add_argument("--fail", action="store_true")
arguments = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(256, 16)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
loader = DataLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 2))
average = copy.deepcopy(model)
encoder = torch.optim.Adam(model[0].parameters(), lr=1e-3)
optimizer = torch.optim.AdamW(model[2:].parameters(), lr=1e-3)
if arguments.resume:
    saved = torch.load(arguments.resume)
    model.load_state_dict(saved["model"])
    encoder.load_state_dict(saved["encoder"])
    optimizer.load_state_dict(saved["optimizer"])
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=arguments.epochs * len(loader) // 2)
for epoch in range(arguments.epochs):
    total = 0.0
    for number, (batch, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(batch), labels) / 2
        scaler.scale(loss).backward()
        if number % 2:  # two batches for each update
            scaler.unscale_(encoder)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(encoder)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            encoder.zero_grad()
            optimizer.zero_grad()
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.01)
        total += loss.item()
    print(f"epoch {epoch}: loss {total / len(loader):.3f}", torch.rand(()).item())
    if arguments.fork and epoch == 1:  # a child trains on for a step and ends
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            optimizer.step()
            print("child", f"{sum(value.sum().item() for value in model.parameters()):.4f}", flush=True)
            os._exit(5)
        print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if arguments.fail and epoch == 1:
        raise ValueError("planted")
if arguments.checkpoint:
    optimizers = {"encoder": encoder.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({"model": model.state_dict(), **optimizers}, arguments.checkpoint)
print(optimizer.state_dict()["param_groups"], f"{sum(value.sum().item() for value in average.parameters()):.3f}")
print("end", file=sys.stderr)
