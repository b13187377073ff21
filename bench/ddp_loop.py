"""The loop that a careful user writes for torch's DistributedDataParallel; `bench.ddp_by_hand` starts this script.

    torchrun --standalone --nproc-per-node 2 bench/ddp_loop.py mlp FOLDER

The script reads numbers of steps from the pipe FOLDER/ask, and writes the seconds of so many steps to the pipe
FOLDER/told. It imports torch alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_networks import BATCH_SIZES, SAMPLES, arrays, loss_of, network, optimizer
from torch.nn.parallel import DistributedDataParallel


def train(name: str, seeds: list[int], losses: list[float]) -> Iterator[None]:
    """Trains one epoch for each seed, and yields after each step; appends each epoch's mean loss to `losses`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = arrays(name)
    rows = BATCH_SIZES[name] // ranks
    model = DistributedDataParallel(network(name)).train()
    update = optimizer(model.parameters())
    for seed in seeds:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed))
        total = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(order.split(BATCH_SIZES[name]), 1):
            own = batch[rank * rows : (rank + 1) * rows]
            update.zero_grad(set_to_none=True)
            loss = loss_of(model(x.index_select(0, own)), y.index_select(0, own))
            loss.backward()
            update.step()
            total += loss.detach()
            if number * BATCH_SIZES[name] == SAMPLES:
                dist.all_reduce(total)
                losses.append(float(total) / ranks / number)
            yield


def main(name: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    losses: list[float] = []
    steps = train(name, json.loads((folder / "seeds.json").read_text()), losses)
    if first:
        (folder / "ready").touch()
        ask, told = (folder / "ask").open(), (folder / "told").open("w")
    while True:
        number = torch.tensor(int(ask.readline() or 0) if first else 0)
        dist.broadcast(number, src=0)
        if not number:
            break
        dist.barrier()
        began = time.perf_counter()
        for _ in range(int(number)):
            next(steps)
        if first:
            print(time.perf_counter() - began, file=told, flush=True)
    if first:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
