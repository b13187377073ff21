"""Lowering: applies the transforms of a Plan in order, then builds one step, one feed and one Program."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from hotloop.core.feasibility import check, is_plain
from hotloop.core.files.package_use import PackageUse
from hotloop.core.hardware.devices import check_device
from hotloop.core.hardware.probe import probe_hardware
from hotloop.core.random.rng import preserve_generators
from hotloop.core.reporter import ProgressReporter, Reporter, Say
from hotloop.core.task_parts.optimizers import NamedOptimizers
from hotloop.data.feeds.feed import BatchTransform, Feed, open_feed
from hotloop.data.feeds.rank_rows import RankRowsFeed, WholeBatchFeed, uses_whole_batch
from hotloop.data.order import RankRows
from hotloop.distributed.world import World
from hotloop.errors import MemoryExhausted, describe_error, is_out_of_memory
from hotloop.lowering.checks.single_sample import check_single_samples
from hotloop.lowering.context import LoweringContext, move_to_device
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.object_state.attributes import preserve_attributes
from hotloop.lowering.parameter_server.server import StalenessPolicy
from hotloop.lowering.parameter_server.server_program import parameter_server_program
from hotloop.lowering.program import Program
from hotloop.lowering.steps.alternating_step import AlternatingStep
from hotloop.lowering.task_facts import task_facts, trial_optimizer
from hotloop.lowering.transforms.allocator import apply_allocator
from hotloop.lowering.transforms.cudnn import apply_cudnn
from hotloop.lowering.transforms.layout import apply_layout
from hotloop.lowering.transforms.optimizer import apply_optimizer, check_whole_gradients
from hotloop.lowering.transforms.placement import apply_placement
from hotloop.lowering.transforms.precision import apply_precision
from hotloop.lowering.transforms.residency import apply_residency
from hotloop.lowering.transforms.threads import apply_determinism, apply_threads
from hotloop.plan import BASELINE, Plan
from hotloop.task import Task


def apply_device(parts: LoweringContext) -> LoweringContext:
    """Applies the device and placement axes; each rank has the device of its own number."""
    device = check_device(parts.plan.device)
    if device.type == "cuda" and not parts.world.is_single:
        device = torch.device("cuda", torch.cuda.current_device())
    return move_to_device(parts, device) if parts.plan.placement is None else apply_placement(parts, device)


def apply_engine_timing(parts: LoweringContext) -> LoweringContext:
    """Measures the time of torch's communication engines, in the modes whose engines send by themselves."""
    if parts.plan.parallel not in ("sharded", "tensor", "stages"):
        return parts
    measure = partial(parts.meter.measure_engines, relayed=parts.is_pipelined)
    return replace(parts, around=(*parts.around, measure))


TRANSFORMS: tuple[Callable[[LoweringContext], LoweringContext], ...] = (
    apply_device,
    apply_residency,
    apply_layout,
    apply_precision,
    apply_optimizer,
    apply_threads,
    apply_allocator,
    apply_cudnn,
    apply_determinism,
    apply_engine_timing,
)
"""The transforms of a context, from first to last."""


def lower(
    task: Task,
    plan: Plan = BASELINE,
    say: Say = lambda line: None,
    during: ProgressReporter | None = None,
    package: PackageUse | None = None,
    parts: LoweringContext | None = None,
) -> Program:
    """Makes a Task runnable under a Plan; the caller's random generators keep their state.

    Args:
        say: shows a line to the user, such as the size of data read into memory.
        during: shows the progress of slow operations; `say` gets lines by default.
        package: which packages a compiled step may use; None for any, also a new one.
        parts: model and data of the Task that no other Program uses; default new ones.

    Raises:
        DeviceError: this machine lacks the plan's device.
        PlanError: the plan can't be run for this Task on this machine.
        TaskError, DataError: the Task's parts can't be built, or don't fit together.
        MemoryExhausted: model and data alone are too large.
    """
    check_device(plan.device)
    if plan.ranked:
        plan = plan.with_axes(ranks=World.from_group(plan).ranks)  # a resumed run may have another number of ranks
    with translate_memory_errors(plan), preserve_generators():
        parts = parts or LoweringContext.from_task(task, plan)
        parts = replace(
            parts,
            plan=plan,
            world=World.from_group(plan),
            reporter=Reporter(say, during),
            package=package or PackageUse(),
            trial_optimizer=parts.trial_optimizer or trial_optimizer(task, parts.model),
        )
        _check_plan(parts)
        for transform in TRANSFORMS:
            parts = transform(parts)
        for note in parts.notes:
            say(note)
        with preserve_attributes(parts.task):
            check_single_samples(parts)
        if plan.parallel == "async":
            return parameter_server_program(parts, StalenessPolicy(plan.staleness))
        check_whole_gradients(parts.model, plan)
        step = _make_step(parts)
        check_whole_gradients(step.holder, plan)  # the optimizer's factory may register hooks
        return _check_first_batch(
            Program(step.parts, step, _make_feed(parts))
        )  # the step's parts may differ from `parts`


