"""The residency axis: where the data lies that batches are cut out of."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from hotloop.core.hardware.machine import free_memory
from hotloop.data.feeds.in_memory import Reading, materialise, megabytes
from hotloop.data.order import Order
from hotloop.data.sources import Samples, Source, Stream, Table
from hotloop.errors import PlanError, RoomError, blame, out_of_memory
from hotloop.lowering.context import Ingredients


def resident(parts: Ingredients) -> Ingredients:
    """Training and validation data in memory, or on the device; test data, which is read once, stays as it is.

    Raises:
        PlanError: the training data can't be there; the message says why.
    """
    if parts.plan.residency == "stream":
        return parts
    roles = parts.roles
    train, notes = _in_memory(parts, "data", roles.train)
    validation = roles.validation
    if validation is not None:
        validation, said = _in_memory(parts, "validation", validation)
        notes += said
    if parts.plan.residency == "device" and parts.device.type != "cpu":
        assert isinstance(train, Table)
        train = _moved(parts, "data", train)
        if isinstance(validation, Table) and _fits(validation, parts.device):
            validation = _moved(parts, "validation", validation)
    return replace(parts, roles=replace(roles, train=train, validation=validation), notes=parts.notes + notes)


def _in_memory(parts: Ingredients, name: str, source: Source) -> tuple[Source, tuple[str, ...]]:
    """The source as a table, and what to say of it: read at its first use in this process, then kept."""
    if isinstance(source, Stream) and name == "data":
        raise PlanError(
            f"residency={parts.plan.residency!r} of data that has an order of its own",
            expected="arrays or a map-style data set, whose order is the Task's",
            fix="use residency='stream'",
        )
    if not isinstance(source, Samples):
        return source, ()
    known = parts.roles.read
    notes: tuple[str, ...] = ()
    if name not in known:
        known[name], notes = _read(parts, name, source)
    if isinstance(known[name], Table):
        return known[name], notes
    if name == "data":
        raise type(known[name])(known[name].given, fix=known[name].fix)
    return source, notes


def _read(parts: Ingredients, name: str, samples: Samples) -> tuple[Table | PlanError, tuple[str, ...]]:
    task, roles = parts.task, parts.roles
    order = roles.order if name == "data" else None
    how = Reading(
        name=name,
        order=order or Order(len(samples), min(roles.batch_size, len(samples)), roles.seed, shuffle=False),
        deterministic=task.deterministic,
        prepare=roles.prepare,
        workers=parts.plan.workers,
        free_bytes=free_memory(torch.device("cpu")),
    )
    began = time.perf_counter()
    try:
        with parts.during(f"reading {name} into memory") as progress:
            table = materialise(samples, replace(how, progress=progress))
    except PlanError as error:
        error = error.with_traceback(None)  # it is kept, and all that its frames hold need not be
        return error, () if name == "data" else (f"{error.given}; it is loaded sample by sample",)
    except Exception as error:
        if not any(map(out_of_memory, filter(None, [error, error.__cause__]))):
            raise
        none_left = how.no_room(f"there was no memory left for it ({blame(error)})")
        return none_left, () if name == "data" else (f"{none_left.given}; it is loaded sample by sample",)
    took = time.perf_counter() - began
    roles.reading_s[name] = (took, time.perf_counter())
    said = f"read {len(table):,} samples of {name} into memory ({megabytes(table.nbytes())}) in {took:.1f}s"
    return table, (said,)


def _fits(table: Table, device: torch.device) -> bool:
    free = free_memory(device)
    return free is None or table.nbytes() <= free // 2


def _moved(parts: Ingredients, name: str, table: Table) -> Table:
    """The table on the device: one there, for all Programs that use it at a time."""
    device, key = parts.device, (name, str(parts.device))
    there = parts.roles.moved.get(key)
    if there is None:
        if not _fits(table, device):
            raise RoomError(
                f"residency='device': {name} takes {megabytes(table.nbytes())}, and {device} has "
                f"{megabytes(free_memory(device) or 0)} free",
                expected="at most half of what is free, for training needs the rest",
                fix="use residency='host'",
            )
        there = parts.roles.moved[key] = table.to(device)
    return there
