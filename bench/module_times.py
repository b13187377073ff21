"""Do the module clock's times agree with timing each layer by hand? Of a small CNN, at batches of 8 and 128.

    OMP_NUM_THREADS=1 python -m bench.module_times
    OMP_NUM_THREADS=1 python -m bench.module_times --rounds 100 --processes 1 --no-record

A round is one training step under the clock, as `hotloop profile` watches it, and then each layer alone, in the order of
the step: its forward on what the layer before it has just computed, and its backward with the gradient that the layer after
it has just computed; what no layer holds for its backward is given back, as a step does. Alone means a graph of its own, with
a pass of the autograd engine of its own for the backward: what such a pass over a node that does nothing takes just before it
is subtracted. All layers are gone through twice, with an update after each, and the second time counts, when memory and caches
are as from step to step. Steps and layers are timed in turn, so that a disturbance hits both. What is compared are medians over
the rounds, and of these over processes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn

from bench.claim import write_claim
from hotloop.plan import BASELINE
from hotloop.profiler.timers.modules import ModuleClock

BATCHES = (8, 128)
CLOCKS = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}
MOST_US, MOST_SHARE = 20.0, 0.1
WARM_UP = 10


class Layers(nn.Module):
    """The network, layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 3, padding=1)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.dense = nn.Linear(1960, 100)
        self.relu2 = nn.ReLU()
        self.out = nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def by_hand(
    layers: dict[str, nn.Module], x: Tensor, gradient_of: Callable[[Tensor], Tensor], now: Callable[[], int]
) -> dict[str, tuple[float, float]]:
    """Microseconds of each layer's forward and backward, alone; gradients of its parameters are set, as in a step."""
    forward: dict[str, tuple[float, Tensor, Tensor]] = {}
    for layer in layers.values():
        layer.zero_grad()
    out = x
    for name, layer in layers.items():
        asks, made = bool(forward), out  # the data doesn't ask for a gradient
        x = made.detach().requires_grad_(asks)
        began = now()
        out = layer(x)
        forward[name] = (now() - began) / 1e3, x, out
        if asks:
            free_unless_kept(made, out)
    gradient: Tensor | None = gradient_of(out)
    found = {}
    for name, layer in reversed(layers.items()):
        took, x, out = forward.pop(name)
        empty_us = [empty_pass_us(now) for _ in range(2)][-1]
        began = now()
        if next(layer.parameters(), None) is not None:
            torch.autograd.backward(out, gradient)
            took_backward = now() - began
            gradient = x.grad
        else:  # setting the gradient of its input is no part of a layer
            kept = torch.autograd.grad(out, x, gradient)
            took_backward = now() - began
            (gradient,) = kept
        found[name] = took, took_backward / 1e3 - empty_us
    return found


def free_unless_kept(made: Tensor, out: Tensor) -> None:
    """Gives back a layer's output that neither it nor the next layer holds, as a step does at once."""
    kept = {tensor.untyped_storage().data_ptr() for tensor in (out, *saved_by(made), *saved_by(out))}
    if made.untyped_storage().data_ptr() not in kept:
        made.untyped_storage().resize_(0)


def saved_by(out: Tensor) -> list[Tensor]:
    """Tensors that the node which made it holds for its backward."""
    names = [name for name in dir(out.grad_fn) if name.startswith("_saved_")]
    return [saved for name in names if isinstance(saved := getattr(out.grad_fn, name), Tensor)]


def empty_pass_us(now: Callable[[], int]) -> float:
    """Of the autograd engine over one node that does nothing."""
    x = torch.zeros(1, requires_grad=True)
    out, gradient = x.view_as(x), torch.ones(1)
    began = now()
    torch.autograd.grad(out, x, gradient)
    return (now() - began) / 1e3


def gradient_of_loss(out: Tensor, y: Tensor) -> Tensor:
    """What the backward of the last layer begins with."""
    out = out.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(out, y), out)
    return gradient