@contextmanager
def translate_memory_errors(plan: Plan) -> Iterator[None]:
    """Raises MemoryExhausted if building model and data runs out of memory."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        where = " and ".join(dict.fromkeys([plan.device, *(plan.placement or {}).values()]))
        raise MemoryExhausted(
            f"making model and data ready on {where} ran out of memory: {describe_error(error)}",
            fix="use a smaller model, less data at once, or a device with more memory",
        ) from error


def _make_step(parts: LoweringContext) -> EagerStep:
    """Builds the step of the plan. Local imports: torch's compiler and distributed parts take seconds to import."""
    plan = parts.plan
    if parts.is_pipelined:
        from hotloop.lowering.pipeline.pipeline_step import PipelineStep

        return PipelineStep(parts)
    if plan.ranked:
        return _make_rank_step(parts)
    if plan.graphs != "none":
        from hotloop.lowering.steps.cuda_graph import CudaGraphStep

        return CudaGraphStep(parts)
    if plan.compile != "none":
        from hotloop.lowering.steps.compiled_step import CompiledStep

        return CompiledStep(parts)
    optimizer = parts.build_optimizer(parts.model)
    parts = replace(parts, build_optimizer=lambda model: optimizer)
    return AlternatingStep(parts) if isinstance(optimizer, NamedOptimizers) else EagerStep(parts)


def _make_rank_step(parts: LoweringContext) -> EagerStep:
    if parts.plan.parallel == "tensor":
        from hotloop.lowering.steps.tensor_parallel import TensorStep

        return TensorStep(parts)
    from hotloop.lowering.steps.data_parallel import DataParallelStep, ParameterHostStep
    from hotloop.lowering.steps.local_sgd import LocalSgdStep

    return {"towers": ParameterHostStep, "local": LocalSgdStep}.get(parts.plan.parallel, DataParallelStep)(parts)


def _check_first_batch(program: Program) -> Program:
    """Checks accumulation and compiles or records the step on a first batch; the program's State stays the same."""
    parts, plan = program.parts, program.parts.plan
    made = " and ".join(["compiled"] * (plan.compile != "none") + ["recorded"] * (plan.graphs != "none"))
    if plan.accumulation == 1 and not made:
        return program
    with preserve_attributes(parts.task):
        batch, samples = next(
            open_feed(parts.splits.train, parts.splits.order, _make_transform(parts), workers=0).epoch(0)
        )
    if plan.accumulation > 1:
        with preserve_attributes(parts.task):
            program.checks.compare_first(batch, samples)
    if made:
        began = time.perf_counter()
        if plan.compile != "none":
            parts.say("compiling the step, which may take half a minute")
        with parts.during("compiling the step", counted=False), close_on_error(program):
            program.prepare(batch, samples)
        program.compile_s = time.perf_counter() - began
        parts.say(f"{made} the step in {program.compile_s:.1f}s")
    return program


@contextmanager
def close_on_error(program: Program) -> Iterator[None]:
    """Closes the Program if the block ends by an exception, Ctrl-C included."""
    try:
        yield
    except BaseException:
        program.close()
        raise


def _check_plan(parts: LoweringContext) -> None:
    """Refuses an infeasible plan. The baseline is always feasible and needs no probe of the machine."""
    if not is_plain(parts.plan) or parts.plan.threads or parts.plan.workers:
        device = str(check_device(parts.plan.device))
        check(parts.plan.with_axes(device=device), parts.facts or task_facts(parts), probe_hardware(device))


def _make_feed(parts: LoweringContext) -> Feed:
    order, world, source = parts.splits.order, parts.world, parts.splits.train
    # A Task with deterministic=False may change its data set: each epoch gets new workers, as with torch's loaders.
    opened = partial(open_feed, source, workers=parts.plan.workers, endless=parts.task.deterministic is not False)
    if parts.evaluation_ranks.is_single:
        return opened(order, _make_transform(parts))
    assert order is not None
    rows = RankRows(**vars(order), rank=world.rank, ranks=world.ranks)
    if world.broadcast_object(lambda: uses_whole_batch(source, order)):
        parts.say(
            "collate makes a sample's row depend on others (padding): each rank loads whole batches, and cuts them"
        )
        return WholeBatchFeed(opened(order, _make_transform(parts)), rows)
    return RankRowsFeed(opened(rows, replace(_make_transform(parts), rank=world.rank)), order)


def _make_transform(parts: LoweringContext) -> BatchTransform:
    return BatchTransform(parts.device, parts.task.seed, parts.splits.prepare, parts.task.augment)
