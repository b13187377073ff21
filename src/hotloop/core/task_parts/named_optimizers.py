"""Several optimizers of one Task, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hotloop.errors import TaskError, type_name


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
