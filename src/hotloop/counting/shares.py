"""How near to the machine's limits each module of a profile came."""

from __future__ import annotations

from hotloop.counting.calls import Counts
from hotloop.counting.limits import least_ms, precision_in
from hotloop.profiles import ModuleTime, OperatorTime, Profile


def with_limit_shares(profile: Profile) -> Profile:
    """The profile with `limit_share` for each module whose arithmetic and traffic are known.

    A module's least time is the sum of its operators', since these run one after the other.
    """
    least = [(one.module, _least(one, profile)) for one in profile.operators if one.phase in ("forward", "backward")]
    known = [(module, ms) for module, ms in least if ms is not None]
    shared = [one.model_copy(update={"limit_share": _share(one, known)}) for one in profile.modules]
    return profile.model_copy(update={"modules": shared})


def _least(one: OperatorTime, profile: Profile) -> float | None:
    if one.flops is None or profile.limits.busy:
        return None
    return least_ms(Counts(one.flops, one.bytes), profile.limits, precision_in(one, profile.reduced))


def _share(module: ModuleTime, known: list[tuple[str, float]]) -> float | None:
    """None where the module's own count isn't known, or nothing of it was traced."""
    took = (module.forward_ms or 0.0) + (module.backward_ms or 0.0)
    inside = f"{module.name}." if module.name else ""
    parts = [ms for name, ms in known if name == module.name or name.startswith(inside)]
    if module.flops is None or not parts or not took:
        return None
    share = sum(parts) / took
    return share if share <= 1 else None  # what is faster than a limit reads from caches, or the limit is too low
