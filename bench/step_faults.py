"""Faults planted into a Program's eager step: what goes wrong when a training loop is written, or rewritten, by hand."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.graph_mutations import Mutation, magnitude
from hotloop.data.tree import map_tensors
from hotloop.lowering import Program
from hotloop.rng import generator_for

Planted = tuple[str, float | None] | None
"""Where, and how large; None where the Task has no place for such a fault."""

OFTEN = (1, 2, 4, 8, 16)
"""A fault of each so many steps."""


def planted(program: Program, draws: random.Random) -> Mutation:
    """Plants one at random."""
    faults = FAULTS if program.parts.plan.accumulation == 1 else OF_PIECES
    while True:
        kind = draws.choice(list(faults))
        found = faults[kind](program, draws)
        if found is not None:
            return Mutation(kind, *found)


def _around(holder: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    """Replaces a method of this one object by what `make` makes of it."""
    setattr(holder, name, make(getattr(holder, name)))


def _each(draws: random.Random) -> tuple[Callable[[], bool], int]:
    """Whether it is the turn of a fault, which is each so many calls."""
    every, count = draws.choice(OFTEN), [0]

    def turn() -> bool:
        count[0] += 1
        return count[0] % every == 0

    return turn, every


def _factor(draws: random.Random) -> tuple[float, float]:
    size = magnitude(draws)
    return 1 + draws.choice((-1, 1)) * size, size


# ---------------------------------------------------------------- gradients


def zero_grad_skipped(program: Program, draws: random.Random) -> Planted:
    turn, every = _each(draws)
    _around(program._step, "_clear_gradients", lambda clear: lambda: None if turn() else clear())
    return f"each {every} steps", 1 / every


def loss_scaled(program: Program, draws: random.Random) -> Planted:
    factor, size = _factor(draws)
    _around(program._step, "_backward_of", lambda backward: lambda loss: backward(loss * factor))
    return "the loss", size


def gradient_scaled(program: Program, draws: random.Random) -> Planted:
    factor, size = _factor(draws)
    name = _of_gradient(program, draws, lambda value: value.mul_(factor))
    return name, size


def gradient_rounded(program: Program, draws: random.Random) -> Planted:
    dtype, size = draws.choice(((torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)))
    name = _of_gradient(program, draws, lambda value: value.copy_(value.to(dtype)))
    return name, size


def gradient_noisy(program: Program, draws: random.Random) -> Planted:
    size, generator = magnitude(draws), generator_for(draws.getrandbits(40), "noise")

    def noisy(value: Tensor) -> None:
        value.add_(size * value.square().mean().sqrt() * torch.randn(value.shape, generator=generator))

    return _of_gradient(program, draws, noisy), size


def gradient_stale(program: Program, draws: random.Random) -> Planted:
    """That of the step before, as in a race between backward and the update."""
    before: list[Tensor] = []

    def older(value: Tensor) -> None:
        before.append(value.clone())
        value.copy_(before.pop(0) if len(before) > 1 else before[0])

    return _of_gradient(program, draws, older), None


def _of_gradient(program: Program, draws: random.Random, change: Callable[[Tensor], Any]) -> str:
    """Changes the gradient of one parameter before it is clipped."""
    name, parameter = _parameter(program, draws)

    def make(clip: Callable) -> Callable:
        def changed(parameters: list[Tensor]) -> None:
            if parameter.grad is not None:
                change(parameter.grad)
            clip(parameters)

        return changed

    _around(program._step, "clip", make)
    return name


def _parameter(program: Program, draws: random.Random) -> tuple[str, nn.Parameter]:
    return draws.choice([pair for pair in program.model.named_parameters() if pair[1].requires_grad])


def clipped_twice(program: Program, draws: random.Random) -> Planted:
    if program.parts.task.clip_norm is None and program.parts.task.clip_value is None:
        return None

    def make(clip: Callable) -> Callable:
        def twice(parameters: list[Tensor]) -> None:
            clip(parameters)
            for value in parameters:
                if value.grad is not None:
                    value.grad.mul_(2)  # as if by each of two ranks
            clip(parameters)

        return twice

    _around(program._step, "clip", make)
    return "the gradients", None


def clip_limit_off(program: Program, draws: random.Random) -> Planted:
    task = program.parts.task
    factor, size = _factor(draws)
    if task.clip_norm is not None:
        limit = task.clip_norm * factor
        program._step.clip = lambda values: torch.nn.utils.clip_grad_norm_(values, limit)  # type: ignore  # a fault is planted
    elif task.clip_value is not None:
        limit = task.clip_value * factor
        program._step.clip = lambda values: torch.nn.utils.clip_grad_value_(values, limit)  # type: ignore  # a fault is planted
    else:
        return None
    return "the limit", size


def not_clipped(program: Program, draws: random.Random) -> Planted:
    if program.parts.task.clip_norm is None and program.parts.task.clip_value is None:
        return None
    turn, every = _each(draws)
    _around(program._step, "clip", lambda clip: lambda values: None if turn() else clip(values))
    return f"each {every} steps", 1 / every


# ---------------------------------------------------------------- the update


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
        factor, size = _factor(draws)

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

    _around(optimizer, "step", make)
    return True


def state_of_the_step_before(program: Program, draws: random.Random) -> Planted:
    """The optimizer doesn't keep what it made of a gradient."""
    turn, every = _each(draws)
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

    _around(optimizer, "step", make)
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

    _around(optimizer, "step", make)
    return f"by {by}", None


