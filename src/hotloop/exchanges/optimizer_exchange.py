"""The optimizer exchange: torch's fused or foreach kernel in place of an update tensor by tensor.

The exchange is made in torch's functional form of the update, one call for each parameter group. The optimizer object, its
flags, its state and `state_dict()` stay the script's own, and other code that wraps `step` runs as before.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from hotloop.core.patches import Patches
from hotloop.core.task_parts.models import is_gapless
from hotloop.core.torch_private import dispatch_mode_count, function_mode_count
from hotloop.exchanges.part import Exchange, Part, Session
from hotloop.exchanges.update_proof import Tensors, compare_update
from hotloop.profiler.base.transparency import hide_from_warnings
from hotloop.scripts.child import raise_signal_error, strip_own_frames

_LIST_COUNTS = {"sgd": 3, "adam": 6, "adagrad": 4}
"""Torch's functional updates with a fused kernel on the CPU, and the number of their tensor lists (torch 2.13)."""

_FLAGS = {"fused": {"fused": True, "foreach": False}, "foreach": {"fused": False, "foreach": True}}

_EXACT_FORMS = ["foreach"]
"""With `--exact`: the form that calls the operations of the original. Most updates of a fused Adam have equal bits, until a
number among some ten thousand is rounded otherwise, so compared calls can't prove equal bits."""

_UNFIT_SETTINGS = ("capturable", "differentiable", "has_complex", "has_sparse_grad", "grad_scale", "found_inf")

_DTYPES = (torch.float32, torch.float64)

_MAX_PARTS = 64

_REFUSALS = 2
"""Equal parts without an exchange, such as those of a search over learning rates, after which the next one is not tried."""


def _nothing() -> None:
    """Stands for the reference to a state that is None."""


class _Group:
    """The part of one parameter group, found by its first parameter.

    Attributes:
        values: of the settings in the last call; equal objects need no second look.
        fit_rows: parameters, their states and strides that fitted in the last call; a fused kernel iterates over memory.
    """

    def __init__(self, first: Tensor, part: Part, settings: tuple[Any, ...]) -> None:
        self.first, self.part, self.settings = weakref.ref(first), part, settings
        self.values: tuple[Any, ...] = ()
        self.fit_rows: tuple[list[Any], list[Any]] | None = None

    def has_same_values(self, values: Collection[Any]) -> bool:
        return len(values) == len(self.values) and all(map(operator.is_, values, self.values))

    def fits_still(self, lists: Sequence[Tensors]) -> bool:
        """Whether a call has the tensors of a call that fitted, with gradients of the same strides."""
        if self.fit_rows is None:
            return False
        references, strides = self.fit_rows
        tensors = list(itertools.chain(lists[0], *lists[2:]))
        if len(tensors) != len(references) or not all(map(operator.is_, tensors, [one() for one in references])):
            return False
        return all(
            type(gradient) is Tensor
            and gradient.layout is torch.strided
            and gradient.stride() == stride == parameter.stride()
            for parameter, gradient, stride in zip(lists[0], lists[1], strides, strict=True)
            if parameter is not None
        )

    def note_fit(self, lists: Sequence[Tensors]) -> None:
        references = [
            _nothing if value is None else weakref.ref(value) for value in itertools.chain(lists[0], *lists[2:])
        ]
        self.fit_rows = references, [value.stride() for value in lists[0] if value is not None]


