"""Trainings that have little or nothing to win, for `bench.run_scripts`.

    python bench/small_training.py adam|rmsprop|acting|growing STEPS

adam, rmsprop   a network of two layers; RMSprop has no exchange
acting          two single calls of the network for each update, and one call of a second network
growing         a small network, then a larger one with convolutions
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


def layers(*sizes: int) -> nn.Sequential:
    parts = list[nn.Module]()
    for before, after in itertools.pairwise(sizes):
        parts += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def train(optimizer: torch.optim.Optimizer, steps: int, loss_of: Callable[[int], Tensor]) -> None:
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.6f}")


def fit(kind: str, steps: int) -> None:
    network, inputs, wanted = layers(80, 112, 80), torch.rand(24, 80), torch.rand(24, 80)
    optimizers = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}
    optimizer = optimizers[kind](network.parameters(), lr=2e-4)
    train(optimizer, steps, lambda step: functional.mse_loss(network(inputs), wanted))


def act(steps: int) -> None:
    network, other = layers(6, 96, 96, 3), layers(6, 96, 96, 3)

    def loss_of(step: int) -> Tensor:
        state = torch.rand(1, 6)
        for _ in range(2):
            state = state * 0.9 + 0.01 * network(state).argmax()
        states, rewards = torch.rand(96, 6), torch.rand(96)
        with torch.no_grad():
            wanted = rewards + 0.9 * other(states).amax(1)
        return functional.smooth_l1_loss(network(states)[:, step % 3], wanted)

    train(torch.optim.Adam(network.parameters(), lr=2e-4), steps, loss_of)


def grow(steps: int) -> None:
    images, labels = torch.rand(96, 1, 24, 24), torch.randint(0, 10, (96,))
    small = nn.Sequential(nn.Flatten(), layers(576, 64, 10))
    convolutions = [nn.Conv2d(1, 24, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(24, 48, 3), nn.ReLU(), nn.MaxPool2d(2)]
    large = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(768, 10))
    for network, share in ((small, 20), (large, 1)):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        train(optimizer, share * steps, lambda step, network=network: functional.cross_entropy(network(images), labels))


def main() -> None:
    kind, steps = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    if kind == "acting":
        act(steps)
    elif kind == "growing":
        grow(steps)
    else:
        fit(kind, steps)


if __name__ == "__main__":
    main()