def not_updated(program: Program, draws: random.Random) -> Planted:
    """One parameter stays as it is."""
    turn, every = _each(draws)
    name, parameter = _parameter(program, draws)

    def make(step: Callable) -> Callable:
        def still(*args: Any) -> None:
            before = parameter.detach().clone()
            step(*args)
            if turn():
                parameter.data.copy_(before)

        return still

    _around(program.optimizer, "step", make)
    return f"{name} each {every} steps", 1 / every


def weights_rounded(program: Program, draws: random.Random) -> Planted:
    """Without master weights: what is kept has fewer bits."""
    name, parameter = _parameter(program, draws)
    dtype, size = draws.choice(((torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)))

    def make(step: Callable) -> Callable:
        def rounding(*args: Any) -> None:
            step(*args)
            parameter.data.copy_(parameter.data.to(dtype))

        return rounding

    _around(program.optimizer, "step", make)
    return name, size


def average_decay_off(program: Program, draws: random.Random) -> Planted:
    if not program.average:
        return None
    factor, size = _factor(draws)
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
    turn, every = _each(draws)
    _around(program._step, "update_average", lambda update: lambda *args: None if turn() else update(*args))
    return f"each {every} steps", 1 / every


def schedule_skipped(program: Program, draws: random.Random) -> Planted:
    if program._step.schedule is None or not program._step._each_step:
        return None
    turn, every = _each(draws)
    _around(program._step, "step_schedule", lambda step: lambda: None if turn() else step())
    return f"each {every} steps", 1 / every


def schedule_twice(program: Program, draws: random.Random) -> Planted:
    if program._step.schedule is None or not program._step._each_step:
        return None
    turn, every = _each(draws)
    _around(program._step, "step_schedule", lambda step: lambda: (step(), step() if turn() else None))
    return f"each {every} steps", 1 / every


def epoch_of_schedule_missed(program: Program, draws: random.Random) -> Planted:
    if program._step.schedule is None or program._step._each_step:
        return None
    _around(program._step, "end_epoch", lambda end: lambda figure: program._step.reset_sums())
    return "the end of an epoch", None


# ---------------------------------------------------------------- the model


def norm_not_updated(program: Program, draws: random.Random) -> Planted:
    turn, every = _each(draws)
    return _of_norms(
        program, draws, lambda module: 0.0 if turn() else module.momentum, f"each {every} steps", 1 / every
    )


def norm_momentum_off(program: Program, draws: random.Random) -> Planted:
    factor, size = _factor(draws)
    return _of_norms(program, draws, lambda module: module.momentum * factor, "momentum", size)