def measure(batch: int, rounds: int, now: Callable[[], int]) -> dict[str, tuple[float, float]]:
    """By layer and direction: microseconds by the clock, and the median of those by hand."""
    torch.manual_seed(0)
    x, y = torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
    model, loss_of = Layers(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    layers = dict(model.named_children())

    def alone_once() -> dict[str, tuple[float, float]]:
        return by_hand(layers, x, lambda out: gradient_of_loss(out, y), now)

    clock = ModuleClock(now)
    alone: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            clock = ModuleClock(now)
            alone.clear()
        clock.begin()
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        clock.end()
        alone_once()
        optimizer.step()  # before the next forward, as in a step
        for name, taken in alone_once().items():
            alone[name].append(taken)
        optimizer.step()
    clocked = {one.name: one for one in clock.times(None)}
    found = {}
    for name in alone:
        for at, direction in enumerate(("forward", "backward")):
            clock_us = 1e3 * getattr(clocked[name], f"{direction}_ms")
            found[f"{name} {direction}"] = clock_us, statistics.median(pair[at] for pair in alone[name])
    return found


def in_processes(batch: int, rounds: int, clock: str, processes: int) -> dict[str, dict[str, Any]]:
    """Medians over processes, one after another: where the buffers of each come to lie in memory is a matter of chance."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(processes):
        with ProcessPoolExecutor(1, get_context("spawn"), keep_freed_memory) as one:
            for name, pair in one.submit(_measured, batch, rounds, clock).result().items():
                found[name].append(pair)
    return {name: compared(*zip(*pairs, strict=True)) for name, pairs in found.items()}


def _measured(batch: int, rounds: int, clock: str) -> dict[str, tuple[float, float]]:
    return measure(batch, rounds, CLOCKS[clock])


def keep_freed_memory() -> None:
    """From now on glibc keeps what is freed: else whoever gets it back from the system pays for it, a matter of chance."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for parameter, value in (
            (-1, 1 << 30),
            (-4, 0),
        ):  # M_TRIM_THRESHOLD, and M_MMAP_MAX: all blocks come from the heap
            if not libc.mallopt(parameter, value):
                raise OSError(f"mallopt({parameter}, {value}) was refused")


def compared(clock_us: Sequence[float], hand_us: Sequence[float]) -> dict[str, Any]:
    clock, hand = statistics.median(clock_us), statistics.median(hand_us)
    apart = abs(clock - hand)
    return {
        "clock_us": round(clock, 2),
        "by_hand_us": round(hand, 2),
        "of_processes_us": [[round(one, 2) for one in ones] for ones in (clock_us, hand_us)],
        "apart_us": round(clock - hand, 2),
        "apart_share": round((clock - hand) / hand, 4) if hand else None,
        "agrees": apart <= MOST_US or apart <= MOST_SHARE * hand,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300, help="in each process")
    parser.add_argument("--processes", type=int, default=9)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: of the thread, where the machine is shared"
    )
    parser.add_argument("--no-record", action="store_true", help="write no claim")
    options = parser.parse_args()
    found = {
        f"batch {batch}": in_processes(batch, options.rounds, options.clock, options.processes) for batch in BATCHES
    }
    for batch, layers in found.items():
        for name, one in layers.items():
            told = "" if one["agrees"] else "  APART"
            print(f"{batch:10} {name:18} clock {one['clock_us']:9.1f} us  by hand {one['by_hand_us']:9.1f} us{told}")
    figures = {
        "allowed": f"{MOST_SHARE:.0%} or {MOST_US:g} us",
        "rounds": options.rounds,
        "processes": options.processes,
        "clock": options.clock,
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "agree": sum(one["agrees"] for layers in found.values() for one in layers.values()),
        "of": sum(map(len, found.values())),
        "layers": found,
    }
    print(json.dumps({key: figures[key] for key in ("agree", "of", "allowed", "load_average")}))
    if not options.no_record:
        given = f"--rounds {options.rounds} --processes {options.processes} --clock {options.clock}"
        command = f"OMP_NUM_THREADS=1 python -m bench.module_times {given}"
        print(write_claim("module-times", command, BASELINE, figures), file=sys.stderr)
    return 0 if figures["agree"] == figures["of"] else 1


if __name__ == "__main__":
    sys.exit(main())
