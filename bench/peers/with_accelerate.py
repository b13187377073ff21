"""Hugging Face Accelerate's loop, as its quick tour has it."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from bench.peers.on_torch import SameOrder, judging, placed, tensors
from bench.speed.job import LR, Evaluate, Job, main
from bench.speed.models import build, loss_module


def train(job: Job) -> Evaluate:
    set_seed(0)
    accelerator = Accelerator(cpu=placed(job).type == "cpu")
    x, y, *_ = tensors(job.workload)
    model = build(job.workload.name)
    loss_of = loss_module(job.workload.name)()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.Adam(model.parameters(), lr=LR),
        DataLoader(TensorDataset(x, y), batch_size=job.workload.batch, sampler=SameOrder(len(x)), drop_last=True),
    )
    model.train()
    for _ in range(job.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            if not job.marks.step():
                return judging(accelerator.unwrap_model(model), job)
    return judging(accelerator.unwrap_model(model), job)


if __name__ == "__main__":
    main(train)
