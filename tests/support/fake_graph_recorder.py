"""A CPU's stand-in for CUDA graphs: records the operations of a step on its tensors, and repeats just these."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.lowering.steps.cuda_graph import GraphWork

UNSEEDED = 5
"""What is drawn without a seed follows from no step."""


class FakeRecorder:
    """As with CUDA, what Python told an operation when it was recorded is what it is told at each replay."""

    def __init__(self, device: torch.device) -> None:
        self.replays: list[int] = []

    def record(self, works: Sequence[GraphWork], *, draws: bool = True) -> FakeRecording:
        works[0]()  # a warm-up
        tapes: list[Tape] = []
        outputs = []
        for work in works:
            with Tape() as tape:
                outputs.append(work())
            tapes.append(tape)
        return FakeRecording(tapes, outputs, self.replays)


class FakeRecording:
    def __init__(self, tapes: list[Tape], outputs: list[Sequence[Tensor]], replays: list[int]) -> None:
        self.tapes, self.outputs, self.replays = tapes, outputs, replays

    def replay(self, seeds: Sequence[int]) -> None:
        self.replays.append(len(self.tapes))
        for tape, seed in zip_longest(self.tapes, seeds):
            torch.manual_seed(UNSEEDED if seed is None else seed)
            tape.play()


class Tape(TorchDispatchMode):
    """Operations with the very tensors that they worked on."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")  # CUDA's own words
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result

    def play(self) -> None:
        for function, args, kwargs, recorded in self.operations:
            again = function(*args, **kwargs)
            for target, value in zip(pytree.tree_leaves(recorded), pytree.tree_leaves(again), strict=True):
                if isinstance(target, Tensor) and target.data_ptr() != value.data_ptr():
                    target.copy_(value)


class RecallingRecorder(FakeRecorder):
    """Calls the work again, for compiled programs, whose kernels no tape hears of."""

    def record(self, works: Sequence[GraphWork], *, draws: bool = True) -> Any:
        return Recalled(works, [work() for work in works], self.replays)


class Recalled:
    def __init__(self, works: Sequence[GraphWork], outputs: list[Sequence[Tensor]], replays: list[int]) -> None:
        self.works, self.outputs, self.replays = works, outputs, replays

    def replay(self, seeds: Sequence[int]) -> None:
        self.replays.append(len(self.works))
        for work, outputs, seed in zip_longest(self.works, self.outputs, seeds):
            torch.manual_seed(UNSEEDED if seed is None else seed)
            for target, value in zip(outputs, work(), strict=True):
                target.copy_(value)
