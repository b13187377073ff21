"""A training script as a user writes it, which knows nothing of hotloop; `hotloop profile` runs it unmodified.

python bench/gpu/scripts/loop.py --device cuda --plant synchronisation
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Pool(torch.autograd.Function):
    """Max pooling of 2x2 whose backward puts each gradient to its place by index: a slow operator."""

    @staticmethod
    def forward(ctx, x):
        best, where = F.max_pool2d(x, 2, return_indices=True)
        ctx.save_for_backward(where)
        ctx.shape = x.shape
        return best

    @staticmethod
    def backward(ctx, grad):
        (where,) = ctx.saved_tensors
        n, c, _, width = ctx.shape
        i = torch.arange(n, device=grad.device).view(-1, 1, 1, 1).expand_as(where)
        j = torch.arange(c, device=grad.device).view(1, -1, 1, 1).expand_as(where)
        dx = grad.new_zeros(ctx.shape)
        dx.index_put_((i, j, where // width, where % width), grad, accumulate=True)  # slow-operator
        return dx


class Net(nn.Module):
    def __init__(self, pool, width):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.last = nn.Linear(width * 49, 10)
        self.pool = pool

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.last(x.flatten(1))


def train(device, steps, plant="none", batch=128, width=32):
    torch.manual_seed(0)
    net = Net(Pool.apply if plant == "slow-operator" else lambda x: F.max_pool2d(x, 2), width).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    images, labels = torch.rand(8 * batch, 1, 28, 28, device=device), (torch.arange(8 * batch) % 10).to(device)
    total = 0.0
    for step in range(steps):
        rows = slice(batch * (step % 8), batch * (step % 8 + 1))
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        if plant == "synchronisation":
            total += loss.item()  # synchronisation
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plant", choices=("none", "synchronisation", "slow-operator"), default="none")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()
    train(args.device, args.steps, args.plant, args.batch, args.width)