class OptimizerExchange(Exchange):
    """Replaces torch's functional updates by functions that choose between original and exchange."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._groups: dict[tuple[str, int, int], _Group] = {}
        self._alike: defaultdict[Any, list[Part]] = defaultdict(list)
        self._replaced: dict[str, Patches] = {}

    def install(self) -> None:
        for name in _LIST_COUNTS.keys() - self._replaced.keys():
            patches = self._replaced[name] = Patches()
            patches.patch(sys.modules[f"torch.optim.{name}"], name, functools.partial(self._exchanging, name))

    def remove(self) -> None:
        for patches in self._replaced.values():
            patches.undo()
        self._replaced = {}

    abandon = remove

    @property
    def is_over(self) -> bool:
        """Whether no update is exchanged or tried."""
        return all(group.part.stage == "off" or group.first() is None for group in self._groups.values())

    def leave_refused(self) -> None:
        """Gives back the updates of which no group is exchanged or tried."""
        wanted = {name for (name, _, _), group in self._groups.items() if group.part.stage != "off"}
        for name in self._replaced.keys() - wanted:
            self._replaced.pop(name).undo()

    @hide_from_warnings
    def _exchanging(self, name: str, original: Any) -> Any:
        compiling, session, lists = torch.compiler.is_compiling, self._session, _LIST_COUNTS[name]

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if compiling() or len(args) != lists or not session.is_exchanging():
                return original(*args, **kwargs)
            try:
                return self._update(name, original, args, kwargs)
            except BaseException as error:
                error.__traceback__ = strip_own_frames(error)
                raise

        return call

    def _update(self, name: str, original: Callable[..., None], lists: Sequence[Tensors], kwargs: dict) -> None:
        since_s = time.perf_counter()
        if not lists[0]:
            return original(*lists, **kwargs)
        try:
            part = self._fit_part(name, lists, kwargs)
        except Exception as error:  # such as an object in the place of a tensor
            raise_signal_error(error)
            part = None
        if part is None:
            return original(*lists, **kwargs)
        flags = _FLAGS[part.exchange]
        return part.call(
            functools.partial(original, *lists, **kwargs),
            lambda: _run_exchange(original, lists, {**kwargs, **flags}, kwargs, part),
            lambda: (None, compare_update(original, lists, kwargs, flags)),
            enabled=self._session.is_enabled,
            since_s=since_s,
        )

    def _fit_part(self, name: str, lists: Sequence[Tensors], kwargs: dict) -> Part | None:
        """Returns the part of a call; None if the call is not exchanged."""
        if kwargs.get("lr") == 0:
            return None  # such as the first step of a warm-up, which shows no error of an update
        group = self._group(name, lists[0], kwargs)
        if group is None or group.part.stage == "off":
            return None
        unfit = why_unfit(lists, kwargs, are_rows_known=group.fits_still(lists))
        if unfit:
            group.fit_rows = None
            group.part.note_unfit(unfit)
            return None
        if group.part.stage == "use" and group.fit_rows is None:  # the states of the first calls are new
            group.note_fit(lists)
        return group.part

    def _group(self, name: str, parameters: Tensors, kwargs: Mapping[str, Any]) -> _Group | None:
        """Returns a parameter group; None if there are too many."""
        first = parameters[0]
        assert first is not None
        key = (name, id(first), len(parameters))
        group = self._groups.get(key)
        is_known = group is not None and group.first() is first
        if group is not None and is_known and (group.part.stage == "off" or group.has_same_values(kwargs.values())):
            return group
        settings = tuple((field, _setting_key(value)) for field, value in kwargs.items())
        if group is None or not is_known:
            if self._made >= _MAX_PARTS:
                return None
            self._made += 1
            kind = "AdamW" if kwargs.get("decoupled_weight_decay") else _CLASS_NAMES[name]
            numbers = sum(value.numel() for value in parameters if value is not None)
            shown = f"{kind}, {numbers:,} numbers in {len(parameters)} tensor{'s' * (len(parameters) > 1)}"
            group = _Group(first, self._made_part(shown, settings), settings)
            self._groups = {one: known for one, known in self._groups.items() if known.first() is not None}
            self._groups[key] = group
        elif group.settings != settings:
            group.settings, group.fit_rows = settings, None
            group.part.restart(_EXACT_FORMS if group.part.exact else list(_FLAGS))
        group.values = tuple(kwargs.values())
        return group

    def _made_part(self, shown: str, settings: tuple[Any, ...]) -> Part:
        part, alike = self._session.make_part("optimizer", shown, list(_FLAGS)), self._alike[shown, settings]
        if part.exact and part.stage != "off":
            part.restart(_EXACT_FORMS)
        if len(alike) >= _REFUSALS and all(one.stage == "off" for one in alike):
            part.refuse(alike[-1].reason)
        alike.append(part)
        return part


def _setting_key(value: Any) -> Any:
    """Returns what a proof depends on: of a number only whether it is zero, since schedules change numbers at each step."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return value == 0
    return value if isinstance(value, bool | None) else type(value)


