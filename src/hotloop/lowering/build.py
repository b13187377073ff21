"""Lowering: the transforms of a Plan in their one visible order, then one step, one feed, one Program."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from hotloop.core.feasibility.violations import check, is_plain
from hotloop.core.hardware.devices import check_device
from hotloop.core.hardware.probe import here
from hotloop.core.random.rng import preserved
from hotloop.core.reporter import During, Say, in_lines
from hotloop.core.task_parts.named_optimizers import NamedOptimizers
from hotloop.data.feeds.feed import Feed, Treatment, open_feed
from hotloop.data.feeds.rank_rows import CutFeed, PartedFeed, looks_around
from hotloop.data.order import Parted
from hotloop.distributed.world import World
from hotloop.errors import MemoryExhausted, blame, out_of_memory
from hotloop.lowering.checks.single_sample import check_single_samples
from hotloop.lowering.context import Ingredients, placed
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.object_state.attributes import unchanged
from hotloop.lowering.parameter_server.server import Policy
from hotloop.lowering.parameter_server.server_program import served
from hotloop.lowering.program import Program
from hotloop.lowering.steps.alternating_step import AlternatingStep
from hotloop.lowering.task_facts import facts_of, trial_optimizer
from hotloop.lowering.transforms.allocator import with_allocator
from hotloop.lowering.transforms.cudnn import with_cudnn
from hotloop.lowering.transforms.layout import in_layout
from hotloop.lowering.transforms.optimizer import check_whole_gradients, with_implementation
from hotloop.lowering.transforms.placement import in_places
from hotloop.lowering.transforms.precision import in_precision
from hotloop.lowering.transforms.residency import resident
from hotloop.lowering.transforms.threads import repeatable, with_threads
from hotloop.plan import BASELINE, Plan
from hotloop.task import Task


def on_device(parts: Ingredients) -> Ingredients:
    """The device axis, and modules that are placed elsewhere; each rank has the device of its own number."""
    device = check_device(parts.plan.device)
    if device.type == "cuda" and not parts.world.alone:
        device = torch.device("cuda", torch.cuda.current_device())
    return placed(parts, device) if parts.plan.placement is None else in_places(parts, device)


def with_engines_heard(parts: Ingredients) -> Ingredients:
    """The parallel axis, where torch's engines send by themselves: their time goes to the rank's meter."""
    if parts.plan.parallel not in ("sharded", "tensor", "stages"):
        return parts
    hearing = partial(parts.meter.hearing_engines, relayed=parts.relayed)
    return replace(parts, around=(*parts.around, hearing))


TRANSFORMS: tuple[Callable[[Ingredients], Ingredients], ...] = (
    on_device,
    resident,
    in_layout,
    in_precision,
    with_implementation,
    with_threads,
    with_allocator,
    with_cudnn,
    repeatable,
    with_engines_heard,
)
"""Each turns ingredients into ingredients; they apply from first to last."""


def lower(task: Task, plan: Plan = BASELINE, say: Say = lambda line: None, during: During | None = None) -> Program:
    """Makes a Task runnable under a Plan; the caller's random generators stay as they are.

    Args:
        say: is told what the user should know of it, such as what was read into memory.
        during: shows what takes long while it lasts; lines through `say` otherwise.

    Raises:
        DeviceError: the plan's device isn't on this machine.
        PlanError: the plan can't be run for this Task on this machine.
        TaskError, DataError: the Task's parts can't be built, or don't fit together.
        MemoryExhausted: model and data alone are too large.
    """
    check_device(plan.device)
    if plan.ranked:
        plan = plan.with_axes(ranks=World.of(plan).ranks)  # those that are there, whatever was there before
    with making_ready(plan), preserved():
        parts = replace(Ingredients.of(task, plan), say=say, during=during or in_lines(say))
        parts = replace(parts, trial=trial_optimizer(task, parts.model))
        _check(parts)
        for transform in TRANSFORMS:
            parts = transform(parts)
        for note in parts.notes:
            say(note)
        with unchanged(parts.task):
            check_single_samples(parts)
        if plan.parallel == "async":
            return served(parts, Policy.of(plan))
        check_whole_gradients(parts.model, plan)
        step = _step(parts)
        check_whole_gradients(step.holder, plan)  # the optimizer's factory may hang some up, too
        return _checked(Program(step.parts, step, _feed(parts)))  # a step may settle what its plan leaves open


@contextmanager
def making_ready(plan: Plan) -> Iterator[None]:
    """Turns a lack of memory into one line, while model and data come into being."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        where = " and ".join(dict.fromkeys([plan.device, *(plan.placement or {}).values()]))
        raise MemoryExhausted(
            f"making model and data ready on {where} ran out of memory: {blame(error)}",
            fix="use a smaller model, less data at once, or a device with more memory",
        ) from error


