"""What graphs need of CUDA: records work on the device once, and repeats it without the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Work = Callable[[], Sequence[Tensor]]
"""Launches one step's work, on tensors that stay where they are; returns what it computed."""

_WARM_UPS = 3
"""Runs before a recording, in which libraries choose their kernels and take their workspaces, as torch's docs advise."""


class Recorder:
    """Records CUDA graphs on one device; they share their memory, since only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, works: Sequence[Work], *, draws: bool = True) -> Recording:
        """The works, one after the other, as one CUDA graph; each draws from a generator of its own, if it does."""
        with torch.cuda.device(self._device):
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._warm_up(works[0])
            graph = torch.cuda.CUDAGraph()
            generators = [torch.Generator(self._device) for _ in works if draws]
            for generator in generators:
                graph.register_generator_state(generator)
            default = torch.cuda.default_generators[torch.cuda.current_device()]
            before = default.graphsafe_get_state()
            outputs = []
            try:
                with torch.cuda.graph(graph, pool=self._pool):
                    for number, work in enumerate(works):
                        if draws:
                            default.graphsafe_set_state(generators[number])
                        outputs.append(work())
            finally:
                default.graphsafe_set_state(before)
        return Recording(graph, generators, outputs)

    def _warm_up(self, work: Work) -> None:
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                work()
        current.wait_stream(stream)


class Recording:
    """A CUDA graph.

    Attributes:
        outputs: of each work, the tensors that a replay writes into; the next replay overwrites them.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, generators: list[torch.Generator], outputs: list[Sequence[Tensor]]
    ) -> None:
        self.outputs = outputs
        self._graph, self._generators = graph, generators

    def replay(self, seeds: Sequence[int]) -> None:
        """Does the works again; each draws what follows from its seed. None are given where none draws.

        A replay begins by telling its kernels the seeds and offsets of all generators that the graph knows (torch:
        CUDAGeneratorState::replay_prologue), so seeding one beforehand is enough.
        """
        for generator, seed in zip(self._generators, seeds, strict=True):
            generator.manual_seed(seed)
        self._graph.replay()
