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
"""Launches one step's work, on tensors that stay where they are; returns what it computed."""

_WARM_UP_RUNS = 3
"""Runs before a recording, in which libraries choose their kernels and take their workspaces, as torch's docs advise."""


class GraphRecorder:
    """Records CUDA graphs on one device; they share their memory, since only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, works: Sequence[GraphWork], *, draws: bool = True) -> RecordedGraph:
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


class StaticBatches:
    """Batches that stay where they are, for graphs to read: so many like one.

    Args:
        like: tensors on the device, in whatever containers.
    """

    def __init__(self, like: Any, count: int) -> None:
        leaves, unflatten = flatten_tree(like)
        columns = [_static_column(leaf, count) for leaf in leaves]
        self.batches = [unflatten(of_one) for of_one in zip(*columns, strict=True)]
        self._columns = columns

    def fill(self, batches: Iterable[Any]) -> None:
        """Copies batches into the first ones; what is there already stays."""
        for own, batch in zip(self.batches, batches, strict=False):
            if batch is not own:
                for target, source in zip(tree_tensors(own), tree_tensors(batch), strict=True):
                    target.copy_(source)

    def split_rows(self, columns: Any, rows: Tensor) -> list[Any]:
        """Fills all of them with rows of a table's columns, one operation for each column; returns them."""
        for own, column in zip(self._columns, tree_tensors(columns), strict=True):
            _cut_rows(own, column, rows)
        return self.batches


def _static_column(leaf: Any, count: int) -> list[Any]:
    """Tensors like one, in one piece of memory where each begins as a compiler expects it of a tensor of its own."""
    if not isinstance(leaf, Tensor):  # with which no step is captured
        return [leaf] * count
    if leaf.ndim and leaf.is_contiguous() and leaf.nbytes % _ALIGNMENT_BYTES == 0:
        return list(leaf.expand(count, *leaf.shape).clone().unbind())
    return [leaf.clone() for _ in range(count)]


def _cut_rows(own: list[Tensor], column: Tensor, rows: Tensor) -> None:
    first, last = own[0], own[-1]
    if last.untyped_storage().data_ptr() == first.untyped_storage().data_ptr():
        whole = first.as_strided((len(rows), *first.shape[1:]), first.stride(), first.storage_offset())
        torch.index_select(column, 0, rows, out=whole)
    else:
        for target, part in zip(own, rows.split(len(first)), strict=True):
            torch.index_select(column, 0, part, out=target)


_ALIGNMENT_BYTES = 16
"""Bytes; compilers copy what doesn't begin at a multiple of them."""


