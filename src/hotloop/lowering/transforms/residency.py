"""The residency axis: the memory from which batches are cut."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from hotloop.core.hardware.machine import device_free_bytes
from hotloop.data.feeds.in_memory import InMemoryRead, format_megabytes, read_into_memory
from hotloop.data.order import Order
from hotloop.data.sources import Samples, Source, Stream, Table
from hotloop.errors import InsufficientMemoryError, PlanError, describe_error, is_out_of_memory
from hotloop.lowering.context import LoweringContext


def apply_residency(parts: LoweringContext) -> LoweringContext:
    """Reads training and validation data into memory or onto the device; test data is read once, so it stays.

    Raises:
        PlanError: the training data can't be read there; the message says why.
    """
    if parts.plan.residency == "stream":
        return parts
    roles = parts.splits
    train, notes = _table_in_memory(parts, "data", roles.train)
    validation = roles.validation
    if validation is not None:
        validation, further = _table_in_memory(parts, "validation", validation)
        notes += further
    if parts.plan.residency == "device" and parts.device.type != "cpu":
        assert isinstance(train, Table)
        train = _move_table(parts, "data", train)
        if isinstance(validation, Table) and _is_fitting(validation, parts.device):
            validation = _move_table(parts, "validation", validation)
    return replace(parts, splits=replace(roles, train=train, validation=validation), notes=parts.notes + notes)


def _table_in_memory(parts: LoweringContext, name: str, source: Source) -> tuple[Source, tuple[str, ...]]:
    """Returns the source as a table, and notes; the first use in this process reads it, later ones share the table."""
    if isinstance(source, Stream) and name == "data":
        raise PlanError(
            f"residency={parts.plan.residency!r} of data that has an order of its own",
            expected="arrays or a map-style data set, whose order is the Task's",
            fix="use residency='stream'",
        )
    if not isinstance(source, Samples):
        return source, ()
    known = parts.splits.read_results
    notes: tuple[str, ...] = ()
    if name not in known:
        known[name], notes = _read_once(parts, name, source)
    if isinstance(known[name], Table):
        return known[name], notes
    if name == "data":
        raise type(known[name])(known[name].given, fix=known[name].fix)
    return source, notes


def _read_once(parts: LoweringContext, name: str, samples: Samples) -> tuple[Table | PlanError, tuple[str, ...]]:
    task, roles = parts.task, parts.splits
    order = roles.order if name == "data" else None
    read = InMemoryRead(
        name=name,
        order=order or Order(len(samples), min(roles.batch_size, len(samples)), roles.seed, shuffle=False),
        deterministic=task.deterministic,
        prepare=roles.prepare,
        workers=parts.plan.workers,
        free_bytes=device_free_bytes(torch.device("cpu")),
    )
    began = time.perf_counter()
    try:
        with parts.during(f"reading {name} into memory") as progress:
            table = read_into_memory(samples, replace(read, progress=progress))
    except PlanError as error:
        error = error.with_traceback(None)  # the error is stored: frees the objects of its frames
        return error, () if name == "data" else (f"{error.given}; the data is loaded sample by sample",)
    except Exception as error:
        if not any(map(is_out_of_memory, filter(None, [error, error.__cause__]))):
            raise
        failure = read.insufficient_memory(f"there was no memory left for the data ({describe_error(error)})")
        return failure, () if name == "data" else (f"{failure.given}; the data is loaded sample by sample",)
    took_s = time.perf_counter() - began
    roles.reading_s[name] = (took_s, time.perf_counter())
    size = format_megabytes(table.nbytes())
    return table, (f"read {len(table):,} samples of {name} into memory ({size}) in {took_s:.1f}s",)


def _is_fitting(table: Table, device: torch.device) -> bool:
    free = device_free_bytes(device)
    return free is None or table.nbytes() <= free // 2


def _move_table(parts: LoweringContext, name: str, table: Table) -> Table:
    """Returns the table on the device; all Programs in use share one copy."""
    device, key = parts.device, (name, str(parts.device))
    moved = parts.splits.moved.get(key)
    if moved is None:
        if not _is_fitting(table, device):
            raise InsufficientMemoryError(
                f"residency='device': {name} takes {format_megabytes(table.nbytes())}, and {device} has "
                f"{format_megabytes(device_free_bytes(device) or 0)} free",
                expected="at most half of the free memory: training needs the rest",
                fix="use residency='host'",
            )
        moved = parts.splits.moved[key] = table.to(device)
    return moved