_CLASS_NAMES = {"sgd": "SGD", "adam": "Adam", "adagrad": "Adagrad"}


def _run_exchange(
    original: Callable[..., None], lists: Sequence[Tensors], exchanged: dict, kwargs: dict, part: Part
) -> None:
    """Runs the exchange; if it fails before a change of any tensor, runs the original and refuses the exchange."""
    versions = _versions(lists)
    try:
        original(*lists, **exchanged)
    except Exception as error:
        if _versions(lists) != versions:
            raise
        raise_signal_error(error)
        part.take_back(f"it raised {type(error).__name__}: {error}")
        original(*lists, **kwargs)


def _versions(lists: Sequence[Tensors]) -> list[int]:
    return [-1 if value is None else value._version for tensors in lists for value in tensors]


def why_unfit(lists: Sequence[Tensors], settings: Mapping[str, Any], *, are_rows_known: bool = False) -> str:
    """Returns why a call can't be exchanged; empty if it can.

    Args:
        are_rows_known: whether the parameters, gradients and states are known to fit.
    """
    for flag in ("foreach", "fused"):
        if settings.get(flag) is not None:
            return f"the script sets {flag}={settings[flag]}"
    for name in _UNFIT_SETTINGS:
        value = settings.get(name)
        if value is not None and value is not False:
            return f"torch's fused kernels don't support {name}"
    if any(isinstance(value, Tensor) for value in settings.values()):
        return "a setting is a tensor"
    if dispatch_mode_count() or function_mode_count() or torch.is_grad_enabled():
        return "a torch mode is active"
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "several ranks make the same update, and each of them would choose by its own race"
    if are_rows_known:
        return ""
    count = len(lists[0])
    columns = [tensors for tensors in lists if tensors]
    if any(len(tensors) != count for tensors in columns):
        return "some parameters lack a state"
    for tensors in columns[2:]:
        absent = sum(value is None for value in tensors)
        if absent not in (0, count):
            return "some parameters get their first gradient later than others"
    return next(filter(None, map(_why_unfit_row, zip(*columns, strict=True))), "")


def _why_unfit_row(row: Sequence[Tensor | None]) -> str:
    """Checks one parameter with its gradient and states; fused kernels iterate over memory."""
    parameter = row[0]
    if parameter is None or type(parameter) not in (Tensor, nn.Parameter) or parameter.layout != torch.strided:
        return "a parameter is no plain tensor"
    if parameter.device.type != "cpu":
        return f"the parameters are on {parameter.device.type}"
    if parameter.dtype not in _DTYPES:
        return f"the parameters are {str(parameter.dtype).removeprefix('torch.')}"
    if not (parameter.is_contiguous() or is_gapless(parameter)):
        return "a parameter's memory has gaps"
    for value in row[1:]:
        if value is None:
            continue
        if type(value) is not Tensor or value.layout != torch.strided or value.device != parameter.device:
            return "a gradient or state is no plain tensor on the parameter's device"
        if value.ndim == 0 and parameter.ndim:  # the number of steps
            if value.dtype not in _DTYPES:
                return "the number of steps is no floating-point tensor"
        elif value.dtype != parameter.dtype or value.stride() != parameter.stride() or value.shape != parameter.shape:
            return "a gradient or state has another type or memory layout than its parameter"
    return ""
