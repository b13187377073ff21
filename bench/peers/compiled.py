"""The tutorial's loop with the model compiled, as "Introduction to torch.compile" on docs.pytorch.org does it."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from bench.peers.on_torch import SameOrder, judging, placed, tensors
from bench.speed.job import LR, Evaluate, Job, main
from bench.speed.models import build, loss_module


def train(job: Job) -> Evaluate:
    torch.manual_seed(0)
    x, y, *_ = tensors(job.workload)
    loader = DataLoader(TensorDataset(x, y), batch_size=job.workload.batch, sampler=SameOrder(len(x)), drop_last=True)
    device = placed(job)
    model = build(job.workload.name).to(device)
    compiled = torch.compile(model)
    loss_of = loss_module(job.workload.name)()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    model.train()
    for _ in range(job.epochs):
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = loss_of(compiled(inputs), targets)
            loss.backward()
            optimizer.step()
            if not job.marks.step():
                return judging(model, job)
    return judging(model, job)


if __name__ == "__main__":
    main(train)