def _step(parts: Ingredients) -> EagerStep:
    """Imports what the plan needs and no more: torch's compiler and its parts for ranks take seconds to import."""
    plan = parts.plan
    if plan.engine == "arrays":
        from hotloop.lowering.arrays_engine.arrays_step import ArraysStep

        return ArraysStep(parts)
    if parts.relayed:
        from hotloop.lowering.pipeline.pipeline_step import StagedStep

        return StagedStep(parts)
    if plan.ranked:
        return _ranked(parts)
    if plan.graphs != "none":
        from hotloop.lowering.steps.cuda_graph import GraphedStep

        return GraphedStep(parts)
    if plan.compile != "none":
        from hotloop.lowering.steps.compiled_step import CompiledStep

        return CompiledStep(parts)
    optimizer = parts.build_optimizer(parts.model)
    made = replace(parts, build_optimizer=lambda model: optimizer)
    return AlternatingStep(made) if isinstance(optimizer, NamedOptimizers) else EagerStep(made)


def _ranked(parts: Ingredients) -> EagerStep:
    if parts.plan.parallel == "tensor":
        from hotloop.lowering.steps.tensor_parallel import TensorStep

        return TensorStep(parts)
    from hotloop.lowering.steps.data_parallel import SharedStep, TowersStep
    from hotloop.lowering.steps.local_sgd import LocalStep

    return {"towers": TowersStep, "local": LocalStep}.get(parts.plan.parallel, SharedStep)(parts)


def _checked(program: Program) -> Program:
    """Tries on a first batch what may not work for this Task; nothing of it stays in the program's State."""
    parts, plan = program.parts, program.parts.plan
    made = " and ".join(["compiled"] * (plan.compile != "none") + ["recorded"] * (plan.graphs != "none"))
    if plan.accumulation == 1 and not made:
        return program
    with unchanged(parts.task):
        batch, samples = next(open_feed(parts.roles.train, parts.roles.order, _treatment(parts), workers=0).epoch(0))
    if plan.accumulation > 1:
        with unchanged(parts.task):
            program.checks.compare_first(batch, samples)
    if made:
        began = time.perf_counter()
        if plan.compile != "none":
            parts.say("compiling the step, which may take half a minute")
        with parts.during("compiling the step", counted=False), closed_unless_done(program):
            program.prepare(batch, samples)
        program.compile_s = time.perf_counter() - began
        parts.say(f"{made} the step in {program.compile_s:.1f}s")
    return program


@contextmanager
def closed_unless_done(program: Program) -> Iterator[None]:
    """Whatever ends what is done with a Program, Ctrl-C too, closes it."""
    try:
        yield
    except BaseException:
        program.close()
        raise


def _check(parts: Ingredients) -> None:
    """Refuses what can't be run; the baseline can, so nobody has to look at the machine for it."""
    if not is_plain(parts.plan) or parts.plan.threads or parts.plan.workers:
        device = str(check_device(parts.plan.device))
        check(parts.plan.with_axes(device=device), facts_of(parts), here(device))


def _feed(parts: Ingredients) -> Feed:
    order, world, source = parts.roles.order, parts.world, parts.roles.train
    # A data set that is said to change is copied anew into each epoch's workers, as torch's loaders do.
    opened = partial(open_feed, source, workers=parts.plan.workers, endless=parts.task.deterministic is not False)
    if parts.dealt.alone:
        return opened(order, _treatment(parts))
    assert order is not None
    rows = Parted(**vars(order), rank=world.rank, ranks=world.ranks)
    if world.from_first(lambda: looks_around(source, order)):
        parts.say(
            "collate makes a sample's row depend on others (padding): each rank loads whole batches, and cuts them"
        )
        return CutFeed(opened(order, _treatment(parts)), rows)
    return PartedFeed(opened(rows, replace(_treatment(parts), rank=world.rank)), order)


def _treatment(parts: Ingredients) -> Treatment:
    return Treatment(parts.device, parts.task.seed, parts.roles.prepare, parts.task.augment)
