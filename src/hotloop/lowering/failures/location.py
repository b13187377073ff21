"""Place of an error: the step, the module, and the samples of the user's data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.state import Position
from hotloop.data.feeds.feed import BatchTransform, open_feed
from hotloop.data.order import rank_bounds, split_positions
from hotloop.data.sources import Stream
from hotloop.lowering.program import Program


def user_sample_numbers(program: Program, position: Position) -> Tensor | None:
    """Returns the numbers of the samples after `position` in the user's data: int64 (batch,); None for a stream."""
    roles = program.parts.splits
    if roles.order is None:
        return None
    index = roles.order.batch(roles.order.epoch(position.epoch), position.batch)
    share = program.parts.task.validation
    if roles.validation is None or not isinstance(share, int | float) or isinstance(roles.validation, Stream):
        return index
    training, _ = split_positions(roles.order.samples + len(roles.validation), share, roles.seed)
    return training[index]


def rank_sample_numbers(program: Program, position: Position) -> Tensor | None:
    """Returns the numbers of the rank's samples: int64 (rows,); a rank without rows computes the first sample."""
    numbers, world = user_sample_numbers(program, position), program.parts.evaluation_ranks
    if numbers is None:
        return None
    first, last = rank_bounds(len(numbers), world.rank, world.ranks)
    return numbers[first:last] if first < last else numbers[:1]


def floating_parts(batch: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields a batch's floating-point tensors with their names: `input`, `target`, `batch['mask']`."""
    if isinstance(batch, Tensor):
        if batch.is_floating_point() or batch.is_complex():
            yield path or "input", batch
    elif isinstance(batch, Mapping):
        for key, item in batch.items():
            yield from floating_parts(item, f"{path or 'batch'}[{key!r}]")
    elif isinstance(batch, tuple | list):
        for place, item in enumerate(batch):
            yield from floating_parts(item, f"{path}[{place}]" if path else _role(place, len(batch)))


def _role(place: int, length: int) -> str:
    if length == 1:
        return "input"
    if place == length - 1:
        return "target"
    return "input" if length == 2 else f"input {place + 1}"


def nonfinite_rows(values: Tensor) -> Tensor:
    """Returns the indices along the first dimension with NaN or infinity: int64 (places,)."""
    if values.ndim == 0:
        return (~torch.isfinite(values)).reshape(1).nonzero().flatten()
    return (~torch.isfinite(values.reshape(len(values), -1))).any(dim=1).nonzero().flatten().cpu()


def describe_bad_samples(program: Program, position: Position, part: str, rows: Tensor) -> tuple[str, str]:
    """Returns the origin of a batch's bad values and the advice: `("sample 7 of the data has", "remove ...")`.

    Args:
        part: name of the bad tensor, from `floating_parts`.
        rows: the bad places in the batch.
    """
    numbers = user_sample_numbers(program, position)
    if numbers is None or len(numbers) <= int(rows.max()):
        return "the batch has", "leave such samples out, or replace their values"
    listed = _list_samples(numbers[rows].tolist())
    for stage in ("the data", "prepare"):
        values = dict(floating_parts(_reload_batch(program, position, prepared=stage == "prepare"))).get(part)
        if values is not None and len(nonfinite_rows(values)):
            return _find_origin(stage, listed, len(rows))
    return _find_origin("augment", listed, len(rows))


def _find_origin(stage: str, listed: str, count: int) -> tuple[str, str]:
    if stage == "the data":
        return f"{listed} of the data {'has' if count == 1 else 'have'}", "leave out or replace what isn't finite there"
    return f"{stage} makes of {listed}", f"correct {stage}, such as a division by 0 in it"


def _list_samples(numbers: list[int], shown: int = 3) -> str:
    """Returns `sample 7`, `samples 7, 9` or `samples 7, 9, 30 and 12 more`."""
    more = f" and {len(numbers) - shown} more" if len(numbers) > shown else ""
    return f"sample{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers[:shown]))}{more}"


def _reload_batch(program: Program, position: Position, *, prepared: bool) -> Any:
    roles = program.parts.task.roles  # the user's data, wherever the plan stores them
    transform = BatchTransform(torch.device("cpu"), roles.seed, roles.prepare if prepared else None)
    feed = open_feed(roles.train, roles.order, transform, workers=0, endless=False)
    try:
        batch, _ = next(feed.epoch(position.epoch, position.batch))
        return batch
    finally:
        feed.close()


_PACKAGE = str(Path(__file__).parents[2])


def step_under_way(position: Position) -> str:
    """Returns `step 12 (epoch 1, batch 12)`: the step after a position, counted from 1."""
    return f"step {position.step + 1} (epoch {position.epoch + 1}, batch {position.batch + 1})"


def describe_checkpoint(step: int | None) -> str:
    return f"the last good checkpoint is of step {step}" if step else "no checkpoint was written yet"


def module_title(name: str, module: nn.Module) -> str:
    """Returns `'layers.3' (Linear)`, or `the model (Net)` for the outermost module."""
    return f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


def module_titles(model: nn.Module) -> dict[int, str]:
    """Returns the title of each module by its `id`."""
    return {id(module): module_title(name, module) for name, module in model.named_modules()}


def module_at(error: BaseException, model: nn.Module) -> nn.Module | None:
    """Returns the innermost module of `model` in whose method the error was raised."""
    own = module_titles(model)
    return next((module for module in _running_modules(error) if id(module) in own), None)


def unregistered_module_at(error: BaseException, model: nn.Module) -> nn.Module | None:
    """Returns the innermost module that ran, if `model` calls it without having registered it."""
    innermost = next(_running_modules(error), None)
    stray = innermost is not None and id(innermost) not in module_titles(model)
    return innermost if stray and module_at(error, model) is not None else None


def batch_at(error: BaseException) -> Any:
    """Returns the batch at the error; None before the first batch."""
    return local_at(error, "batch")


def local_at(error: BaseException, name: str) -> Any:
    """Returns the innermost local variable of that name in hotloop's own functions."""
    own = (frame for frame in _error_frames(error) if frame.f_code.co_filename.startswith(_PACKAGE))
    return next((frame.f_locals[name] for frame in own if name in frame.f_locals), None)


def _running_modules(error: BaseException) -> Iterator[nn.Module]:
    for frame in _error_frames(error):
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            yield module


def _error_frames(error: BaseException) -> list[FrameType]:
    """Returns the error's frames, innermost first."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]
