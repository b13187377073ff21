"""Samples that are changed one by one in functions that the data set calls."""

import torch
from common import Stopwatch, arguments, mlp
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

args = arguments()


class Compose:
    def __call__(self, x: Tensor) -> Tensor:
        return shifted(x)


def shifted(x: Tensor) -> Tensor:
    row, column = torch.randint(0, 5, (2,)).tolist()
    x = F.pad(x, (2, 2, 2, 2))[row : row + 16, column : column + 16]
    return (x - x.mean()) / (x.std() + 1e-5)


class Pictures(Dataset):
    def __init__(self) -> None:
        self.x, self.change = torch.rand(16 * args.steps, 16, 16), Compose()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> Tensor:  # plant
        x = self.x[number]
        return self.change(x) if args.variant == "plant" else x


class Changed(Pictures):
    def __getitem__(self, number: int) -> Tensor:  # other
        return shifted(super().__getitem__(number))


def together(samples: list[Tensor]) -> Tensor:
    return torch.stack([shifted(x) for x in samples] if args.variant == "decoy" else samples)


net = mlp(256, 64, 10)
optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=True)
pictures = Changed() if args.variant == "other" else Pictures()
watch = Stopwatch()
for x in DataLoader(pictures, 16, shuffle=True, collate_fn=together if args.variant == "decoy" else None):
    loss = net(x.flatten(1)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()
