"""Lightning's Trainer. Its bar, logger and checkpoints are off, which makes it faster than it is by default."""

from __future__ import annotations

import logging
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from bench.peers.on_torch import SameOrder, judging, placed, tensors
from bench.speed.job import LR, Evaluate, Job, main
from bench.speed.marks import Marks
from bench.speed.models import build, loss_module


class Module(lightning.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.model, self.loss_of = build(name), loss_module(name)()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss_of(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=LR)


class Counting(lightning.Callback):
    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if not self.marks.step():
            trainer.should_stop = True


def train(job: Job) -> Evaluate:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    x, y, *_ = tensors(job.workload)
    module = Module(job.workload.name)
    trainer = lightning.Trainer(
        max_epochs=job.epochs,
        accelerator=placed(job).type,
        devices=1,
        callbacks=[Counting(job.marks)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    data = TensorDataset(x, y)
    trainer.fit(module, DataLoader(data, job.workload.batch, sampler=SameOrder(len(data)), drop_last=True))
    return judging(module.model, job)


if __name__ == "__main__":
    main(train)
