"""What is trained: sizes and data of each workload. No torch, so that a peer without it needs none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["fashion", "images-32", "images-224", "text-256", "text-64"]

HOME = Path(__file__).parents[2] / ".bench"
"""Data, caches of compilers and journals; git ignores it."""


@dataclass(frozen=True)
class Workload:
    """One thing to train.

    Attributes:
        name: such as `W1`.
        title: in a few words.
        data: which data set, see `data.py`.
        batch: samples in a step.
        budget_s: what it may take of a short bench, besides what those before it have left over.
        gigabytes: what a process that trains it takes, roughly; so many are in memory at a time as there is room for.
        judged: samples on which loss and accuracy are taken after a session, each.
    """

    name: str
    title: str
    data: Kind
    batch: int
    budget_s: float
    gigabytes: float = 1.2
    judged: int = 2000

    def together(self, free_bytes: float) -> int:
        """How many processes of it go into so much memory; two at the least, since one alone compares with nothing."""
        return max(2, int(free_bytes / (1e9 * self.gigabytes)))

    @property
    def grey(self) -> bool:
        """Whether it is a small network on Fashion-MNIST, of which there are spellings without PyTorch."""
        return self.data == "fashion"


WORKLOADS = {
    one.name: one
    for one in (
        Workload("W1", "small CNN, batch 8", "fashion", 8, budget_s=180),
        Workload("W2", "small CNN, batch 128", "fashion", 128, budget_s=190),
        Workload("W3", "tutorial CNN, batch 128", "fashion", 128, budget_s=220),
        Workload("W4", "MLP 784-128-10, batch 64", "fashion", 64, budget_s=170),
        Workload("W5", "MLP 784-2048-2048-10, batch 128", "fashion", 128, budget_s=190),
        Workload("W6", "ResNet-18 on 32x32, batch 128", "images-32", 128, budget_s=210, gigabytes=2, judged=256),
        Workload("W7", "GPT of 10 M, context 256, batch 8", "text-256", 8, budget_s=170, gigabytes=2, judged=32),
        Workload("W8", "LSTM on text, batch 64", "text-64", 64, budget_s=120, judged=128),
        Workload("W9", "VGG-16 on 224x224, batch 4", "images-224", 4, budget_s=210, gigabytes=4, judged=16),
    )
}
"""The budgets come to 1,660 s: with what is between them, a short bench ends within half an hour. On two cores and with
empty caches a peer's start takes 4 to 9 s, and hotloop's 25 s to compile a small network's step and 90 s a large one's."""
