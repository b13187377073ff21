"""Several ways to train a network, in one process, in turn: each runs so many steps when it is called."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.core.plan_request import PlanRequest
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.tuning.races.runner import synchronize_devices
from hotloop.tuning.races.statistics import ratio_of

Steps = Callable[[int], None]
"""Calls so many training steps; the device may still compute them."""

ROUNDS, WARM_ROUNDS = 12, 2
WINDOW_S = 0.2
AT_ONCE = 32
"""A window has a multiple of so many steps where it can: replays of CUDA graphs may take that many."""

CONFIDENCE = 0.95


def program_of(task: hotloop.Task, device: str, axes: Mapping[str, str]) -> Program:
    return lower(task, PlanRequest.from_value("baseline", {"device": device, **axes}).plan)


def hotloop_steps(program: Program) -> Steps:
    """A Program's steps; where an epoch ends, the next one begins."""

    def steps(count: int) -> None:
        while count:
            outcome = program.advance(count)
            count -= outcome.steps
            if outcome.ended:
                program.end_epoch(0.0)

    return steps


def tutorial_steps(task: hotloop.Task, device: str, *, compiled: bool = False, precision: str = "default") -> Steps:
    """The loop of PyTorch's tutorial (docs.pytorch.org, "Optimizing model parameters") over the Task's data.

    Args:
        compiled: with the model compiled; then an incomplete last batch is left out, as it would be compiled anew.
        precision: `bf16` puts the forward pass under torch's autocast.
    """
    loop = _looped(task, device, compiled, precision)

    def steps(count: int) -> None:
        for _ in range(count):
            next(loop)

    return steps


def _looped(task: hotloop.Task, device: str, compiled: bool, precision: str) -> Iterator[None]:
    torch.manual_seed(0)
    assert not isinstance(task.model, torch.nn.Module) and task.loss is not None
    model = task.model().to(device)
    forward = torch.compile(model) if compiled else model
    optimizer: Any = task.optimizer(model.parameters())
    dataset = TensorDataset(*task.data)
    loader = DataLoader(dataset, batch_size=task.batch_size, shuffle=True, drop_last=compiled)
    model.train()
    while True:
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            with _autocast(device, precision):
                loss = task.loss(forward(x), y)
            loss.backward()
            optimizer.step()
            yield


def _autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    if precision == "bf16":
        return torch.autocast(torch.device(device).type, torch.bfloat16)
    return nullcontext()


def in_turn(
    lanes: Mapping[str, Steps], device: str, *, rounds: int = ROUNDS, window_s: float = WINDOW_S
) -> dict[str, list[float]]:
    """Seconds of a step in windows that alternate between the lanes: A B C, then C B A, and so on.

    Args:
        lanes: the first one says how many steps a window has.
    """
    where = torch.device(device)

    def window(steps: Steps, count: int) -> float:
        synchronize_devices(where)
        began = time.perf_counter()
        steps(count)
        synchronize_devices(where)
        return (time.perf_counter() - began) / count

    for steps in lanes.values():
        window(steps, 3)  # compiles and records
    step_s = min(window(next(iter(lanes.values())), 2) for _ in range(2))
    count = max(1, round(window_s / step_s))
    count = -(-count // AT_ONCE) * AT_ONCE if count > AT_ONCE // 2 else count
    found: dict[str, list[float]] = {name: [] for name in lanes}
    for number in range(WARM_ROUNDS + rounds):
        for name in list(lanes)[:: -1 if number % 2 else 1]:
            seconds = window(lanes[name], count)
            if number >= WARM_ROUNDS:
                found[name].append(seconds)
    return found


def ratios(windows: Mapping[str, list[float]], own: str) -> dict[str, dict[str, Any]]:
    """Each lane's median step, and how many times as long as `own` it takes, with its 95 % interval."""
    found = {}
    for name, seconds in windows.items():
        ratio = ratio_of(seconds, windows[own], CONFIDENCE)
        found[name] = {
            "step_ms": 1e3 * sorted(seconds)[len(seconds) // 2],
            "windows": len(seconds),
            "times_as_long": ratio.median,
            "low": ratio.low,
            "high": ratio.high,
        }
    return found


def kernels_of(steps: Steps, device: str, count: int = 8) -> dict[str, Any]:
    """Of a step, by torch's profiler: its number of kernels, their time in us, and the twelve that take longest."""
    if torch.device(device).type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        steps(count)
        synchronize_devices(torch.device(device))
    found: dict[str, list[float]] = {}
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            row = found.setdefault(event.name, [0.0, 0.0])
            row[0] += 1 / count
            row[1] += event.self_device_time_total / count
    longest = sorted(found.items(), key=lambda item: -item[1][1])[:12]
    return {
        "kernels": sum(number for number, _ in found.values()),
        "busy_us": sum(us for _, us in found.values()),
        "longest": {name[:120]: {"count": number, "us": us} for name, (number, us) in longest},
    }
