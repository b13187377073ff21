"""Labels each node of a captured step with its module and phase, as torch's compiler does.

hotloop captures a compiled step in one run under torch's tracer (`lowering/compile/capture.py`), which doesn't record
modules. This module observes the calls of modules in that run; autograd numbers nodes as in any step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.nn.modules.loss import _Loss

from hotloop.core.patches import Patches
from hotloop.core.records.profile_terms import Phase
from hotloop.lowering.compile import capture
from hotloop.profiler.trace.inductor_kernels import PHASE_KEY


class NodeLabels:
    """Labels the nodes of steps that are captured inside of `on()`."""

    def __init__(self) -> None:
        self._inside: list[nn.Module | None] = [None]
        self._numbers: list[int] = []
        self._makers: list[nn.Module | None] = []
        self._labelled_nodes = False

    @contextmanager
    def on(self) -> Iterator[None]:
        patches = Patches()
        patches.patch(capture, "make_fx", self._tracing)
        try:
            yield
        finally:
            patches.undo()

    def _tracing(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Patches only the tracer's own run: later copies of graphs have the labels."""

        @wraps(make)
        def make_labelled(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            run = make(*args, **kwargs)

            def labelled(*inputs: Any) -> Any:
                patches = Patches()
                patches.patch(PythonKeyTracer, "call_module", self._called)
                patches.patch(fx.Graph, "create_node", self._created)
                self._labelled_nodes = False
                try:
                    return run(*inputs)
                finally:
                    patches.undo()

            return labelled

        return make_labelled

    def _called(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def called(tracer: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._inside.append(module)
            self._note()
            try:
                return call(tracer, module, *args, **kwargs)
            finally:
                self._inside.pop()
                self._note()

        return called

    def _note(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._makers.append(self._inside[-1])

    def _created(self, create: Callable[..., fx.Node]) -> Callable[..., fx.Node]:
        @wraps(create)
        def created(*args: Any, **kwargs: Any) -> fx.Node:
            node = create(*args, **kwargs)
            module, phase = self._now()
            node.meta["custom"] = {**(node.meta.get("custom") or {}), PHASE_KEY: phase}
            node.meta["nn_module_stack"] = {} if module is None else {str(id(module)): ("", type(module))}
            return node

        return created

    def _now(self) -> tuple[nn.Module | None, Phase]:
        """Returns the module and phase of a node that is made now."""
        running: Any = torch._C._current_autograd_node()
        if running is not None:
            self._labelled_nodes = True
            at = bisect_right(self._numbers, running._sequence_nr()) - 1
            return _innermost_user_module(self._makers[at]) if at >= 0 else None, "backward"
        called = self._inside[-1]
        if called is None:
            return None, "update" if self._labelled_nodes else "loss"
        self._labelled_nodes = False
        return _innermost_user_module(called), "loss" if isinstance(called, _Loss) else "forward"


def _innermost_user_module(module: nn.Module | None) -> nn.Module | None:
    return None if isinstance(module, _Loss) else module
