"""The graphs axis: a step, or several, as one CUDA graph, which the device runs without waiting for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hotloop.data.batch_tree import flatten_tree, tree_tensors
from hotloop.data.feeds.batches import RowBatches
from hotloop.data.sources import Table
from hotloop.errors import PlanError, describe_error, is_out_of_memory
from hotloop.lowering.compile.capture import CapturedStep, UpdateStyle
from hotloop.lowering.compile.compiled_rng import has_no_draws
from hotloop.lowering.compile.device_scalars import lift_scalars
from hotloop.lowering.compile.inputs import FixedScalarChanged, OptimizerScalars, step_tensors, tensors_by_place
from hotloop.lowering.context import LoweringContext, counts_samples
from hotloop.lowering.steps.compiled_step import CompiledStep, Runner, batch_signature, build_program
from hotloop.lowering.transforms.cudnn import FreshAlgorithms

GraphWork = Callable[[], Sequence[Tensor]]
"""Launches one step's kernels on tensors at fixed addresses; returns the outputs."""

_WARM_UP_RUNS = 3
"""Runs before a recording, in which libraries choose kernels and allocate workspaces; the number of torch's docs."""


class GraphRecorder:
    """Records CUDA graphs on one device; they share a memory pool, since only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, works: Sequence[GraphWork], *, draws: bool = True) -> RecordedGraph:
        """Records the works, one after the other, as one CUDA graph; with `draws` each has a generator of its own."""
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
        return RecordedGraph(graph, generators, outputs)

    def _warm_up(self, work: GraphWork) -> None:
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                work()
        current.wait_stream(stream)


class RecordedGraph:
    """A CUDA graph.

    Attributes:
        outputs: output tensors of each work; each replay overwrites them.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, generators: list[torch.Generator], outputs: list[Sequence[Tensor]]
    ) -> None:
        self.outputs = outputs
        self._graph, self._generators = graph, generators

    def replay(self, seeds: Sequence[int]) -> None:
        """Runs the works again with one seed for each; without seeds if none draws.

        A replay first copies seeds and offsets of all registered generators to the device (torch:
        CUDAGeneratorState::replay_prologue), so seeding before the replay is enough.
        """
        for generator, seed in zip(self._generators, seeds, strict=True):
            generator.manual_seed(seed)
        self._graph.replay()


class StaticBatches:
    """Batches at fixed addresses, which graphs read.

    Args:
        like: tensors on the device, in any containers.
        count: number of batches.
    """

    def __init__(self, like: Any, count: int) -> None:
        leaves, unflatten = flatten_tree(like)
        columns = [_static_column(leaf, count) for leaf in leaves]
        self.batches = [unflatten(row) for row in zip(*columns, strict=True)]
        self._columns = columns

    def fill(self, batches: Iterable[Any]) -> None:
        """Copies batches into the first ones; a batch that is already its own target isn't copied."""
        for static, batch in zip(self.batches, batches, strict=False):
            if batch is not static:
                for target, source in zip(tree_tensors(static), tree_tensors(batch), strict=True):
                    target.copy_(source)

    def split_rows(self, columns: Any, rows: Tensor) -> list[Any]:
        """Fills all batches with rows of a table's columns, one operation for each column; returns the batches."""
        for targets, column in zip(self._columns, tree_tensors(columns), strict=True):
            _cut_rows(targets, column, rows)
        return self.batches


def _static_column(leaf: Any, count: int) -> list[Any]:
    """Returns tensors in one piece of memory, each aligned as a compiler expects it of a separate tensor."""
    if not isinstance(leaf, Tensor):  # no step is captured with such a leaf
        return [leaf] * count
    if leaf.ndim and leaf.is_contiguous() and leaf.nbytes % _ALIGNMENT_BYTES == 0:
        return list(leaf.expand(count, *leaf.shape).clone().unbind())
    return [leaf.clone() for _ in range(count)]


