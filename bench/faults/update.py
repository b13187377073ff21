"""Faults of the update: the optimizer's numbers and state, the average of weights, the schedule."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.faults.planting import Planted, a_factor, a_parameter, around, each
from hotloop.lowering.program import Program


def stale_rate(program: Program, draws: random.Random) -> Planted:
    """The learning rate of so many steps before."""
    age = draws.choice((1, 2, 5))
    rates: deque[float] = deque(maxlen=age + 1)

    def old(group: dict[str, Any]) -> Any:
        rates.append(group["lr"])
        return rates[0]

    return f"of {age} steps before" if _of_groups(program, "lr", old) else None, float(age)  # type: ignore  # a fault is planted


def _number_off(key: str, place: int | None = None) -> Callable[[Program, random.Random], Planted]:
    """A number of the optimizer, off in the update alone."""

    def plant(program: Program, draws: random.Random) -> Planted:
        factor, size = a_factor(draws)

        def off(group: dict[str, Any]) -> Any:
            given = group[key]
            if place is None:
                return given * factor
            return tuple(min(0.99999, one * factor) if at == place else one for at, one in enumerate(given))

        return (key, size) if _of_groups(program, key, off) else None

    return plant


def weight_decay_dropped(program: Program, draws: random.Random) -> Planted:
    return ("the update", None) if _of_groups(program, "weight_decay", lambda group: 0.0) else None


def _of_groups(program: Program, key: str, change: Callable[[dict[str, Any]], Any]) -> bool:
    """Runs each update with another value; False where the optimizer has none, or 0."""
    optimizer = program.optimizer
    if not optimizer.param_groups[0].get(key):
        return False

    def make(step: Callable) -> Callable:
        def changed(*args: Any) -> None:
            before = [group[key] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group[key] = change(group)
            step(*args)
            for group, value in zip(optimizer.param_groups, before, strict=True):
                group[key] = value

        return changed

    around(optimizer, "step", make)
    return True


def state_of_the_step_before(program: Program, draws: random.Random) -> Planted:
    """The optimizer doesn't keep what it made of a gradient."""
    turn, every = each(draws)
    optimizer = program.optimizer

    def make(step: Callable) -> Callable:
        def forgetful(*args: Any) -> None:
            before = [
                (value, value.clone())
                for values in optimizer.state.values()
                for key, value in values.items()
                if isinstance(value, Tensor) and key != "step"
            ]
            step(*args)
            if turn():
                for value, old in before:
                    value.copy_(old)

        return torch.no_grad()(forgetful)

    around(optimizer, "step", make)
    return f"each {every} steps", 1 / every


def count_off(program: Program, draws: random.Random) -> Planted:
    """The optimizer's own count of steps, which corrects its averages at the beginning."""
    if not isinstance(program.optimizer, torch.optim.Adam):
        return None
    optimizer, by = program.optimizer, draws.choice((1, -1))

    def make(step: Callable) -> Callable:
        def off(*args: Any) -> None:
            counts = [values["step"] for values in optimizer.state.values() if float(values["step"]) + by >= 0]
            for count in counts:
                count += by
            step(*args)
            for count in counts:
                count -= by

        return off

    around(optimizer, "step", make)
    return f"by {by}", None


def not_updated(program: Program, draws: random.Random) -> Planted:
    """One parameter stays as it is."""
    turn, every = each(draws)
    name, parameter = a_parameter(program, draws)

    def make(step: Callable) -> Callable:
        def still(*args: Any) -> None:
            before = parameter.detach().clone()
            step(*args)
            if turn():
                parameter.data.copy_(before)

        return still

    around(program.optimizer, "step", make)
    return f"{name} each {every} steps", 1 / every


def weights_rounded(program: Program, draws: random.Random) -> Planted:
    """Without master weights: what is kept has fewer bits."""
    name, parameter = a_parameter(program, draws)
    dtype, size = draws.choice(((torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)))

    def make(step: Callable) -> Callable:
        def rounding(*args: Any) -> None:
            step(*args)
            parameter.data.copy_(parameter.data.to(dtype))

        return rounding

    around(program.optimizer, "step", make)
    return name, size


def average_decay_off(program: Program, draws: random.Random) -> Planted:
    if not program.average:
        return None
    factor, size = a_factor(draws)
    step, decay = program._step, program.parts.task.average
    assert decay is not None
    wrong = min(1.0, decay * factor)

    def update(averages: list[Tensor], values: list[Tensor]) -> None:
        torch._foreach_lerp_(list(averages), [value.detach() for value in values], 1 - wrong)

    step.update_average = update  # type: ignore  # a fault is planted
    return "the average", size


def average_skipped(program: Program, draws: random.Random) -> Planted:
    if not program.average:
        return None
    turn, every = each(draws)
    around(program._step, "update_average", lambda update: lambda *args: None if turn() else update(*args))
    return f"each {every} steps", 1 / every


def schedule_skipped(program: Program, draws: random.Random) -> Planted:
    if program._step.schedule is None or not program._step._each_step:
        return None
    turn, every = each(draws)
    around(program._step, "step_schedule", lambda step: lambda: None if turn() else step())
    return f"each {every} steps", 1 / every


def schedule_twice(program: Program, draws: random.Random) -> Planted:
    if program._step.schedule is None or not program._step._each_step:
        return None
    turn, every = each(draws)
    around(program._step, "step_schedule", lambda step: lambda: (step(), step() if turn() else None))
    return f"each {every} steps", 1 / every


def epoch_of_schedule_missed(program: Program, draws: random.Random) -> Planted:
    if program._step.schedule is None or program._step._each_step:
        return None
    around(program._step, "end_epoch", lambda end: lambda figure: program._step.reset_sums())
    return "the end of an epoch", None


FAULTS: dict[str, Callable[[Program, random.Random], Planted]] = {
    "stale learning rate": stale_rate,
    "learning rate off": _number_off("lr"),
    "momentum off": _number_off("momentum"),
    "first beta off": _number_off("betas", 0),
    "second beta off": _number_off("betas", 1),
    "optimizer's epsilon off": _number_off("eps"),
    "weight decay off": _number_off("weight_decay"),
    "weight decay dropped": weight_decay_dropped,
    "optimizer state of the step before": state_of_the_step_before,
    "optimizer's count off by one": count_off,
    "parameter not updated": not_updated,
    "weights rounded": weights_rounded,
    "average decay off": average_decay_off,
    "average skipped": average_skipped,
    "schedule skipped": schedule_skipped,
    "schedule stepped twice": schedule_twice,
    "epoch's schedule step missed": epoch_of_schedule_missed,
}
