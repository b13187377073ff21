"""Where in the user's model, data and training an error came up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from hotloop.state import Position

_PACKAGE = str(Path(__file__).parents[1])


def step_under_way(position: Position) -> str:
    """`step 12 (epoch 1, batch 12)`: the step that follows a position, counted from 1."""
    return f"step {position.step + 1} (epoch {position.epoch + 1}, batch {position.batch + 1})"


def saved(step: int | None) -> str:
    """What there is to go on with."""
    return f"the last good checkpoint is of step {step}" if step else "no checkpoint was written yet"


def title(name: str, module: nn.Module) -> str:
    """`'layers.3' (Linear)`, or `the model (Net)` for the outermost module."""
    return f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


def named(model: nn.Module) -> dict[int, str]:
    """The title of each module, by its identity."""
    return {id(module): title(name, module) for name, module in model.named_modules()}


def module_at(error: BaseException, model: nn.Module) -> nn.Module | None:
    """The innermost module of `model` in whose method the error came up."""
    own = named(model)
    return next((module for module in _modules(error) if id(module) in own), None)


def stray_at(error: BaseException, model: nn.Module) -> nn.Module | None:
    """The innermost module that ran, if it is called by `model` without being a part of it."""
    innermost = next(_modules(error), None)
    stray = innermost is not None and id(innermost) not in named(model)
    return innermost if stray and module_at(error, model) is not None else None


def batch_at(error: BaseException) -> Any:
    """The batch that was being worked on; None before there was one."""
    return local_at(error, "batch")


def local_at(error: BaseException, name: str) -> Any:
    """The innermost value of that name in hotloop's own functions."""
    own = (frame for frame in _frames(error) if frame.f_code.co_filename.startswith(_PACKAGE))
    return next((frame.f_locals[name] for frame in own if name in frame.f_locals), None)


def _modules(error: BaseException) -> Iterator[nn.Module]:
    """The modules whose methods were running, innermost first."""
    for frame in _frames(error):
        if isinstance(module := frame.f_locals.get("self"), nn.Module):
            yield module


def _frames(error: BaseException) -> list[FrameType]:
    """The frames that the error passed, innermost first."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]
