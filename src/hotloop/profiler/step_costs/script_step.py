"""Runs inside a script's process: records the operators of its second training step, times the next ones, and stops it."""

from __future__ import annotations

import ast
import atexit
import builtins
import linecache
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

from hotloop.core.torch_private import current_autograd_node
from hotloop.scripts.child import ImportHook, hide_stops, imports_from, leave_out_our_frames, mark_stop, write_result

_TRIES = 5
"""Steps that may be recorded, as an evaluation falls into some."""

_LONG = 3.0
"""A step that takes so many times the median has an evaluation or a start of workers in it."""


def wait_for_torch(settings: dict[str, Any]) -> None:
    """Waits for the script's import of torch.

    Args:
        settings: `out`, the file to write; `steps`, the number of steps to time.
    """
    hide_stops(settings["out"])
    path = sys.path[:]  # without the script's folder

    def begin() -> None:
        leave_out_our_frames()
        with imports_from(path):
            _begin(settings)

    if "torch" in sys.modules:
        begin()
    else:
        waiting = ImportHook({"torch"}, then=begin)
        waiting.begin()
        os.register_at_fork(after_in_child=waiting.end)


def _begin(settings: dict[str, Any]) -> None:
    process = os.getpid()

    def publish(result: dict[str, Any]) -> None:
        if os.getpid() == process:
            write_result(settings["out"], result)

    def stop() -> None:
        mark_stop(settings["out"])
        os.kill(process, signal.SIGINT)

    step = ScriptStep(settings["steps"], publish, stop)
    step.install()
    os.register_at_fork(after_in_child=step.remove)
    atexit.register(step.close)