def _cut_rows(targets: list[Tensor], column: Tensor, rows: Tensor) -> None:
    first, last = targets[0], targets[-1]
    if last.untyped_storage().data_ptr() == first.untyped_storage().data_ptr():
        whole = first.as_strided((len(rows), *first.shape[1:]), first.stride(), first.storage_offset())
        torch.index_select(column, 0, rows, out=whole)
    else:
        for target, part in zip(targets, rows.split(len(first)), strict=True):
            torch.index_select(column, 0, part, out=target)


_ALIGNMENT_BYTES = 16
"""Bytes; compilers copy tensors that don't begin at a multiple."""


class CudaGraphStep(CompiledStep):
    """Training steps as CUDA graphs: of one step, and of the plan's number of steps per replay.

    A graph works on the tensors of its recording. So batches and the numbers that a schedule changes are copied into
    static tensors, and optimizer state that was created or restored elsewhere moves to the recorded addresses. Batches
    that don't fit a graph, such as an incomplete last one, run eagerly on the same tensors.
    """

    cuts_batches = True

    def __init__(self, parts: LoweringContext) -> None:
        super().__init__(parts)
        graphs = parts.plan.graphs
        self.at_once = graphs if isinstance(graphs, int) else 1
        self._recorder = GraphRecorder(parts.device)
        self._algorithms = FreshAlgorithms() if parts.plan.cudnn == "benchmark" else None
        self._recordings: dict[int, RecordedGraph] = {}
        self._static = StaticBatches((), 0)
        self._table: tuple[Table | None, bool] = (None, False)  # the last table, and whether its batches fit
        self._cells = torch.zeros(0)
        self._set: list[list[float]] = []  # current content of `_cells`
        self._total: Tensor | None = None  # the graph's sum of losses; None if the graph doesn't sum
        vars(self.optimizer)["_warned_capturable_if_run_uncaptured"] = True  # eager steps are intended
        for group in self.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True  # moves the count of steps to the device
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True  # torch's default for CUDA parameters, but not for fake tensors

    def warm_up(self, batch: Any, samples: int) -> None:
        """Compiles and records the step for batches like this one; see `CompiledStep.warm_up`."""
        self._samples = samples
        super().warm_up(batch, samples)

    def prepare(self, batch: Any, varying: set[str]) -> None:
        """Captures and records; needs one eager step before, which creates the optimizer's state.

        Raises:
            PlanError: the step can't be captured, compiled, or recorded as a CUDA graph.
        """
        plan, device = self.parts.plan, self.parts.device
        self._check_state()
        self._signature, self._set = batch_signature(batch), []
        self._static = StaticBatches(batch, self.at_once)
        width = len(varying) + len(varying) % 2  # aligns each row to `_ALIGNMENT_BYTES`
        self._cells = torch.zeros(self.at_once, width, dtype=torch.float64, device=device)[:, : len(varying)]
        rows = [dict(zip(sorted(varying), row.unbind(), strict=True)) for row in self._cells]
        self._hyper = OptimizerScalars(self.optimizer, rows[0])
        self._set_cells([list(self._hyper.current_values().values())] * self.at_once)
        self._runner = self._make_runner(self._static.batches[0], rows[0], plan.compile != "none")
        self._expected = self._tensors()
        works = [partial(self._work, *pair) for pair in zip(rows, self._static.batches, strict=True)]
        for count in dict.fromkeys((1, self.at_once)):
            self._recordings[count] = self._record(works[:count])

    def _make_runner(self, batch: Any, cells: dict[str, Tensor], compiles: bool) -> Runner:
        """Returns the captured step: its operations, or compiled, over lists of parameters if the compiler can."""
        if not compiles:
            graph = self._lift_scalars(batch, cells, "as_set").graph
            return lambda flat: graph(*flat)
        in_lists = any(group.get("foreach") is True for group in self.optimizer.param_groups)
        captured = self._lift_scalars(batch, cells, "in_lists" if in_lists else "singly")
        try:
            return build_program(captured, self.parts)
        except PlanError:
            if not in_lists:
                raise
            return build_program(self._lift_scalars(batch, cells, "singly"), self.parts)

    def _lift_scalars(self, batch: Any, cells: dict[str, Tensor], update: UpdateStyle) -> CapturedStep:
        """Captures and rewrites the step without host numbers; the graph sums losses that are weighted by samples."""
        captured = self._capture(batch, cells, update)
        self._rewrite(captured)
        self._may_draw = not has_no_draws(captured.graph)
        self._total = self.sums["loss"] if counts_samples(self.parts) and not captured.scalars else None
        self._captured = lift_scalars(captured, self._total, self._samples)
        return self._captured

    def run_eagerly(self) -> None:
        self._recordings.clear()

    def run(self, batches: Iterator[tuple[Any, int]], step: int) -> Iterator[tuple[int, int]]:
        """Runs a step on each batch, starting with step number `step`; yields (steps, samples) after each replay.

        One replay runs as many steps as the plan sets; the batches left at the end run one by one.
        """
        if isinstance(batches, RowBatches):
            yield from self._run_cut(batches, step)
            return
        while group := list(islice(batches, self.at_once)):
            if len(group) == self.at_once and self._can_replay(group):
                self._replay(group, step)
                yield len(group), sum(samples for _, samples in group)
            else:
                yield from super().run(iter(group), step)
            step += len(group)

    def _run_cut(self, batches: RowBatches, step: int) -> Iterator[tuple[int, int]]:
        """Cuts all batches of a replay at once, directly into the graph's static tensors."""
        while True:
            if batches.all_rows >= self.at_once and self._can_cut(batches):
                rows = batches.take_rows(self.at_once)
                group = self._static.split_rows(batches.table.columns, rows)
                self._replay([(batch, self._samples) for batch in group], step)
                yield self.at_once, len(rows)
                step += self.at_once
            elif (pair := next(batches, None)) is not None:
                yield from super().run(iter([pair]), step)
                step += 1
            else:
                return

    def _can_cut(self, batches: RowBatches) -> bool:
        """Whether a replay's batches are rows of the table."""
        if self.at_once not in self._recordings or batches.size != self._samples:
            return False
        if self._table[0] is not batches.table:
            first = batches.table.take(torch.arange(self._samples))
            self._table = batches.table, batch_signature(first) == self._signature
        return self._table[1] and self._is_ready(self._static.batches[0])

    def __call__(self, batch: Any, samples: int, step: int) -> Tensor:
        """Runs step number `step`; returns the loss, 0-dim, on the device."""
        group = [(batch, samples)]
        return self._replay(group, step).clone() if self._can_replay(group) else self._run_eagerly(*group[0], step)

    def _is_steady(self, loss: Tensor) -> bool:
        """Returns False: a program inside of a graph is never called by itself."""
        return False

    def _can_replay(self, group: Sequence[tuple[Any, int]]) -> bool:
        if len(group) not in self._recordings or any(batch_signature(batch) != self._signature for batch, _ in group):
            return False
        fits_sum = self._total is None or all(samples == self._samples for _, samples in group)
        return fits_sum and self._is_ready(group[0][0])

    def _is_ready(self, batch: Any) -> bool:
        return self._has_host_scalars() and self._is_bound() and not self._is_another(batch)

    def _replay(self, group: Sequence[tuple[Any, int]], step: int) -> Tensor:
        """Runs a group of steps, as many as a recording has; returns the last loss."""
        rows = self._rows(len(group))
        if len(rows) == len(group):
            return self._replay_with(rows, group, step)
        for place, pair in enumerate(group):
            if place < len(rows):
                loss = self._replay_with(rows[place : place + 1], [pair], step + place)
            else:
                loss = self._run_eagerly(*pair, step + place)
        return loss

    def _rows(self, steps: int) -> list[list[float]]:
        """Returns the optimizer's numbers for each step, and steps the schedule; fewer rows if a constant changes."""
        rows: list[list[float]] = []
        try:
            if self.schedule is None:
                return [list(self._hyper.current_values().values())] * steps
            for _ in range(steps):
                rows.append(list(self._hyper.current_values().values()))
                self.step_schedule()
        except FixedScalarChanged as moved:
            self._report_fallback(moved)
        return rows

    def _replay_with(self, rows: list[list[float]], group: Sequence[tuple[Any, int]], step: int) -> Tensor:
        assert self._captured is not None
        recording = self._recordings[len(group)]
        self._static.fill(batch for batch, _ in group)
        if rows != self._set[: len(rows)]:
            self._set_cells(rows)
            self._set[: len(rows)] = rows
        if self._total is not None and self.sums["loss"] is not self._total:  # after each `reset_sums`
            self.sums["loss"] = self._total.copy_(self.sums["loss"])
        self.steps_run += len(group)
        seeds = [self.draws.seed_of(step + number) for number in range(len(group))] if self._may_draw else []
        recording.replay(seeds)
        self._note(group, recording.outputs)
        return recording.outputs[-1][0]

    def _note(self, group: Sequence[tuple[Any, int]], outputs: Sequence[Sequence[Tensor]]) -> None:
        """Adds a replay's results to the sums, except losses that the graph has summed."""
        assert self._captured is not None
        names = self._captured.scalars
        for (batch, samples), (loss, *scalars) in zip(group, outputs, strict=True):
            if self._total is None:
                self._add(loss, dict(zip(names, scalars, strict=True)), self.parts.weigh(batch, samples))
            else:
                self.sums["weight"] += samples
            self.sums["samples"] += samples

    def _set_cells(self, rows: list[list[float]]) -> None:
        # Asynchronous and safe: memory that isn't pinned is read before the call returns.
        self._cells[: len(rows)].copy_(torch.tensor(rows, dtype=torch.float64), non_blocking=True)

    def _work(self, hyper: dict[str, Tensor], batch: Any) -> Sequence[Tensor]:
        assert self._runner is not None
        with torch.no_grad():
            total = [] if self._total is None else [self._total]
            return tuple(self._runner([*self._tensors(hyper).values(), *tree_tensors(batch), *total]))

    def _tensors(self, hyper: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        return tensors_by_place(step_tensors(self, hyper or self._hyper.cells, whole=True))

    def _is_bound(self) -> bool:
        """Moves replaced tensors back to the recorded addresses; False while the optimizer's state is incomplete."""
        if self._bound is None:
            live = {"parameters": dict(self.parts.model.named_parameters())}
            found = tensors_by_place(step_tensors(self, self._hyper.cells, whole=True) | live)
            if not self._fits(found):
                return False
            for place, static in self._expected.items():
                tensor = found[place]
                if tensor.data_ptr() != static.data_ptr():
                    tensor.data = static.copy_(tensor.detach())
            self._bind([found[place] for place in self._expected])
        return True

    def _record(self, works: Sequence[GraphWork]) -> RecordedGraph:
        try:
            record = partial(self._recorder.record, works, draws=self._may_draw)
            return record() if self._algorithms is None else self._algorithms(record)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise PlanError(
                f"the step can't be recorded as a CUDA graph: {describe_error(error)}",
                expected="work that never waits for the host",
                fix="choose graphs=none",
            ) from error

    def _check_state(self) -> None:
        """Refuses an optimizer that counts steps on the host."""
        device, name = self.parts.device.type, type(self.optimizer).__name__
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.device.type != device:
                    raise PlanError(
                        f"{name} stores its {key!r} on the {value.device.type}, where a CUDA graph can't read it",
                        expected="an optimizer with `capturable`, or without a count of steps",
                        fix="choose graphs=none, or another optimizer",
                    )
