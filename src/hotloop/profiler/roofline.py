"""The roofline: the least time that FLOPs and bytes take at the measured limits of a device.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures",
Communications of the ACM 52(4), 2009: arithmetic and memory traffic overlap, so the slower of them sets the time.
"""

from __future__ import annotations

from collections.abc import Mapping

from hotloop.core.number_formats import operator_class
from hotloop.core.records.hardware import Device
from hotloop.core.records.profile import HardwareLimits, ModuleTime, OperatorTime, Profile
from hotloop.profiler.operator_cost import OpCost

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
    """Returns the measured limits of a device; None for what wasn't measured."""
    speed = device.speed
    return HardwareLimits(
        flop_per_s={precision: figure.value for precision, figure in speed.flop_per_s.items()},
        bytes_per_s=speed.memory_bandwidth.value if speed.memory_bandwidth else None,
        launch_us=speed.launch_overhead.value if speed.launch_overhead else None,
        copy_bytes_per_s=speed.host_to_device.value if speed.host_to_device else None,
    )


def precision_of(dtype: str, *, tf32: bool = False) -> str:
    """Returns the key of `HardwareLimits.flop_per_s` for a dtype; empty if there is none.

    Args:
        tf32: whether float32 products may run in TF32.
    """
    precision = _PRECISIONS.get(dtype.removeprefix("torch."), "")
    return "tf32" if tf32 and precision == "fp32" else precision


def precision_in(operator: OperatorTime, reduced: Mapping[str, str]) -> str:
    """Returns the key of `HardwareLimits.flop_per_s` in which an operator computes; empty if there is none.

    Args:
        reduced: `Profile.reduced`: the precision of float32 products, by class of operator.
    """
    precision, kind = precision_of(operator.dtype), operator_class(operator.name.rpartition("::")[2])
    return reduced.get(kind or "", precision) if precision == "fp32" else precision


def least_ms(counts: OpCost, limits: HardwareLimits, precision: str) -> float | None:
    """Returns the least milliseconds of some work on a device; None if neither limit is known.

    The byte limit is that of main memory. Data in a cache can be read faster.
    """
    rate = limits.flop_per_s.get(precision)
    times = []
    if rate:
        times.append(counts.flops / rate)
    if limits.bytes_per_s and counts.bytes is not None:
        times.append(counts.bytes / limits.bytes_per_s)
    return 1000.0 * max(times) if times else None


def with_limit_shares(profile: Profile) -> Profile:
    """Returns the profile with `limit_share` for each module whose FLOPs or bytes are known.

    Operators run one after the other, so a module's least time is the sum over its operators.
    """
    least = [
        (one.module, _operator_least_ms(one, profile))
        for one in profile.operators
        if one.phase in ("forward", "backward")
    ]
    known = [(module, ms) for module, ms in least if ms is not None]
    shared = [one.model_copy(update={"limit_share": _module_share(one, known)}) for one in profile.modules]
    return profile.model_copy(update={"modules": shared})


def _operator_least_ms(operator: OperatorTime, profile: Profile) -> float | None:
    if operator.flops is None or profile.limits.busy:
        return None
    return least_ms(OpCost(operator.flops, operator.bytes), profile.limits, precision_in(operator, profile.reduced))


def _module_share(module: ModuleTime, known: list[tuple[str, float]]) -> float | None:
    """Returns None if the module's own count is unknown or none of its operators was traced."""
    measured_ms = (module.forward_ms or 0.0) + (module.backward_ms or 0.0)
    inside = f"{module.name}." if module.name else ""
    parts = [ms for name, ms in known if name == module.name or name.startswith(inside)]
    if module.flops is None or not parts or not measured_ms:
        return None
    share = sum(parts) / measured_ms
    return share if share <= 1 else None  # above 1: the data was in a cache, or the limit is too low
