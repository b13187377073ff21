"""The loop of PyTorch's tutorial: a DataLoader over a TensorDataset (docs.pytorch.org, "Optimizing model parameters")."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bench.peers.on_torch import SameOrder, judging, placed, tensors
from bench.speed.job import LR, Evaluate, Job, main
from bench.speed.models import build, loss_module


def looped(job: Job, dataset: Dataset) -> Evaluate:
    loader = DataLoader(dataset, batch_size=job.workload.batch, sampler=SameOrder(len(dataset)), drop_last=True)
    device = placed(job)
    model = build(job.workload.name).to(device)
    loss_of = loss_module(job.workload.name)()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    model.train()
    for _ in range(job.epochs):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            if not job.marks.step():
                return judging(model, job)
    return judging(model, job)


def train(job: Job) -> Evaluate:
    torch.manual_seed(0)
    x, y, *_ = tensors(job.workload)
    return looped(job, TensorDataset(x, y))


if __name__ == "__main__":
    main(train)
