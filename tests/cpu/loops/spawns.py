"""Trains in other processes alone."""

import sys

import torch
import torch.multiprocessing as mp


def train(rank):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    mp.spawn(train, nprocs=int(sys.argv[1]))
    print("done")
