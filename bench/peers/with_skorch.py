"""skorch: a scikit-learn estimator around the module."""

from __future__ import annotations

from typing import Any

import torch
from skorch import NeuralNet
from skorch.callbacks import Callback

from bench.peers.on_torch import SameOrder, judging, placed, tensors
from bench.speed.job import LR, Evaluate, Job, main
from bench.speed.marks import Marks
from bench.speed.models import build, loss_module


class Counting(Callback):
    """Ends training the way its documentation names: KeyboardInterrupt keeps what was trained."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def on_batch_end(self, net: Any, training: bool = True, **_: Any) -> None:
        if training and not self.marks.step():
            raise KeyboardInterrupt


def train(job: Job) -> Evaluate:
    torch.manual_seed(0)
    x, y, *_ = tensors(job.workload)
    net = NeuralNet(
        build(job.workload.name),
        criterion=loss_module(job.workload.name),
        optimizer=torch.optim.Adam,
        lr=LR,
        device=placed(job).type,
        batch_size=job.workload.batch,
        max_epochs=job.epochs,
        iterator_train__sampler=SameOrder(len(x)),
        iterator_train__drop_last=True,
        train_split=None,
        callbacks=[("counting", Counting(job.marks))],
        verbose=0,
    )
    net.fit(x, y)
    return judging(net.module_, job)


if __name__ == "__main__":
    main(train)
