"""Optimizers of a Task: one or several by name, with inner optimizers, and their state bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.core.state import (
    differing_leaves,
    host_copy,
    shard_like,
    to_host,
    tree_leaves,
)
from hotloop.errors import CheckpointError, TaskError, describe_error, type_name


class NamedOptimizers(Optimizer):
    """Optimizers of disjoint parameters of a model, with the groups and state of a single optimizer.

    Attributes:
        members: name -> optimizer.
    """

    def __init__(self, members: Mapping[str, Optimizer]) -> None:  # torch's constructor would create further groups
        self.members = dict(members)
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for member in self.members.values() for group in member.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """A new dict at each access, which contains the members' values."""
        return {holder: values for member in self.members.values() for holder, values in member.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members.values():
            member.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("each of the optimizers takes its own steps")


def member_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the members of a `NamedOptimizers`, or a list with the single optimizer."""
    return list(optimizer.members.values()) if isinstance(optimizer, NamedOptimizers) else [optimizer]


def owner_optimizer(optimizer: Optimizer, parameter: Tensor) -> Optimizer:
    """Returns the optimizer that updates a parameter; the first optimizer for a parameter without one."""
    members = member_optimizers(optimizer)
    for member in members:
        if any(value is parameter for group in member.param_groups for value in group["params"]):
            return member
    return members[0]


def describe_optimizer(optimizer: Optimizer) -> str:
    """Returns a text such as `Adam`, or `Adam 'critic' and SGD 'generator'`."""
    if isinstance(optimizer, NamedOptimizers):
        return " and ".join(f"{type(member).__name__} {name!r}" for name, member in optimizer.members.items())
    return type(optimizer).__name__


def check_optimizer(made: Any) -> Optimizer:
    """Returns the result of an optimizer factory as one optimizer.

    Raises:
        TaskError: `made` is neither an optimizer nor a dict of optimizers with disjoint parameters.
    """
    if isinstance(made, Optimizer):
        return made
    if not isinstance(made, Mapping):
        raise TaskError(
            f"the optimizer factory returned {type_name(made)}",
            expected="a torch.optim.Optimizer, or a dict of name -> optimizer",
            fix="return the optimizer from it",
        )
    if not made:
        raise TaskError("the optimizer factory returned an empty dict", expected="name -> torch.optim.Optimizer")
    for name, member in made.items():
        if not isinstance(name, str) or not isinstance(member, Optimizer) or isinstance(member, NamedOptimizers):
            raise TaskError(
                f"the optimizer factory returned a dict with {name!r}: {type_name(member)}",
                expected="a dict of name -> torch.optim.Optimizer",
            )
    _check_disjoint(made)
    return NamedOptimizers(made)


def _check_disjoint(members: Mapping[str, Optimizer]) -> None:
    holders: dict[int, str] = {}
    for name, member in members.items():
        values: list[Tensor] = [value for group in member.param_groups for value in group["params"]]
        for value in values:
            other = holders.setdefault(id(value), name)
            if other != name:
                raise TaskError(
                    f"the optimizers {other!r} and {name!r} both hold a parameter of shape {tuple(value.shape)}",
                    expected="parameters of its own for each optimizer",
                    fix="choose them by name, such as p.where(lambda name, value: name.startswith('generator.'))",
                )


_METHODS = ("state_dict", "load_state_dict")
_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_IMPLEMENTATION = ("foreach", "fused", "capturable")
"""Group keys that the Plan sets; restoring a checkpoint keeps their values."""
_UNSAVED_KEYS = {"params", "param_names", *_IMPLEMENTATION}
"""Keys of a group that the Plan sets, or that State stores by parameter name."""


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Returns whether the class, the object or a hook replaces the state_dict of torch.optim.Optimizer."""
    kind, attributes = type(optimizer), getattr(optimizer, "__dict__", {})
    replaced = any(name in attributes or getattr(kind, name) is not getattr(Optimizer, name) for name in _METHODS)
    return replaced or any(attributes.get(name) for name in _HOOKS)


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Returns the wrapped optimizers by their attribute paths."""
    if type(optimizer).__module__.startswith("torch."):
        return {}
    return dict(_wrapped_optimizers(vars(optimizer), "", {id(optimizer)}))


def _wrapped_optimizers(values: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Optimizer]]:
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        place = f"{path}.{key}" if path else str(key)
        if isinstance(value, Optimizer) and id(value) not in seen:
            seen.add(id(value))
            yield place, value
            yield from _wrapped_optimizers(vars(value), place, seen)
        elif isinstance(value, dict | list | tuple) and key not in ("state", "param_groups") and id(value) not in seen:
            seen.add(id(value))
            yield from _wrapped_optimizers(value, place, seen)


def capture_optimizer(optimizer: Optimizer, model: nn.Module, *, lent: bool = False) -> dict[str, Any]:
    """Returns the optimizer's state on the CPU; `lent` shares tensors that are on the CPU."""
    if isinstance(optimizer, NamedOptimizers):
        members = {name: capture_optimizer(member, model, lent=lent) for name, member in optimizer.members.items()}
        groups = [{"params": names} for names in _group_names(optimizer, model)]
        return {"name": describe_optimizer(optimizer), "groups": groups, "members": members}
    inner, own = inner_optimizers(optimizer), optimizer.state_dict()
    if has_own_state_dict(optimizer):
        groups = [{"params": names} for names in _group_names(optimizer, model)]
        captured = {"name": type(optimizer).__name__, "state": {}, "own": {}, "groups": groups}
        captured["state_dict"] = to_host(own, lent=lent)
    else:
        captured = _capture_plain(optimizer, model, lent=lent)
    optimizers = {"": optimizer, **inner} if "state_dict" in captured else inner
    if optimizers:
        covered = {id(value) for _, value in tree_leaves(own) if isinstance(value, Tensor)}
        captured["inner"] = {
            path: _full_state(member, model, lent=lent)
            for path, member in optimizers.items()
            if not _is_captured(member, covered)
        }
    return captured


def _is_captured(optimizer: Optimizer, covered: set[int]) -> bool:
    tensors = [value for _, value in tree_leaves(list(optimizer.state.values())) if isinstance(value, Tensor)]
    return bool(tensors) and all(id(value) in covered for value in tensors)


def _full_state(optimizer: Optimizer, model: nn.Module, *, lent: bool) -> dict[str, Any]:
    """Returns state and groups by parameter name; the `state_dict` if a parameter isn't the model's."""
    known = {id(value) for value in model.parameters()}
    if all(id(value) in known for group in optimizer.param_groups for value in group["params"]):
        return _capture_plain(optimizer, model, lent=lent)
    return {"state_dict": to_host(optimizer.state_dict(), lent=lent)}


def restore_optimizer(optimizer: Optimizer, model: nn.Module, saved: dict[str, Any]) -> list[str]:
    """Restores a saved state; returns the paths of values that `load_state_dict` doesn't restore bit by bit.

    Raises:
        CheckpointError: the state belongs to another optimizer, or `load_state_dict` raises an error.
    """
    if isinstance(optimizer, NamedOptimizers):
        return _restore_members(optimizer, model, saved)
    _add_missing_parameters(optimizer, model, saved["groups"])
    if "state_dict" in saved and has_own_state_dict(optimizer):
        _check_same_groups(optimizer, model, saved)
        changed = _load_state(optimizer, saved["state_dict"])
    else:
        _restore_plain(optimizer, model, saved)
        changed = []
    optimizers = {"": optimizer, **inner_optimizers(optimizer)}
    for path, state in saved.get("inner", {}).items():
        if path in optimizers and "state_dict" in state:
            changed += [f"{path}{place}" for place in _load_state(optimizers[path], state["state_dict"])]
        elif path in optimizers:
            _restore_plain(optimizers[path], model, state)
    return changed


def _restore_members(optimizer: NamedOptimizers, model: nn.Module, saved: dict[str, Any]) -> list[str]:
    if saved["name"] != describe_optimizer(optimizer):
        raise CheckpointError(
            f"the checkpoint is of another optimizer: {saved['name']}, where the Task has {describe_optimizer(optimizer)}",
            expected="the same optimizers",
            fix="use the Task that the run was started with",
        )
    states, members = saved["members"], optimizer.members.items()
    return [f"{name}{path}" for name, member in members for path in restore_optimizer(member, model, states[name])]


def _add_missing_parameters(optimizer: Optimizer, model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Adds the saved optimizer's further groups and parameters, such as from `add_param_group` in a callback."""
    named = dict(model.named_parameters())
    now = _group_names(optimizer, model)
    before = {name for names in now for name in names}
    wanted = [group["params"] for group in groups]
    added = [name for names in wanted for name in names if name not in before]
    grown = all(set(have) <= set(names) for have, names in zip(now, wanted, strict=False)) and len(now) <= len(wanted)
    if not added or not grown or not all(name in named for name in added):
        return
    for group, names in zip(optimizer.param_groups, wanted, strict=False):
        group["params"][:] = [named[name] for name in names]
    for group in groups[len(now) :]:
        settings = {key: value for key, value in group.items() if key != "params"}
        optimizer.add_param_group({"params": [named[name] for name in group["params"]], **host_copy(settings)})


def _check_same_groups(optimizer: Optimizer, model: nn.Module, saved: dict[str, Any]) -> None:
    """Raises CheckpointError if the class or the parameter groups differ from the saved optimizer's."""
    before, now = [group["params"] for group in saved["groups"]], _group_names(optimizer, model)
    found, own = saved["name"], type(optimizer).__name__
    if found != own or before != now:
        if found == own:
            found, own = f"{found} with groups of {[*map(len, before)]} parameters", f"{own} with {[*map(len, now)]}"
        raise CheckpointError(
            f"the checkpoint is of another optimizer: {found}, where the Task has {own}",
            expected="the same optimizer over the same parameters",
            fix="use the Task that the run was started with",
        )


def _load_state(optimizer: Optimizer, state: Any) -> list[str]:
    """Calls `load_state_dict` and restores rounded values; returns the paths that still differ."""
    try:
        optimizer.load_state_dict(_with_implementation_of(optimizer, host_copy(state)))
    except Exception as error:
        raise CheckpointError(
            f"load_state_dict of {type(optimizer).__name__} rejects the result of its own state_dict: "
            f"{describe_error(error)}",
            expected="an optimizer whose load_state_dict takes the result of its state_dict",
            fix="correct the two methods, or use the Task that the run was started with",
        ) from error
    _repair_state(optimizer.state_dict(), state)
    _match_strides(optimizer)
    return differing_leaves(optimizer.state_dict(), _with_implementation_of(optimizer, host_copy(state)))


def _with_implementation_of(optimizer: Optimizer, tree: Any) -> Any:
    """Sets the Plan's implementation of the update in the groups of a saved state; returns the state."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == "param_groups" and isinstance(value, list) and len(value) == len(optimizer.param_groups):
                for group, now in zip(value, optimizer.param_groups, strict=True):
                    group.update({name: now[name] for name in _IMPLEMENTATION if name in group and name in now})
            else:
                _with_implementation_of(optimizer, value)
    return tree


def _repair_state(live: Any, saved: Any) -> None:
    """Replaces tensors whose dtype changed: torch's `load_state_dict` casts state to the parameter's dtype."""
    if isinstance(live, dict) and isinstance(saved, dict):
        pairs = [(key, live[key], saved[key]) for key in live.keys() & saved.keys()]
    elif isinstance(live, list) and isinstance(saved, list) and len(live) == len(saved):
        pairs = [(place, *both) for place, both in enumerate(zip(live, saved, strict=True))]
    else:
        return
    for key, now, before in pairs:
        if isinstance(now, Tensor) and isinstance(before, Tensor):
            if now.dtype != before.dtype:
                live[key] = before.to(now.device, copy=True)
        else:
            _repair_state(now, before)


def _match_strides(optimizer: Optimizer) -> None:
    """Gives state of a parameter's shape the parameter's strides: fused kernels read both in memory order."""
    for member in (optimizer, *inner_optimizers(optimizer).values()):
        for parameter, values in member.state.items():
            if isinstance(parameter, Tensor) and isinstance(values, dict):
                values.update({key: _with_strides_of(value, parameter) for key, value in values.items()})


def _with_strides_of(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    like = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    return like.copy_(shard_like(value, parameter))


def _capture_plain(optimizer: Optimizer, model: nn.Module, *, lent: bool = False) -> dict[str, Any]:
    """Returns the optimizer's state by qualified parameter name on the CPU; see `to_host` for `lent`."""
    names = {id(value): name for name, value in model.named_parameters()}
    groups = [
        {key: to_host(value, lent=lent) for key, value in group.items() if key not in _UNSAVED_KEYS}
        | {"params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state, own = {}, {}
    holders: dict[Any, Any] = optimizer.state
    for holder, values in holders.items():
        if isinstance(holder, Tensor):
            state[names[id(holder)]] = to_host(dict(values), lent=lent)
        else:  # belongs to no parameter, such as a count of all steps
            own[holder] = to_host(values, lent=lent)
    return {"name": type(optimizer).__name__, "state": state, "own": own, "groups": groups}


def _restore_plain(optimizer: Optimizer, model: nn.Module, saved: dict[str, Any]) -> None:
    """Restores the optimizer's state bit by bit; `load_state_dict` would cast the state to the parameters' dtype."""
    _check_same_groups(optimizer, model, saved)
    names = {id(value): name for name, value in model.named_parameters()}
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in values.items():
            if key in _UNSAVED_KEYS:
                continue
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)  # a compiled step may have captured the tensor of a learning rate
            else:
                group[key] = host_copy(value)
    optimizer.state.clear()
    optimizer.state.update(host_copy(saved.get("own", {})))
    for group in optimizer.param_groups:
        on_host = not (group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            values = saved["state"].get(names[id(parameter)])
            if values is not None:
                optimizer.state[parameter] = {
                    key: _copy_for(value, parameter, on_host=key == "step" and on_host) for key, value in values.items()
                }


def _group_names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    names = {id(value): name for name, value in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _copy_for(value: Any, parameter: Tensor, *, on_host: bool) -> Any:
    """Returns a copy of saved values, with tensors on the parameter's device or on the host.

    Tensors of the parameter's shape get the parameter's strides: fused optimizers read both in memory order.
    """
    if isinstance(value, Tensor):
        if on_host:
            return value.to("cpu", copy=True)
        if value.shape == parameter.shape:
            copy = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
            return copy.copy_(shard_like(value, parameter))
        return value.to(parameter.device, copy=True)
    if isinstance(value, dict):
        return {key: _copy_for(item, parameter, on_host=on_host) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_copy_for(item, parameter, on_host=on_host) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
