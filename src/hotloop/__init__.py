"""Trains your PyTorch network as fast as your hardware allows, and proves it.

What is named here is public. Names are imported on first use, so that `import hotloop` needs no torch.
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
    "Run": "hotloop.run",
    "View": "hotloop.view",
    "HotloopError": "hotloop.errors",
    "fit": "hotloop.api",
    "evaluate": "hotloop.api",
    "predict": "hotloop.api",
    "export": "hotloop.api",
    "load_model": "hotloop.api",
    "devices": "hotloop.api",
    "choose_plan": "hotloop.api",
    "lower": "hotloop.lowering",
    "check": "hotloop.proving",
    "race": "hotloop.contests",
    "tune": "hotloop.seeking",
    "profile": "hotloop.inspecting",
    "explain": "hotloop.explaining",
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
    "arrays",
    "check",
    "choose_plan",
    "data",
    "devices",
    "errors",
    "evaluate",
    "explain",
    "export",
    "fit",
    "load_model",
    "lower",
    "predict",
    "profile",
    "race",
    "tune",
]

if TYPE_CHECKING:
    from hotloop import arrays, data, errors
    from hotloop.api import choose_plan, devices, evaluate, export, fit, load_model, predict
    from hotloop.contests import race
    from hotloop.errors import HotloopError
    from hotloop.explaining import explain
    from hotloop.inspecting import profile
    from hotloop.lowering import lower
    from hotloop.plan import Plan
    from hotloop.proving import check
    from hotloop.run import Run
    from hotloop.seeking import tune
    from hotloop.task import Parameters, Task
    from hotloop.view import View


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"hotloop.{name}")
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        if isinstance(value, FunctionType):
            value = import_module("hotloop.argument_names").naming_arguments(value)
        globals()[name] = value  # pickle requires the same object at each access
        return value
    raise AttributeError(f"module 'hotloop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
