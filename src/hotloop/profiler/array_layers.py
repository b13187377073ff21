"""Times the layers of a step written in array operations, which torch's hooks don't reach."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch

from hotloop.core.patches import Patches
from hotloop.core.records.profile import GroupTime, ModuleTime, OptimizerUse
from hotloop.lowering.arrays_engine.arrays_step import ArraysStep
from hotloop.profiler.base.schedule import Kind
from hotloop.profiler.session.session import ProfilerSession
from hotloop.profiler.timers.module_names import ModuleName, OwnTime, enclosing_names, module_times

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"

LayerTimes = dict[tuple[str, Any], float]
"""Milliseconds of a step: forward and backward by module path, updates by parameter id."""


class LayerClock:
    """Times each layer forward and backward, and the update of each parameter, in separate steps.

    A function in the model's own forward counts to the module that calls the function, as in torch. On an accelerator
    each layer is synchronized (untested on a GPU).
    """

    kinds: Sequence[Kind] = ("clocked",)

    def __init__(self, session: ProfilerSession, step: ArraysStep) -> None:
        self._session, self._step = session, step
        self._patches = Patches()
        self._now: LayerTimes = {}
        self._steps: list[LayerTimes] = []

    def begin(self) -> None:
        self._now = defaultdict(float)
        for call in self._step.network.calls:
            for what in (FORWARD, BACKWARD):
                self._patches.patch(call.layer, what, self._timed(what, lambda *args, path=call.path: path))
        self._patches.patch(self._step, "_update_by", self._timed(UPDATE, lambda rule, parameter, *rest: id(parameter)))

    def end(self) -> None:
        self.drop()
        self._steps.append(self._now)

    def drop(self) -> None:
        self._patches.undo()

    def close(self) -> None:
        self.drop()

    def _timed(self, what: str, whose: Callable[..., Any]) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def call(*args: Any, **named: Any) -> Any:
                began = time.perf_counter()
                result = original(*args, **named)
                if self._step.parts.device.type != "cpu":
                    torch.accelerator.synchronize()
                self._now[what, whose(*args)] += 1e3 * (time.perf_counter() - began)
                return result

            return call

        return make

    def records(self) -> dict[str, list[dict[str, Any]]]:
        if not self._steps:
            return {}
        took = _middle_means(self._steps)
        return {
            "modules": [module.model_dump() for module in self._modules(took)],
            "optimizers": [self._optimizer(took).model_dump()],
        }

    def _modules(self, took: LayerTimes) -> list[ModuleTime]:
        network, model = self._step.network, self._step.parts.model
        calls = Counter(call.path for call in network.calls if call.module is not None)
        own = {
            _module_name(path): OwnTime(took[FORWARD, path], took[BACKWARD, path], calls[path])
            for path in dict.fromkeys(call.path for call in network.calls)
        }
        paths = {id(call.layer): call.path for call in network.calls}
        updates: dict[str, float] = defaultdict(float)
        for parameter, users in network.owned_modules:
            for around in enclosing_names(_module_name(paths[id(users[0][0])])):
                updates[around.path] += took.get((UPDATE, id(parameter)), 0.0)
        kinds = {_module_name(path): type(module).__name__ for path, module in model.named_modules()}
        modules = module_times(own, kinds, self._step_ms())
        return [module.model_copy(update={"update_ms": updates.get(module.name, 0.0)}) for module in modules]

    def _optimizer(self, took: LayerTimes) -> OptimizerUse:
        optimizer = self._step.optimizer
        groups = [
            GroupTime(
                name=str(group.get("name", number)),
                tensors=len(group["params"]),
                numbers=sum(value.numel() for value in group["params"]),
                ms=sum(took.get((UPDATE, id(value)), 0.0) for value in group["params"]),
            )
            for number, group in enumerate(optimizer.param_groups)
        ]
        ms, kind = sum(group.ms or 0.0 for group in groups), type(optimizer).__name__
        return OptimizerUse(kind=kind, where="", implementation="arrays", groups=groups, steps=1.0, ms=ms)

    def _step_ms(self) -> float | None:
        steps = [step.ms for step in self._session.facts.steps if step.kind == "instrumented" and step.ms]
        return fmean(steps) if steps else None


def _middle_means(steps: Sequence[LayerTimes]) -> LayerTimes:
    """Means over the middle half of the steps by total time: unlike medians of parts, these add up."""
    ordered = sorted(steps, key=lambda step: sum(step.values()))
    middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    return {key: fmean(step.get(key, 0.0) for step in middle) for key in {key for step in middle for key in step}}


def _module_name(path: str) -> ModuleName:
    return ModuleName("model", path)
