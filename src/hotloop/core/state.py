"""State: everything that training changes, independent of the plan, with a bitwise save and restore."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.errors import CheckpointError


@dataclass(frozen=True)
class Position:
    """The position of training in the data.

    Attributes:
        step: steps since the beginning of the run.
        epoch: the current epoch, from 0.
        batch: batches of this epoch that are done.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class State:
    """Everything that training changes, on the CPU, by qualified name.

    Attributes:
        parameters, buffers: the model's; buffers include those that its `state_dict` excludes.
        extra: results of `get_extra_state`, by module name.
        optimizer: `{"name": class, "state": {parameter: {key: value}}, "groups": [{..., "params": [names]}]}`; for
            several optimizers `{"name", "groups", "members": {name: such a dict}}`.
        schedule: the learning-rate scheduler's `state_dict`.
        average: the parameters' exponential average.
        loss: buffers of a loss module.
        sums: sums over the current epoch: loss, weight, further scalars.
        scaler: the fp16 loss scale, and steps since its last change.
        position: the position in the data.
        trainable: `requires_grad` by parameter name.
        in_eval: names of modules in evaluation mode during training.
        drawn: whether a step used Python's or NumPy's generator.
        attributes: plain values in the Task's own objects, by path.
        named: values that the Task's `state` names.
    """

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    extra: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    loss: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    position: Position = field(default_factory=Position)
    trainable: dict[str, bool] = field(default_factory=dict)
    in_eval: list[str] = field(default_factory=list)
    drawn: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    named: dict[str, Any] = field(default_factory=dict)

    def nbytes(self) -> int:
        tree = [self.parameters, self.buffers, self.extra, self.optimizer, self.average, self.loss]
        return sum(tensor.nbytes for _, tensor in tree_leaves(tree) if isinstance(tensor, Tensor))


def tree_leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Returns `(path, value)` of all leaves of nested dicts, lists and tuples."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in tree_leaves(value, f"{path}/{key}")]
    if isinstance(tree, list | tuple):
        return [leaf for place, value in enumerate(tree) for leaf in tree_leaves(value, f"{path}/{place}")]
    return [(path, tree)]


def differing_paths(one: State, other: State) -> list[str]:
    return differing_leaves(*(vars(state) | {"position": vars(state.position)} for state in (one, other)))


def differing_leaves(one: Any, other: Any) -> list[str]:
    a, b = dict(tree_leaves(one)), dict(tree_leaves(other))
    paths = sorted(a.keys() ^ b.keys())
    return paths + [path for path in sorted(a.keys() & b.keys()) if not _is_same(a[path], b[path])]


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a).equal(bytes_of(b))
    return type(a) is type(b) and repr(a) == repr(b)


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns a tensor's bytes (uint8, 1-dim, on the CPU): NaN equals NaN, and -0.0 differs from 0.0."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def digest_of(value: Any) -> bytes:
    """Returns 16 bytes that differ between values that differ by a bit."""
    content = bytes_of(value).numpy().data if isinstance(value, Tensor) else repr(value).encode()
    return hashlib.blake2b(content, digest_size=16).digest()


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the whole tensor; a sharded tensor is gathered, so all ranks must call the function."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_like(value: Tensor, other: Any) -> Tensor:
    """Returns a whole tensor with the sharding of `other`; unchanged if `other` isn't sharded."""
    if not hasattr(other, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor  # slow to import

    return distribute_tensor(value.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


def host_copy(value: Any) -> Any:
    return to_host(value, lent=False)


def to_host(value: Any, *, lent: bool) -> Any:
    """Returns a tree of values on the CPU; `lent` shares the memory of tensors that are on the CPU already."""
    if isinstance(value, Tensor):
        return full_tensor(value.detach()).to("cpu", copy=not lent).contiguous().resolve_conj().resolve_neg()
    if isinstance(value, Counter):  # of MultiStepLR
        return Counter(value)
    if isinstance(value, dict):
        return {key: to_host(item, lent=lent) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [to_host(item, lent=lent) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def sums_on_host(sums: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of an epoch's sums on the CPU, with the weight as a number."""
    copied = host_copy(sums)
    return copied | {"weight": copied["weight"].item()} if isinstance(copied["weight"], Tensor) else copied


def capture_model(model: nn.Module, *, lent: bool = False) -> dict[str, dict[str, Any]]:
    """Returns parameters, buffers, extra state and `requires_grad` on the CPU; see `to_host` for `lent`."""
    extra = {name: module.get_extra_state() for name, module in _with_extra_state(model)}
    parameters = dict(model.named_parameters())
    trainable = {name: value.requires_grad for name, value in parameters.items()}
    captured = {"parameters": parameters, "buffers": dict(model.named_buffers()), "extra": extra}
    return to_host(captured, lent=lent) | {"trainable": trainable}


@torch.no_grad()
def restore_model(model: nn.Module, state: State) -> None:
    """Copies a State into a module, bit by bit.

    Raises:
        CheckpointError: the State belongs to another model; the message names the first difference.
    """
    copy_into(dict(model.named_parameters()), state.parameters, "parameter")
    _resize_buffers(model, state.buffers)
    copy_into(dict(model.named_buffers()), state.buffers, "buffer")
    for name, module in _with_extra_state(model):
        if name in state.extra:
            module.set_extra_state(host_copy(state.extra[name]))
    for name, value in model.named_parameters():
        value.requires_grad_(state.trainable.get(name, value.requires_grad))


def _resize_buffers(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Gives buffers the saved shapes: some grow in training, such as the cached angles of a rotary embedding."""
    for name, buffer in list(model.named_buffers()):
        value = saved.get(name)
        if value is not None and value.shape != buffer.shape and value.dtype == buffer.dtype:
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, buffer.new_empty(value.shape))


@torch.no_grad()
def copy_into(target: dict[str, Tensor], source: dict[str, Tensor], kind: str) -> None:
    for name in itertools.chain(target, source):
        if name not in source or name not in target:
            holder, missing = ("model", "checkpoint") if name in target else ("checkpoint", "model")
            raise CheckpointError(
                f"the checkpoint is of another model: the {holder} has a {kind} {name!r}, the {missing} has none",
                expected="the model that wrote it",
                fix="use the Task that the run was started with, or start a new run",
            )
    for name, tensor in target.items():
        value = source[name]
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise CheckpointError(
                f"the checkpoint is of another model: {kind} {name!r} is {describe_parameters(value)} in the checkpoint and"
                f" {describe_parameters(tensor)} in the model",
                expected="the same shapes",
                fix="use the Task that the run was started with, or start a new run",
            )
        put_values(tensor, shard_like(value, tensor))


def put_values(target: Tensor, values: Tensor) -> None:
    """Copies values of the same shape into a tensor; of elements that share memory (`expand`), the first."""
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and not stride:
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)


def describe_parameters(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
