"""The roofline: the least time that a count of FLOPs and bytes can take on a device, from what it was measured to reach.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures",
Communications of the ACM 52(4), 2009: arithmetic and memory traffic go on at the same time, so the slower one counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from hotloop.core.number_formats import operator_class
from hotloop.core.records.hardware import Device
from hotloop.core.records.profile import HardwareLimits, ModuleTime, OperatorTime, Profile
from hotloop.profiler.costs.op_cost import OpCost

_PRECISIONS = {
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "float16": "fp16",
    "c10::Half": "fp16",
    "bfloat16": "bf16",
    "c10::BFloat16": "bf16",
}


def device_limits(device: Device) -> HardwareLimits:
    """What a device was measured to reach; what wasn't measured stays unknown."""
    speed = device.speed
    return HardwareLimits(
        flop_per_s={precision: figure.value for precision, figure in speed.flop_per_s.items()},
        bytes_per_s=speed.memory_bandwidth.value if speed.memory_bandwidth else None,
        launch_us=speed.launch_overhead.value if speed.launch_overhead else None,
        copy_bytes_per_s=speed.host_to_device.value if speed.host_to_device else None,
    )


def precision_of(dtype: str, *, tf32: bool = False) -> str:
    """The precision of `HardwareLimits.flop_per_s` for a dtype; empty where there is none.

    Args:
        tf32: whether products of float32 may be made in tf32.
    """
    precision = _PRECISIONS.get(dtype.removeprefix("torch."), "")
    return "tf32" if tf32 and precision == "fp32" else precision


def precision_in(one: OperatorTime, reduced: Mapping[str, str]) -> str:
    """The precision of `HardwareLimits.flop_per_s` in which an operator of a profile computes; empty where there is none.

    Args:
        reduced: what the profile says of products of float32.
    """
    precision, operator = precision_of(one.dtype), operator_class(one.name.rpartition("::")[2])
    return reduced.get(operator or "", precision) if precision == "fp32" else precision


def least_ms(counts: OpCost, limits: HardwareLimits, precision: str) -> float | None:
    """Milliseconds below which the device can't do that much; None where neither limit is known.

    Bytes are those of memory: what lies in a cache can be faster than that.
    """
    rate = limits.flop_per_s.get(precision)
    times = []
    if rate:
        times.append(counts.flops / rate)
    if limits.bytes_per_s and counts.bytes is not None:
        times.append(counts.bytes / limits.bytes_per_s)
    return 1000.0 * max(times) if times else None


def with_limit_shares(profile: Profile) -> Profile:
    """The profile with `limit_share` for each module whose arithmetic and traffic are known.

    A module's least time is the sum of its operators', since these run one after the other.
    """
    least = [
        (one.module, _operator_least_ms(one, profile))
        for one in profile.operators
        if one.phase in ("forward", "backward")
    ]
    known = [(module, ms) for module, ms in least if ms is not None]
    shared = [one.model_copy(update={"limit_share": _module_share(one, known)}) for one in profile.modules]
    return profile.model_copy(update={"modules": shared})


def _operator_least_ms(one: OperatorTime, profile: Profile) -> float | None:
    if one.flops is None or profile.limits.busy:
        return None
    return least_ms(OpCost(one.flops, one.bytes), profile.limits, precision_in(one, profile.reduced))


def _module_share(module: ModuleTime, known: list[tuple[str, float]]) -> float | None:
    """None where the module's own count isn't known, or nothing of it was traced."""
    took = (module.forward_ms or 0.0) + (module.backward_ms or 0.0)
    inside = f"{module.name}." if module.name else ""
    parts = [ms for name, ms in known if name == module.name or name.startswith(inside)]
    if module.flops is None or not parts or not took:
        return None
    share = sum(parts) / took
    return share if share <= 1 else None  # what is faster than a limit reads from caches, or the limit is too low
