"""The same loop over a data set that transforms each sample when it is asked for it, as those of torchvision do."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from bench.peers.tutorial import looped
from bench.speed.data import Data, load
from bench.speed.job import Evaluate, Job, main


class Images(Dataset):
    """Pixels to numbers from 0 to 1, then standardised: `ToTensor` and `Normalize`."""

    def __init__(self, data: Data) -> None:
        self.x, self.y = data.x, data.y
        self.mean, self.std = data.scale

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.x[index])
        image = image.reshape(-1, *image.shape[-2:]).to(torch.float32).div(255)
        return image.sub_(self.mean).div_(self.std), int(np.int64(self.y[index]))


def train(job: Job) -> Evaluate:
    torch.manual_seed(0)
    return looped(job, Images(load(job.workload.data)))


if __name__ == "__main__":
    main(train)
