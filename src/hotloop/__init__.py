"""Trains your PyTorch network as fast as your hardware allows, and proves it.

The names here are public. They are imported at first use, so `import hotloop` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Task": "hotloop.task",
    "Parameters": "hotloop.task",
    "Plan": "hotloop.plan",
    "Run": "hotloop.training.run",
    "View": "hotloop.core.callback",
    "HotloopError": "hotloop.errors",
    "fit": "hotloop.api",
    "evaluate": "hotloop.api",
    "predict": "hotloop.api",
    "export": "hotloop.api",
    "load_model": "hotloop.api",
    "devices": "hotloop.api",
    "advise": "hotloop.advisor.advice",
    "estimate_step": "hotloop.advisor.advice",
    "choose_plan": "hotloop.api",
    "lower": "hotloop.lowering.build",
    "check": "hotloop.tuning.race",
    "race": "hotloop.tuning.race",
    "tune": "hotloop.tuning.tune",
    "profile": "hotloop.profiler.profile",
    "explain": "hotloop.explainer.explain",
    "summary": "hotloop.api",
    "study": "hotloop.hyperparameters.study",
    "find_batch_size": "hotloop.hyperparameters.finders",
    "find_learning_rate": "hotloop.hyperparameters.finders",
}
# No module has the name of a public function: importing the module would hide the function.
_MODULES = ("arrays", "data", "errors")

__all__ = [
    "HotloopError",
    "Parameters",
    "Plan",
    "Run",
    "Task",
    "View",
    "advise",
    "arrays",
    "check",
    "choose_plan",
    "data",
    "devices",
    "errors",
    "estimate_step",
    "evaluate",
    "explain",
    "export",
    "find_batch_size",
    "find_learning_rate",
    "fit",
    "load_model",
    "lower",
    "predict",
    "profile",
    "race",
    "study",
    "summary",
    "tune",
]

if TYPE_CHECKING:
    from hotloop import arrays, data, errors
    from hotloop.advisor.advice import advise, estimate_step
    from hotloop.api import choose_plan, devices, evaluate, export, fit, load_model, predict, summary
    from hotloop.core.callback import View
    from hotloop.errors import HotloopError
    from hotloop.explainer.explain import explain
    from hotloop.hyperparameters.finders import find_batch_size, find_learning_rate
    from hotloop.hyperparameters.study import study
    from hotloop.lowering.build import lower
    from hotloop.plan import Plan
    from hotloop.profiler.profile import profile
    from hotloop.task import Parameters, Task
    from hotloop.training.run import Run
    from hotloop.tuning.race import check, race
    from hotloop.tuning.tune import tune


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"hotloop.{name}")
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        if isinstance(value, FunctionType):
            value = import_module("hotloop.core.argument_names").name_arguments_in_errors(value)
        globals()[name] = value  # pickle requires the same object at each access
        return value
    raise AttributeError(f"module 'hotloop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