class ScriptStep:
    """Records and times a script's steps: a step lasts from an update to the next one of the same optimizer.

    As for a Task, the step is recorded with a GPU's operators, and the first step, which makes the optimizer's state, is
    left out.
    """

    def __init__(
        self, steps: int, publish: Callable[[dict[str, Any]], None], stop: Callable[[], None] = lambda: None
    ) -> None:
        from hotloop.core.patches import Patches

        self._steps, self._publish, self._stop = steps, publish, stop
        self._patches, self._hooks = Patches(), list[Any]()
        self._optimizers: dict[int, Any] = {}
        self._recorded: Any = None
        self._tries = 0
        self._times_s: list[float] = []
        self._last = 0.0
        self._load: Any = None
        self._result: dict[str, Any] = {}

    def install(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        self._hooks += [
            register_optimizer_step_pre_hook(self._update_begins),
            register_optimizer_step_post_hook(self._update_ended),
        ]
        self._patches.patch(_BaseDataLoaderIter, "__next__", self._wrap_draw)

    def remove(self) -> None:
        if self._recorded is not None:
            self._recorded.stop()
            self._recorded = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._patches.undo()

    def close(self) -> None:
        """Publishes what is known at the script's end."""
        if self._hooks:
            self.remove()
            self._publish_times()

    def _publish_times(self) -> None:
        if not self._result:
            return
        middle = statistics.median(self._times_s) if self._times_s else 0.0
        times_ms = [1e3 * one for one in self._times_s if one <= _LONG * middle]
        busy = self._load.busy() if self._load is not None else ""
        self._publish(self._result | {"times_ms": times_ms, "busy": busy})

    def _update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer
        if self._recorded is not None:
            self._recorded.update_begins(optimizer)

    def _update_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            if optimizer is next(iter(self._optimizers.values())):
                self._step_ended()
        except Exception as error:  # of hotloop: the script goes on
            self.remove()
            self._publish({"note": f"{type(error).__name__}: {error}"})

    def _step_ended(self) -> None:
        now = time.perf_counter()
        if self._recorded is not None:
            recorded, self._recorded = self._recorded, None
            recorded.stop()
            self._tries += 1
            if not recorded.evaluates or self._tries == _TRIES:
                frame = sys._getframe(2)
                self._result = recorded.result(list(self._optimizers.values()), frame)
                self._publish_times()
        elif self._load is not None:
            self._times_s.append(now - self._last)
            if len(self._times_s) == self._steps:
                self.close()
                self._stop()
                return
        elif self._result:  # a step without recording has passed
            from hotloop.core.hardware.machine_load import LoadMeter

            self._load = LoadMeter()
        if not self._result:
            self._recorded = _RecordedStep(list(self._optimizers.values()))
        self._last = time.perf_counter()

    def _wrap_draw(self, draw: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @wraps(draw)
        def wrapped(iterator: Any) -> Any:
            if self._recorded is None:
                return draw(iterator)
            from hotloop.core.torch_private import disable_current_modes

            with disable_current_modes():  # reading data is no operator of the step
                batch = draw(iterator)
            self._recorded.batch_drawn(iterator, batch)
            return batch

        return wrapped


class _RecordedStep:
    """Operators and memory from now to `stop`.

    Attributes:
        evaluates: whether an evaluation drew batches meanwhile.
    """

    def __init__(self, optimizers: list[Any]) -> None:
        import torch

        from hotloop.core.patches import patch_attribute
        from hotloop.profiler.step_costs.operator_recorder import StepRecorder
        from hotloop.profiler.step_costs.trace import operators_of

        self.evaluates = False
        self._recorder = StepRecorder("cuda")
        self._recorder.is_recording = True
        self._tensors: dict[int, Any] = {}  # parameters and buffers
        self._base = self._inputs = self._before = self._saved = self._calls = self._nodes = 0
        self._drawn: list[tuple[int | None, int]] = []  # batches of the loader, rows
        self._rows: int | None = None
        self._implementations: list[tuple[dict[str, Any], Any]] = []
        self._add_state(one for group in _groups(optimizers) for one in group["params"])
        self._recorder.add_tensors(_state(optimizers))
        self._recorder.add_tensors(one.grad for one in self._tensors.values() if one.grad is not None)
        self._stack = ExitStack()
        # A hook for all modules would make torch.compile warn.
        self._stack.enter_context(patch_attribute(torch.nn.Module, "__call__", self._wrap_call))
        self._stack.enter_context(patch_attribute(torch.autograd, "backward", self._wrap_backward))
        self._stack.enter_context(operators_of("cuda"))
        self._stack.enter_context(self._recorder)

    def stop(self) -> None:
        self._stack.close()
        for group, before in self._implementations:
            group["foreach"] = before

    def update_begins(self, optimizer: Any) -> None:
        from hotloop.profiler.step_costs.trace import choose_implementation

        for group in optimizer.param_groups:
            self._implementations.append((group, group.get("foreach"))) if "foreach" in group else None
            choose_implementation(group, "default", "cuda")
        self._recorder.phase = "update"

    def batch_drawn(self, iterator: Any, batch: Any) -> None:
        import torch

        from hotloop.data.batch_tree import tree_tensors
        from hotloop.data.row_count import count_rows

        if not torch.is_grad_enabled():
            self.evaluates = True
            return
        self._inputs += self._recorder.add_tensors(tree_tensors(batch))
        batches = None
        with suppress(TypeError):
            batches = len(iterator._index_sampler)
        self._drawn.append((batches, count_rows(batch).number))

    def result(self, optimizers: list[Any], frame: Any) -> dict[str, Any]:
        """Returns the costs, the batches of an epoch, and the lengths of the loops around the step."""
        import torch

        from hotloop.profiler.step_costs.trace import costs_of_recorded_step

        tensors = list(self._tensors.values())
        parameters = [one for one in tensors if isinstance(one, torch.nn.Parameter) or one.requires_grad]
        parts = {id(one) for one in parameters}
        rows = sum(rows for _, rows in self._drawn) or self._rows or 1
        costs = costs_of_recorded_step(
            self._recorder,
            rows=rows,
            parameters=parameters,
            buffers=[one for one in tensors if id(one) not in parts],
            state=_state(optimizers),
            base=self._base,
            inputs=self._inputs,
            saved_bytes=self._saved,
            module_calls=self._calls,
            autograd_nodes=self._nodes,
        )
        own = tuple(str(Path(one).parent) for one in (torch.__file__, __file__.partition("profiler")[0] + "x"))
        batches = self._drawn[-1][0] if self._drawn else None
        return {
            "costs": costs.to_dict(),
            "device": str(parameters[0].device) if parameters else "cpu",
            "batches": batches,
            "steps_of_epoch": -(-batches // len(self._drawn)) if batches else None,
            "loops": loop_lengths(frame, lambda file: file.startswith(own)),
        }

    def _add_state(self, tensors: Any) -> None:
        new = [one for one in tensors if id(one) not in self._tensors]
        self._tensors |= {id(one): one for one in new}
        self._base += self._recorder.add_tensors(new)

    def _wrap_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def wrapped(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._module_called(module, [*args, *kwargs.values()])
            return call(module, *args, **kwargs)

        return wrapped

    def _module_called(self, module: Any, args: Any) -> None:
        import torch

        from hotloop.data.row_count import count_rows

        if current_autograd_node() is None:
            self._recorder.phase = "forward"
        self._add_state(one for one in [*module._parameters.values(), *module._buffers.values()] if one is not None)
        if not self._calls:
            from hotloop.data.batch_tree import tree_tensors

            self._inputs += self._recorder.add_tensors(tree_tensors(args))
            self._rows, self._before = count_rows(args).number, self._recorder.live_bytes
        self._calls += torch.is_grad_enabled()

    def _wrap_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        from hotloop.profiler.step_costs.trace import count_nodes

        @wraps(backward)
        def wrapped(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            self._nodes += sum(map(count_nodes, roots))
            self._saved = max(self._saved, self._recorder.live_bytes - self._before)
            self._recorder.phase = "backward"
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                self._recorder.phase = "update"

        return wrapped


def _groups(optimizers: list[Any]) -> Iterator[dict[str, Any]]:
    return (group for optimizer in optimizers for group in optimizer.param_groups)


def _state(optimizers: list[Any]) -> list[Any]:
    from hotloop.profiler.step_costs.trace import state_tensors

    return [one for optimizer in optimizers for one in state_tensors(optimizer)]


_WRAPPERS = ("enumerate", "iter", "list", "reversed", "sorted", "tqdm", "track", "prepare")
"""Functions, and methods, of as many results as their first argument has."""

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}


def loop_lengths(frame: FrameType | None, is_left_out: Callable[[str], bool]) -> list[int | None]:
    """Returns the lengths of the loops that run now, the outermost first; None for a length that isn't known.

    Args:
        frame: the innermost; the loops of its callers count too.
        is_left_out: whether a file's loops don't count, such as torch's.
    """
    found: list[int | None] = []
    while frame is not None:
        if not is_left_out(frame.f_code.co_filename):
            found = [*(_length(loop, frame) for loop in _running_loops(frame)), *found]
        frame = frame.f_back
    return found


def _running_loops(frame: FrameType) -> Iterator[ast.For | ast.AsyncFor | ast.While]:
    """Yields the loops around the current line in the frame's function, the outermost first."""
    try:
        node: ast.AST = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except SyntaxError:
        return
    loops: list[ast.For | ast.AsyncFor | ast.While] = []
    line = frame.f_lineno
    while True:
        inner = next(
            (child for child in ast.iter_child_nodes(node) if _first_line(child) <= line <= _last_line(child)), None
        )
        if inner is None:
            break
        if isinstance(node, ast.For | ast.AsyncFor | ast.While) and any(inner is one for one in node.body):
            loops.append(node)
        if isinstance(inner, _SCOPES):
            loops = []
        node = inner
    yield from loops


def _first_line(node: ast.AST) -> int:
    return getattr(node, "lineno", 1 << 30)


def _last_line(node: ast.AST) -> int:
    return getattr(node, "end_lineno", 0) or 0


def _length(loop: ast.For | ast.AsyncFor | ast.While, frame: FrameType) -> int | None:
    if isinstance(loop, ast.While):
        return None
    with suppress(Exception):  # a name that isn't bound any more, or a length that the user's code refuses
        return _length_of(loop.iter, frame)
    return None


def _length_of(node: ast.expr, frame: FrameType) -> int | None:
    if not isinstance(node, ast.Call):
        value = _value(node, frame)
        return None if isinstance(value, str) else len(value)
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name in ("range", "trange"):
        return len(range(*(_value(one, frame) for one in node.args)))
    if name == "zip":
        lengths = [_length_of(one, frame) for one in node.args]
        return min(one for one in lengths if one is not None) if None not in lengths else None
    return _length_of(node.args[0], frame) if name in _WRAPPERS else None


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Returns the value of an expression of names, attributes, numbers and `len`; no other function is called."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return next(names[node.id] for names in (frame.f_locals, frame.f_globals, vars(builtins)) if node.id in names)
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        return _value(node.value, frame)[_value(node.slice, frame)]
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_value(node.left, frame), _value(node.right, frame))
    if isinstance(node, ast.List | ast.Tuple):
        return node.elts
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("len", "int"):
        return getattr(builtins, node.func.id)(_value(node.args[0], frame))
    raise ValueError(ast.dump(node))