class CudaGraphStep(CompiledStep):
    """Training steps as CUDA graphs: of one step, and of as many as the plan wants in one replay.

    A graph works on the tensors that it was recorded with. Batches are copied into tensors of its own, and so are the
    numbers that a schedule changes; optimizer state that was made or restored elsewhere is moved to where the graph
    expects it. What a graph isn't for, such as an incomplete last batch, runs eagerly on the same tensors.
    """

    cuts_batches = True

    def __init__(self, parts: LoweringContext) -> None:
        super().__init__(parts)
        graphs = parts.plan.graphs
        self.at_once = graphs if isinstance(graphs, int) else 1
        self._recorder = GraphRecorder(parts.device)
        self._choice = FreshAlgorithms() if parts.plan.cudnn == "benchmark" else None
        self._recordings: dict[int, RecordedGraph] = {}
        self._own = StaticBatches((), 0)
        # The last table that batches were rows of, and whether these are like what is recorded.
        self._table: tuple[Table | None, bool] = (None, False)
        self._cells = torch.zeros(0)
        self._set: list[list[float]] = []  # what they are now
        self._total: Tensor | None = None  # where the graph adds its losses up; None where that is done beside it
        vars(self.optimizer)["_warned_capturable_if_run_uncaptured"] = True  # it does so on purpose
        for group in self.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True  # torch then keeps the count of steps on the device
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True  # as torch would choose, were it not for tensors without content

    def warm_up(self, batch: Any, samples: int) -> None:
        """Compiles and records the step for batches like this one; see `CompiledStep.warm_up`."""
        self._samples = samples
        super().warm_up(batch, samples)

    def prepare(self, batch: Any, varying: set[str]) -> None:
        """Captures and records; the eager step must have run, so that the optimizer's state is there.

        Raises:
            PlanError: the step can't be captured, compiled, or recorded as a CUDA graph.
        """
        plan, device = self.parts.plan, self.parts.device
        self._check_state()
        self._signature, self._set = batch_signature(batch), []
        self._own = StaticBatches(batch, self.at_once)
        width = len(varying) + len(varying) % 2  # as `_ALIGNMENT_BYTES` wants it
        self._cells = torch.zeros(self.at_once, width, dtype=torch.float64, device=device)[:, : len(varying)]
        rows = [dict(zip(sorted(varying), row.unbind(), strict=True)) for row in self._cells]
        self._hyper = OptimizerScalars(self.optimizer, rows[0])
        self._set_cells([list(self._hyper.current_values().values())] * self.at_once)
        self._runner = self._make_recording(self._own.batches[0], rows[0], plan.compile != "none")
        self._expected = self._tensors()
        works = [partial(self._work, *pair) for pair in zip(rows, self._own.batches, strict=True)]
        for count in dict.fromkeys((1, self.at_once)):
            self._recordings[count] = self._record(works[:count])

    def _make_recording(self, batch: Any, cells: dict[str, Tensor], compiles: bool) -> Runner:
        """The captured step: operation by operation, or compiled, over lists of parameters where the compiler takes these."""
        if not compiles:
            graph = self._lift_scalars(batch, cells, "as_set").graph
            return lambda flat: graph(*flat)
        lists = any(group.get("foreach") is True for group in self.optimizer.param_groups)
        captured = self._lift_scalars(batch, cells, "in_lists" if lists else "singly")
        try:
            return build_program(captured, self.parts)
        except PlanError:
            if not lists:
                raise
            return build_program(self._lift_scalars(batch, cells, "singly"), self.parts)

    def _lift_scalars(self, batch: Any, cells: dict[str, Tensor], update: UpdateStyle) -> CapturedStep:
        """Captured, rewritten, and without numbers from the host; it adds its losses up where each counts its samples."""
        captured = self._capture(batch, cells, update)
        self._rewrite(captured)
        self._may_draw = not has_no_draws(captured.graph)
        self._total = self.sums["loss"] if counts_samples(self.parts) and not captured.scalars else None
        self._captured = lift_scalars(captured, self._total, self._samples)
        return self._captured

    def run_eagerly(self) -> None:
        """From now on, operation by operation, so that hooks of modules see what happens."""
        self._recordings.clear()

    def run(self, batches: Iterator[tuple[Any, int]], step: int) -> Iterator[tuple[int, int]]:
        """Runs a step on each batch, from step number `step` on; yields (steps, samples) as they are done.

        As many steps as the plan wants are one replay, where so many batches are left; the others run one by one.
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
        """Cuts the batches of a replay in one go, to where the graph reads them."""
        while True:
            if batches.all_rows >= self.at_once and self._can_cut(batches):
                rows = batches.take_rows(self.at_once)
                own = self._own.split_rows(batches.table.columns, rows)
                self._replay([(batch, self._samples) for batch in own], step)
                yield self.at_once, len(rows)
                step += self.at_once
            elif (pair := next(batches, None)) is not None:
                yield from super().run(iter([pair]), step)
                step += 1
            else:
                return

    def _can_cut(self, batches: RowBatches) -> bool:
        """Whether a replay's batches are rows of that table."""
        if self.at_once not in self._recordings or batches.size != self._samples:
            return False
        if self._table[0] is not batches.table:
            first = batches.table.take(torch.arange(self._samples))
            self._table = batches.table, batch_signature(first) == self._signature
        return self._table[1] and self._is_ready(self._own.batches[0])

    def __call__(self, batch: Any, samples: int, step: int) -> Tensor:
        """Runs step number `step`; returns the loss, 0-dim, on the device."""
        group = [(batch, samples)]
        return self._replay(group, step).clone() if self._can_replay(group) else self._run_eagerly(*group[0], step)

    def _is_steady(self, loss: Tensor) -> bool:
        """Never: a program inside of a graph isn't called by itself."""
        return False

    def _can_replay(self, group: Sequence[tuple[Any, int]]) -> bool:
        if len(group) not in self._recordings or any(batch_signature(batch) != self._signature for batch, _ in group):
            return False
        counted = self._total is None or all(samples == self._samples for _, samples in group)
        return counted and self._is_ready(group[0][0])

    def _is_ready(self, batch: Any) -> bool:
        return self._has_host_scalars() and self._is_bound() and not self._is_another(batch)

    def _replay(self, group: Sequence[tuple[Any, int]], step: int) -> Tensor:
        """Runs steps on a group of batches, as many as there is a recording of; returns the last loss."""
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
        """The optimizer's numbers of so many steps, past which the schedule goes; fewer where it moves a fixed one."""
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
        self._own.fill(batch for batch, _ in group)
        if rows != self._set[: len(rows)]:
            self._set_cells(rows)
            self._set[: len(rows)] = rows
        if self._total is not None and self.sums["loss"] is not self._total:  # as at the beginning of each epoch
            self.sums["loss"] = self._total.copy_(self.sums["loss"])
        self.steps_run += len(group)
        seeds = [self.draws.seed_of(step + number) for number in range(len(group))] if self._may_draw else []
        recording.replay(seeds)
        self._note(group, recording.outputs)
        return recording.outputs[-1][0]

    def _note(self, group: Sequence[tuple[Any, int]], outputs: Sequence[Sequence[Tensor]]) -> None:
        """Adds up what a replay came to, but for losses that it added up itself."""
        assert self._captured is not None
        names = self._captured.scalars
        for (batch, samples), (loss, *scalars) in zip(group, outputs, strict=True):
            if self._total is None:
                self._add(loss, dict(zip(names, scalars, strict=True)), self.parts.weigh(batch, samples))
            else:
                self.sums["weight"] += samples
            self.sums["samples"] += samples

    def _set_cells(self, rows: list[list[float]]) -> None:
        """Gives the graph the optimizer's numbers of each step."""
        # Nobody waits for the device: what isn't pinned is read before the call returns.
        self._cells[: len(rows)].copy_(torch.tensor(rows, dtype=torch.float64), non_blocking=True)

    def _work(self, hyper: dict[str, Tensor], batch: Any) -> Sequence[Tensor]:
        assert self._runner is not None
        with torch.no_grad():
            total = [] if self._total is None else [self._total]
            return tuple(self._runner([*self._tensors(hyper).values(), *tree_tensors(batch), *total]))

    def _tensors(self, hyper: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        return tensors_by_place(step_tensors(self, hyper or self._hyper.cells, whole=True))

    def _is_bound(self) -> bool:
        """Moves what was put elsewhere back to where the graph works; False while the optimizer's state isn't complete."""
        if self._bound is None:
            values = step_tensors(self, self._hyper.cells, whole=True) | {
                "parameters": dict(self.parts.model.named_parameters())
            }
            found = tensors_by_place(values)
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
            return record() if self._choice is None else self._choice(record)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise PlanError(
                f"the step can't be recorded as a CUDA graph: {describe_error(error)}",
                expected="work that never waits for the host",
                fix="choose graphs=none",
            ) from error

    def _check_state(self) -> None:
        """An optimizer that counts its steps on the host would need the host at each."""
        device, name = self.parts.device.type, type(self.optimizer).__name__
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.device.type != device:
                    raise PlanError(
                        f"{name} keeps its {key!r} on the {value.device.type}, where a CUDA graph can't read it",
                        expected="an optimizer with `capturable`, or without a count of steps",
                        fix="choose graphs=none, or another optimizer",
                    )
