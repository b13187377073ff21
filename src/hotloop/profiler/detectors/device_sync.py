"""Copies between host and device, and waits for the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotloop.core.records.profile import COUNTS, OperatorTime, Remedy
from hotloop.profiler.detectors.code_regions import MIN_LOOP_CALLS
from hotloop.profiler.detectors.step import BY_HAND, OFTEN, PLAIN, ProfiledStep, group_by, is_random

_READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
_LOOP_PHASES = ("python", "batch", "copy", "logging", "unattributed")
"""Phases in which the loop itself calls torch; in others torch's layers and losses do."""


def host_sync(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for values read on the host, which must wait for the device."""
    found = step.operators(lambda one: _is_read(one) and bool(one.where) and not _is_wait_of_others(step, one))
    for where, ones in group_by(found, lambda one: one.where).items():
        calls = max(one.calls for one in ones)
        if calls < OFTEN:
            continue
        waited = step.phase("synchronisation") * _time_share(ones, found)
        spent = max(sum(one.ms for one in ones), waited)
        here = "; on an accelerator the host would wait here" if step.on_cpu else ""
        if calls >= MIN_LOOP_CALLS and not _is_needed(step, where):
            spent = max(spent, step.aside_ms.get(where, 0.0))
            yield Remedy(
                cause=f"a tensor is read number by number in Python ({calls:.0f} times at each step)",
                where=where,
                remedy="operations on the whole tensor: F.one_hot for classes, comparisons, indexing; where a list is needed, "
                ".tolist() once",
                gain=step.share(spent),
                evidence=f"the line takes {step.part(spent)}{here}",
                note=step.share(spent) < COUNTS,
            )
            continue
        yield Remedy(
            cause=f".item() at each step: a number is read on the host ({calls:.0f} times)",
            where=where,
            remedy="add it up as a tensor (total += loss.detach()) and read the tensor every hundred steps or after "
            "the epoch",
            gain=step.share(spent),
            evidence=f"reading it takes {spent:.3f} ms of each step of {step.ms:.2f} ms{here}",
            note=step.share(spent) < COUNTS,
        )


def _is_needed(step: ProfiledStep, where: str) -> bool:
    """Returns whether the line also calls a network, draws numbers or computes part of a backward graph."""
    return any(one.used is True or is_random(one) or one.module not in PLAIN for one in step.operators_by_line[where])


def _is_wait_of_others(step: ProfiledStep, one: OperatorTime) -> bool:
    """Returns whether a sample, an optimizer or the start of a loader reads the value, not the step."""
    if one.phase == "data":
        return True
    if one.phase == "update":
        return one.where in {use.where for use in step.profile.optimizers if use.kind != BY_HAND}
    return one.calls < 1 and one.where in {use.where for use in step.profile.loaders}


def _is_read(one: OperatorTime) -> bool:
    """Returns whether the user's line reads a single value on the host.

    On a CPU `.tolist()` and `.numpy()` only appear as `resolve_neg`. Reads inside of torch's operators, such as
    one_hot, don't count.
    """
    asked = one.name in _READS and one.outer in ("", *_READS)
    return asked or one.name in _WAITS or (one.name == "aten::resolve_neg" and _is_single(one))


def _is_single(one: OperatorTime) -> bool:
    return all(set(shape.split("x")) == {"1"} for shape in one.shapes)


def device_copies(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for copies between devices at each step."""
    found = step.operators(lambda one: bool(one.copies) and one.calls >= OFTEN)
    for where, ones in group_by(found, lambda one: one.where).items():
        spent = max(sum(one.ms for one in ones), step.phase("copy") * _time_share(ones, found))
        ways = {one.copies for one in ones}
        back = any(">".join(reversed(way.split(">"))) in ways for way in ways)
        yield Remedy(
            cause="a tensor moved back and forth between devices"
            if back
            else f"a copy between devices at each step ({', '.join(sorted(ways))})",
            where=where or step.profile.step_where,
            remedy="store the tensor on the device that uses it; copy a tensor that doesn't change once, before the "
            "loop; batches from pinned memory with non_blocking=True",
            gain=step.share(spent),
            evidence=f"{sum(one.calls for one in ones):.0f} copies take {step.part(spent)}",
            axes={"residency": "device"} if all(way.startswith("cpu>") for way in ways) else {},
            note=step.share(spent) < COUNTS,
        )


def no_op_copies(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields notes on `.to()` calls that copy nothing on a CPU but would on an accelerator."""
    if not step.on_cpu:
        return
    asked = step.operators(
        lambda one: one.name == "aten::to" and one.calls >= OFTEN and one.phase in _LOOP_PHASES and bool(one.where)
    )
    for where, ones in group_by(asked, lambda one: one.where).items():
        if _is_brought_to_host(ones, step.operators_by_line[where]):
            yield Remedy(
                cause="a tensor moved back and forth: to the host for NumPy at each step (.cpu().numpy())",
                where=where,
                remedy="leave the tensor on its device (out.detach()), and move it once after the loop, or every "
                "hundred steps",
                gain=step.share(sum(one.ms for one in ones)),
                evidence="there is nothing to copy on a CPU; on an accelerator the host would wait here",
                note=True,
            )
            continue
        if any(_is_batch(step, one) for one in ones) or _has_real_copies(step, where):
            continue
        yield Remedy(
            cause="a copy to the device at each step (.to()), of a tensor other than the batch",
            where=where,
            remedy="copy it once, before the loop",
            gain=step.share(sum(one.ms for one in ones)),
            evidence="there is nothing to copy on a CPU; on an accelerator it would be a copy at each step",
            note=True,
        )


def is_read_on_host(ones: Sequence[OperatorTime]) -> bool:
    """Returns whether a whole tensor is read on the host, as an array or a list."""
    return any(one.name == "aten::resolve_neg" and not _is_single(one) for one in ones)


def _is_brought_to_host(ones: Sequence[OperatorTime], there: Sequence[OperatorTime]) -> bool:
    """Returns whether a whole tensor is moved and read; `.numpy()` alone also calls `.to` once."""
    reads = [one for one in there if is_read_on_host([one])]
    return any(
        sum(one.calls for one in ones if one.shapes == read.shapes)
        > sum(one.calls for one in reads if one.shapes == read.shapes) + OFTEN
        for read in reads
    )


def _is_made_of_array(step: ProfiledStep, one: OperatorTime) -> bool:
    """Returns whether the tensor is made from an array that another line makes from a tensor."""
    arrives = any(
        other.name == "aten::lift_fresh" and other.shapes == one.shapes for other in step.operators_by_line[one.where]
    )
    left = step.operators(lambda other: other.name == "aten::resolve_neg" and other.shapes == one.shapes)
    return arrives and any(other.where != one.where for other in left)


def _has_real_copies(step: ProfiledStep, where: str) -> bool:
    """Returns whether a copy happened, such as to another dtype or by `.numpy()`."""
    return any(
        one.name in ("aten::_to_copy", "aten::copy_", "aten::resolve_neg") for one in step.operators_by_line[where]
    )


def _is_batch(step: ProfiledStep, one: OperatorTime) -> bool:
    """Returns whether the tensor is the network's input or has as many rows, as labels have.

    Rows don't identify tensors made from NumPy arrays. Torch's losses convert dtypes, which looks the same.
    """
    if not one.shapes or one.shapes[0] in step.profile.batch:
        return bool(one.shapes)
    if _is_made_of_array(step, one):
        return False
    rows = {shape.partition("x")[0] for shape in step.profile.batch}
    if step.profile.samples_per_step is not None:
        rows.add(f"{step.profile.samples_per_step:.0f}")
    return one.shapes[0].partition("x")[0] in rows


def _time_share(ones: Sequence[OperatorTime], of: Sequence[OperatorTime]) -> float:
    total = sum(one.ms for one in of)
    return sum(one.ms for one in ones) / total if total else 0.0