def _of_norms(program: Program, draws: random.Random, change: Callable, where: str, size: float) -> Planted:
    norms = [(n, m) for n, m in program.model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return None
    name, module = draws.choice(norms)

    def make(forward: Callable) -> Callable:
        def changed(x: Tensor) -> Tensor:
            before, module.momentum = module.momentum, change(module)
            out = forward(x)
            module.momentum = before
            return out

        return changed

    _around(module, "forward", make)
    return f"{name} {where}", size


def _leaf(program: Program, draws: random.Random, kinds: Any = nn.Module) -> tuple[str, nn.Module] | None:
    found = [
        (name, module)
        for name, module in program.model.named_modules()
        if isinstance(module, kinds) and not list(module.children()) and name
    ]
    return draws.choice(found) if found else None


_WITH_WEIGHTS = (nn.Linear, nn.Conv2d, nn.LSTM, nn.GRU)


def layer_in_bf16(program: Program, draws: random.Random) -> Planted:
    chosen = _leaf(program, draws, _WITH_WEIGHTS)
    if chosen is None:
        return None
    name, module = chosen

    def make(forward: Callable) -> Callable:
        def narrow(*args: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                out = forward(*args)
            return map_tensors(Tensor.float, out)

        return narrow

    _around(module, "forward", make)
    return name, 2.0**-9


def output_scaled(program: Program, draws: random.Random) -> Planted:
    chosen = _leaf(program, draws)
    if chosen is None:
        return None
    name, module = chosen
    factor, size = _factor(draws)
    module.register_forward_hook(lambda m, inputs, out: map_tensors(lambda value: value * factor, out))
    return name, size


def epsilon_off(program: Program, draws: random.Random) -> Planted:
    norms = [(n, m) for n, m in program.model.named_modules() if hasattr(m, "eps")]
    if not norms:
        return None
    name, module = draws.choice(norms)
    size = magnitude(draws)
    module.eps = size  # type: ignore  # a fault is planted
    return f"{name} eps", size


def rate_of_dropout_off(program: Program, draws: random.Random) -> Planted:
    chosen = _leaf(program, draws, nn.Dropout)
    if chosen is None:
        return None
    name, module = chosen
    factor, size = _factor(draws)
    module.p = min(1.0, module.p * factor)  # type: ignore  # a fault is planted
    return name, size


def not_training(program: Program, draws: random.Random) -> Planted:
    """A module left in evaluation mode."""
    chosen = _leaf(program, draws, (nn.Dropout, nn.modules.batchnorm._BatchNorm))
    if chosen is None:
        return None
    name, module = chosen
    module.train = lambda mode=True: module  # type: ignore  # a fault is planted
    module.training = False
    return name, None


def transposed_copy(program: Program, draws: random.Random) -> Planted:
    """A layer that computes with a transposed copy of its weights, read as if it were not."""
    chosen = _leaf(program, draws, nn.Linear)
    if chosen is None:
        return None
    name, module = chosen
    module.forward = lambda x: F.linear(  # type: ignore  # a fault is planted
        x, module.weight.t().reshape(module.weight.shape), module.bias
    )
    return name, None


def stale_weights(program: Program, draws: random.Random) -> Planted:
    """A layer that computes with weights of so many steps before."""
    chosen = _leaf(program, draws, (nn.Linear, nn.Conv2d))
    if chosen is None:
        return None
    name, module = chosen
    age = draws.choice((1, 2, 4))
    before: deque[Tensor] = deque(maxlen=age + 1)

    def make(forward: Callable) -> Callable:
        def older(x: Tensor) -> Any:
            now = module.weight.data
            before.append(now.clone())
            module.weight.data = before[0].clone()
            out = forward(x)
            module.weight.data = now
            return out

        return older

    _around(module, "forward", make)
    return f"{name} of {age} steps before", float(age)


# ---------------------------------------------------------------- draws


def mask_repeated(program: Program, draws: random.Random) -> Planted:
    """The same draws for so many steps."""
    if not _draws(program):
        return None
    every = draws.choice((2, 4, 16, 1_000_000))
    _around(program._step.draws, "seed", lambda seed: lambda step: seed(step - step % every))
    return f"for {every} steps", None


def draws_of_another_step(program: Program, draws: random.Random) -> Planted:
    if not _draws(program):
        return None
    _around(program._step.draws, "seed", lambda seed: lambda step: seed(step + 1))
    return "the draws", None


def _draws(program: Program) -> bool:
    return program.parts.task.step is not None or any(
        isinstance(module, nn.Dropout) and module.p for module in program.model.modules()
    )


# ---------------------------------------------------------------- batches


def _of_batches(change: Callable[[Any, int], Any]) -> Callable[[Program, random.Random], Planted]:
    """Another batch at each so many steps."""

    def plant(program: Program, draws: random.Random) -> Planted:
        turn, every = _each(draws)

        def make(compute: Callable) -> Callable:
            return lambda batch: compute(change(batch, len(batch[0])) if turn() else batch)

        step = program._step
        _around(step, "_compute", make)
        return f"each {every} steps", 1 / every

    return plant


def input_changed(program: Program, draws: random.Random) -> Planted:
    """The batch is changed in place, before or after it is used."""
    turn, every = _each(draws)
    early = draws.random() < 0.5

    def change(batch: Any) -> None:
        first = batch[0]
        first.mul_(1.5) if first.is_floating_point() else first.clamp_(max=3)

    def make(compute: Callable) -> Callable:
        def mutating(batch: Any) -> Any:
            now = turn()
            if now and early:
                change(batch)
            out = compute(batch)
            if now and not early:
                with torch.no_grad():
                    change(map_tensors(Tensor.detach, batch))
            return out

        return mutating

    _around(program._step, "_compute", make)
    return f"{'before' if early else 'after'} its use, each {every} steps", 1 / every


def _rows(order: Callable[[int], list[int]]) -> Callable[[Any, int], Any]:
    return lambda batch, count: map_tensors(lambda value: value[order(count)], batch)


counted_twice = _of_batches(_rows(lambda count: [*range(count), 0]))
another_repeated = _of_batches(_rows(lambda count: [*range(count - 1), 0]))
sample_dropped = _of_batches(_rows(lambda count: list(range(count - 1))))
labels_shifted = _of_batches(lambda batch, count: (batch[0], *(value.roll(1, 0) for value in batch[1:])))


def scalar_of_the_whole_batch(program: Program, draws: random.Random) -> Planted:
    """An incomplete batch is averaged as if it were padded to the size of the others."""
    full = program.parts.roles.order.batch_size if program.parts.roles.order else 0

    def make(compute: Callable) -> Callable:
        def padded(batch: Any) -> Any:
            computed = compute(batch)
            share = len(batch[0]) / full
            return computed if share == 1 else computed._replace(loss=computed.loss * share)

        return padded

    _around(program._step, "_compute", make)
    return "the last batch", None


def last_batch_dropped(program: Program, draws: random.Random) -> Planted:
    return _of_feed(program, lambda batches: batches[:-1], "the last batch")


def batches_in_another_order(program: Program, draws: random.Random) -> Planted:
    return _of_feed(program, lambda batches: [*batches[1::-1], *batches[2:]], "the first two of an epoch")


def batches_of_the_first_epoch(program: Program, draws: random.Random) -> Planted:
    _around(program.feed, "epoch", lambda epoch: lambda number, start=0: epoch(0, start))
    return "each epoch", None


def _of_feed(program: Program, change: Callable[[list], list], where: str) -> Planted:
    def make(epoch: Callable) -> Callable:
        def changed(number: int, start: int = 0) -> Iterator[Any]:
            return iter(change(list(epoch(number, 0)))[start:])

        return changed

    _around(program.feed, "epoch", make)
    return where, None


def counted_wrongly(program: Program, draws: random.Random) -> Planted:
    """The sum of the losses, which is what a user sees of training."""
    factor, size = _factor(draws)
    _around(program._step, "_add", lambda add: lambda loss, *rest: add(loss * factor, *rest))
    return "the reported loss", size


FAULTS: dict[str, Callable[[Program, random.Random], Planted]] = {
    "zero_grad skipped": zero_grad_skipped,
    "loss scaled": loss_scaled,
    "gradient scaled": gradient_scaled,
    "gradient rounded": gradient_rounded,
    "gradient noisy": gradient_noisy,
    "gradient of the step before": gradient_stale,
    "clipped twice": clipped_twice,
    "clip limit off": clip_limit_off,
    "not clipped": not_clipped,
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
    "BatchNorm statistics not updated": norm_not_updated,
    "BatchNorm momentum off": norm_momentum_off,
    "layer in bf16": layer_in_bf16,
    "layer's output scaled": output_scaled,
    "layer's epsilon off": epsilon_off,
    "dropout rate off": rate_of_dropout_off,
    "module in evaluation mode": not_training,
    "transposed weight copy": transposed_copy,
    "stale weights": stale_weights,
    "repeated dropout mask": mask_repeated,
    "draws of another step": draws_of_another_step,
    "input buffer changed": input_changed,
    "sample counted twice": counted_twice,
    "sample in place of another": another_repeated,
    "sample dropped": sample_dropped,
    "labels shifted": labels_shifted,
    "last batch averaged as if padded": scalar_of_the_whole_batch,
    "last batch dropped": last_batch_dropped,
    "batches in another order": batches_in_another_order,
    "batches of the first epoch": batches_of_the_first_epoch,
    "reported loss off": counted_wrongly,
}


# ---------------------------------------------------------------- pieces of a batch


def not_divided(program: Program, draws: random.Random) -> Planted:
    """The losses of the pieces are added, and not averaged."""
    pieces = program.parts.plan.accumulation
    _around(program._step, "_backward_of", lambda backward: lambda loss: backward(loss * pieces))
    return "the loss", None


def piece_dropped(program: Program, draws: random.Random) -> Planted:
    turn, every = _each(draws)
    _around(program._step, "_backward_of", lambda backward: lambda loss: None if turn() else backward(loss))
    return f"each {every} pieces", 1 / every


def last_piece_alone(program: Program, draws: random.Random) -> Planted:
    """Gradients are cleared before each piece."""
    step = program._step
    _around(step, "_backward_of", lambda backward: lambda loss: (step._clear_gradients(), backward(loss)))
    return "the gradients", None


OF_PIECES: dict[str, Callable[[Program, random.Random], Planted]] = {
    "accumulation not divided": not_divided,
    "piece dropped": piece_dropped,
    "last piece alone": last_piece_alone,
    **{
        name: FAULTS[name]
        for name in ("zero_grad skipped", "loss scaled", "gradient scaled", "learning rate off", "stale learning rate")
    },
}
"""Of a Program that cuts batches into pieces."""
