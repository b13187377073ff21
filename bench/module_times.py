"""Do the module clock's times agree with timing each layer by hand? Of a small CNN, at batches of 8 and 128.

    OMP_NUM_THREADS=1 python -m bench.module_times
    OMP_NUM_THREADS=1 python -m bench.module_times --rounds 100 --no-record

A round is one training step under the clock, as `hotloop profile` watches it, and then each layer alone: its forward on
the input that it had in a step, in the order of the step, and its backward with the gradient that it had, from the last
layer to the first. Alone means a graph of its own, with a pass of the autograd engine of its own for the backward: what
such a pass over a node that does nothing takes in the same round is subtracted. What a layer gets is read once before it
is timed, since a step has just computed it. All layers are gone through twice, and the second time counts, when memory
lies as it does from step to step. Steps and layers are timed in turn, so that a disturbance hits both. What is
compared are medians over the rounds.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bench.claim import write_claim
from hotloop.plan import BASELINE
from hotloop.profiling.modules import ModuleClock

BATCHES = (8, 128)
CLOCKS = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}
MOST_US, MOST_SHARE = 20.0, 0.1
WARM_UP = 10


class Layers(nn.Module):
    """The network, with a note of what each layer got in the last step."""

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
    layers: dict[str, nn.Module], given: dict[str, tuple[Tensor, Tensor]], now: Callable[[], int]
) -> dict[str, tuple[float, float]]:
    """Microseconds of each layer's forward and backward, alone; gradients of its parameters are set, as in a step."""
    forward: dict[str, tuple[float, Tensor]] = {}
    for name, layer in layers.items():
        x = given[name][0]
        _in_cache(x)
        began = now()
        out = layer(x)
        forward[name] = (now() - began) / 1e3, out
        layer.zero_grad()
    empty_us = [empty_pass_us(now) for _ in range(2)][-1]
    found, kept = {}, []
    for name, layer in reversed(layers.items()):
        x, gradient = given[name]
        took, out = forward.pop(name)
        _in_cache(gradient)
        began = now()
        if next(layer.parameters(), None) is not None:
            torch.autograd.backward(out, gradient)
        else:  # setting the gradient of its input is no part of a layer
            kept.append(torch.autograd.grad(out, x, gradient))
        found[name] = took, (now() - began) / 1e3 - empty_us
        x.grad = None
        kept.clear()  # freeing memory neither
    return found


def _in_cache(value: Tensor) -> None:
    """A step has just computed what a layer gets."""
    value.detach().sum()


def empty_pass_us(now: Callable[[], int]) -> float:
    """Of the autograd engine over one node that does nothing."""
    x = torch.zeros(1, requires_grad=True)
    out, gradient = x.view_as(x), torch.ones(1)
    began = now()
    torch.autograd.grad(out, x, gradient)
    return (now() - began) / 1e3


def inputs_of(model: Layers, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """What each layer gets: its input, which asks for a gradient where it did in the step, and that of its output."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    with caught(model) as caught_ones:
        nn.functional.cross_entropy(model(x), y).backward()
    for name, (value, out) in caught_ones.items():
        gradient = out.grad
        assert gradient is not None
        found[name] = (value.detach().clone().requires_grad_(value.requires_grad), gradient.clone())
    return found


@contextmanager
def caught(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Inputs and outputs of all layers, outputs keeping their gradient."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
            out.retain_grad()
            found[name] = (args[0], out)

        return hook

    handles = [layer.register_forward_hook(note(name)) for name, layer in model.named_children()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def measure(batch: int, rounds: int, now: Callable[[], int]) -> dict[str, dict[str, Any]]:
    """By layer and direction: medians of both ways to time it, and whether they agree."""
    torch.manual_seed(0)
    x, y = torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
    model, loss_of = Layers(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given = inputs_of(model, x, y)
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
        found_alone = [by_hand(dict(model.named_children()), given, now) for _ in range(2)][-1]
        for name, taken in found_alone.items():
            alone[name].append(taken)
    clocked = {one.name: one for one in clock.times(None)}
    found = {}
    for name in alone:
        for at, direction in enumerate(("forward", "backward")):
            clock_ms = getattr(clocked[name], f"{direction}_ms")
            found[f"{name} {direction}"] = compared(1e3 * clock_ms, [pair[at] for pair in alone[name]])
    return found


def keep_freed_memory() -> None:
    """From now on glibc keeps what is freed: else whoever gets it back from the system pays for it, a matter of chance."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(parameter, 1 << 30)


def compared(clock_us: float, hand_us: list[float]) -> dict[str, Any]:
    hand = statistics.median(hand_us)
    apart = abs(clock_us - hand)
    return {
        "clock_us": round(clock_us, 2),
        "by_hand_us": round(hand, 2),
        "by_hand_quartiles_us": [round(value, 2) for value in statistics.quantiles(hand_us, n=4)[::2]],
        "apart_us": round(clock_us - hand, 2),
        "apart_share": round((clock_us - hand) / hand, 4) if hand else None,
        "agrees": apart <= MOST_US or apart <= MOST_SHARE * hand,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: of the thread, where the machine is shared"
    )
    parser.add_argument("--no-record", action="store_true", help="write no claim")
    options = parser.parse_args()
    keep_freed_memory()
    found = {f"batch {batch}": measure(batch, options.rounds, CLOCKS[options.clock]) for batch in BATCHES}
    for batch, layers in found.items():
        for name, one in layers.items():
            told = "" if one["agrees"] else "  APART"
            print(f"{batch:10} {name:18} clock {one['clock_us']:9.1f} us  by hand {one['by_hand_us']:9.1f} us{told}")
    figures = {
        "allowed": f"{MOST_SHARE:.0%} or {MOST_US:g} us",
        "rounds": options.rounds,
        "clock": options.clock,
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "agree": sum(one["agrees"] for layers in found.values() for one in layers.values()),
        "of": sum(map(len, found.values())),
        "layers": found,
    }
    print(json.dumps({key: figures[key] for key in ("agree", "of", "allowed", "load_average")}))
    if not options.no_record:
        command = f"OMP_NUM_THREADS=1 python -m bench.module_times --rounds {options.rounds} --clock {options.clock}"
        print(write_claim("module-times", command, BASELINE, figures), file=sys.stderr)
    return 0 if figures["agree"] == figures["of"] else 1


if __name__ == "__main__":
    sys.exit(main())
