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
        budget_s: what a session of a short bench takes, all peers warm.
        search_s: what `tune` takes to find, compile, race and prove the plan of a long run, from an empty cache.
        gigabytes: what a process that trains it takes, roughly; so many are in memory at a time as there is room for.
        judged: samples on which loss and accuracy are taken after a session, each.
        drops: whether the network has dropout, whose masks differ between libraries.
    """

    name: str
    title: str
    data: Kind
    batch: int
    budget_s: float
    search_s: float
    gigabytes: float = 1.2
    judged: int = 2000
    drops: bool = False

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
        Workload("W1", "small CNN, batch 8", "fashion", 8, budget_s=130, search_s=60),
        Workload("W2", "small CNN, batch 128", "fashion", 128, budget_s=135, search_s=60),
        Workload("W3", "tutorial CNN, batch 128", "fashion", 128, budget_s=165, search_s=150, drops=True),
        Workload("W4", "MLP 784-128-10, batch 64", "fashion", 64, budget_s=125, search_s=45),
        Workload("W5", "MLP 784-2048-2048-10, batch 128", "fashion", 128, budget_s=140, search_s=60),
        Workload(
            "W6", "ResNet-18 on 32x32, batch 128", "images-32", 128, budget_s=130, search_s=600, gigabytes=2, judged=256
        ),
        Workload(
            "W7", "GPT of 10 M, context 256, batch 8", "text-256", 8, budget_s=90, search_s=300, gigabytes=2, judged=32
        ),
        Workload("W8", "LSTM on text, batch 64", "text-64", 64, budget_s=80, search_s=15, judged=128),
        Workload(
            "W9",
            "VGG-16 on 224x224, batch 4",
            "images-224",
            4,
            budget_s=140,
            search_s=400,
            gigabytes=4,
            judged=16,
            drops=True,
        ),
    )
}
"""On two cores. The budgets, and the searches of W1 to W5, come to half an hour; a proof takes as long as 250 steps, which
is more than there is left where steps take a second and more."""
