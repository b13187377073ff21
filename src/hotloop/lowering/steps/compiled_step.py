"""The compile axis: steps that run as one compiled program, on the same tensors as the eager step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from hotloop.core.reporter import silence_loggers
from hotloop.data.batch_tree import batch_length, tree_tensors
from hotloop.errors import PlanError, describe_error
from hotloop.lowering.compile.capture import CapturedStep, StepCapture, UpdateStyle, unalias
from hotloop.lowering.compile.compiled_rng import has_no_draws
from hotloop.lowering.compile.host_scalars import split_host_scalars
from hotloop.lowering.compile.inductor_patches import inductor_options, inductor_patches
from hotloop.lowering.compile.inputs import (
    FixedScalarChanged,
    OptimizerScalars,
    describe_mismatch,
    scalars_by_place,
    step_tensors,
    tensors_by_place,
)
from hotloop.lowering.compile.package_cache import capture_reproducibly, load_or_build_package
from hotloop.lowering.compile.runtime_checks import CaptureRecheck, IndexBounds
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.rewrites import apply_rewrite
from hotloop.lowering.rewrites.dropout_from_words import WordDrawMode

Runner = Callable[[list[Tensor]], Any]
_PendingResult = tuple[Tensor, Any, int]
"""Loss, weight and number of samples."""

_AT_ONCE, _SMALL = 256, 64
"""Number of losses that are summed at once, which limits memory; and bytes of storage that each may keep alive."""

_EAGER_STEPS = 2
"""Eager steps before a step is compiled; afterwards the optimizer has all its state."""


class CompiledStep(EagerStep):
    """One training step as a compiled program, for batches like the batch that it was prepared with.

    Three kinds of steps run eagerly on the same tensors: on other batches (such as an incomplete last one), before the
    optimizer has all its state, and after a change of a number that is a constant in the program. The program reads and
    changes only what the eager step does. After a step with compile=step, parameters have no gradients.
    """

    def __init__(self, parts: LoweringContext) -> None:
        super().__init__(parts)
        self.whole = parts.plan.compile != "forward"
        self._runner: Runner | None = None
        self._captured: CapturedStep | None = None
        self._hyper = OptimizerScalars(self.optimizer, {})
        self._indices: IndexBounds | None = None
        self._bound: list[Tensor] | None = None  # parameters first
        self._expected: dict[str, Tensor] = {}  # by place, like the program's tensors
        self._eager_steps = 0  # since the last restore
        self._recheck: CaptureRecheck | None = None
        self._parameters = list(parts.model.parameters())
        self._signature: Any = ()
        self._batch_tensors = self._samples = 0
        self._may_draw = True
        self._reported: set[str] = set()
        self.steps_run: int = 0

    def warm_up(self, batch: Any, samples: int) -> None:
        """Compiles the step for batches like this one, after two eager steps.

        Raises:
            PlanError: the step can't be captured, compiled or recorded.
        """
        self(batch, samples, 0)  # the optimizer creates its state in its first step
        first = scalars_by_place(self.optimizer)
        self(batch, samples, 1)
        self.end_epoch(0.0)  # steps a schedule by epochs; `Program.prepare` restores the State
        later = scalars_by_place(self.optimizer)
        if self.whole:
            self._drop_gradients()
        self.prepare(batch, {place for place in later if later[place] != first[place] or place.endswith("/lr")})

    def prepare(self, batch: Any, varying: set[str]) -> None:
        """Captures and compiles; needs one eager step before, which creates the optimizer's state.

        Args:
            batch: on the device, like the later ones.
            varying: places of the optimizer's numbers that a schedule changes.

        Raises:
            PlanError: the step can't be captured or compiled.
        """
        cells = {place: torch.zeros((), dtype=torch.float64) for place in sorted(varying)}
        self._hyper = OptimizerScalars(self.optimizer, cells)
        self._batch_tensors = len(list(tree_tensors(batch)))
        self._captured = self._capture(batch, cells)
        if self.parts.device.type == "cpu":
            self._indices = IndexBounds(self._captured, self._batch_tensors)
        self._may_draw = not (self.whole and self._forward_backward and has_no_draws(self._captured.graph))
        self._rewrite(self._captured)
        self._runner = build_program(self._captured, self.parts)
        self._signature, self._samples = batch_signature(batch), batch_length(batch)

    def _capture(self, batch: Any, cells: dict[str, Tensor], update: UpdateStyle = "singly") -> CapturedStep:
        capture = StepCapture(self, batch_length(batch), cells, whole=self.whole, update=update)
        is_package = self.parts.plan.compile == "package"
        captured = capture_reproducibly(capture, batch, self.parts) if is_package else capture.trace_twice(batch)
        names = tensors_by_place(step_tensors(self, cells, whole=self.whole))
        self._expected = dict(zip(names, captured.examples, strict=False))  # the batch's examples come last
        self._recheck, self.recheck_s = CaptureRecheck(captured, capture.trace_once), capture.once_s
        return captured

    def _rewrite(self, captured: CapturedStep) -> None:
        plan = self.parts.plan
        if plan.rewrites != "none":
            excluded = ("draw_by_words",) if plan.accumulation > 1 else ()
            counts = apply_rewrite(captured.graph, plan.rewrites, excluded, self.parts.device.type)
            self.draws_by_words = bool(counts.get("draw_by_words"))
            times = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
            self._report("rewrote", f"rewrote the step: {times}")

    @property
    def graph(self) -> GraphModule | None:
        return None if self._captured is None else self._captured.graph

    @property
    def _forward_backward(self) -> bool:
        """Whether no function of the Task runs besides the program, which might draw."""
        return self.schedule is None and self.parts.task.weight is None

    def on_state_restored(self) -> None:
        self._bound, self._eager_steps = None, 0

    def invalidate_bindings(self) -> None:
        """Makes the next step bind its tensors again, which callbacks may have replaced.

        Raises:
            TaskError: the model has other parameters than the optimizer.
        """
        super().invalidate_bindings()
        self._check_ownership()
        self._bound = None

    def schedule_recheck(self) -> None:
        if self._recheck is not None:
            self._recheck.due = True

    def _is_another(self, batch: Any) -> bool:
        """Whether the step differs from the compiled one; compares only when due."""
        if self._recheck is None or not self._recheck.has_changed(batch):
            return False
        self._report(
            "another",
            "a callback changes what the step does, which was compiled before: from here on steps run eagerly",
        )
        self.run_eagerly()
        return True

    def run_eagerly(self) -> None:
        self._runner = None

    def run(self, batches: Iterator[tuple[Any, int]], step: int) -> Iterator[tuple[int, int]]:
        """Runs a step on each batch, starting with step number `step`; yields (steps, samples) after each call.

        If nothing can change, the checks before a program and the sums after it run once for many steps: between two
        programs, which fill the processor's caches, they take several times as long as in one go.
        """
        uncounted: list[_PendingResult] = []
        last: Tensor | None = None  # the loss of the first compiled step, until `_is_steady` is called
        asked = steady = False
        try:
            for batch, samples in batches:
                if last is not None:
                    asked, steady, last = True, self._is_steady(last), None
                if steady and samples == self._samples:
                    loss = self._run_unchecked(batch, samples, step)
                    uncounted.append((loss, self.parts.weigh(batch, samples), samples))
                else:
                    self._count(uncounted)
                    loss, steady = self(batch, samples, step), False
                    last = None if asked or self._bound is None else loss
                if len(uncounted) == _AT_ONCE:
                    self._count(uncounted)
                step += 1
                yield 1, samples
        finally:
            self._count(uncounted)

    def _is_steady(self, loss: Tensor) -> bool:
        """Whether later steps need no checks, judged by the last step's loss: batches are untransformed rows of arrays,
        no user function runs, and losses have memory of their own.
        """
        no_calls = self.parts.task.weight is None and (self.schedule is None or not self._each_step)
        runs = self.whole and self._runner is not None and self._bound is not None and self.scaler is None
        if not (no_calls and runs) or self.row_arrays is None or self._captured is None or self._captured.scalars:
            return False
        is_within = self._indices is None or self._indices.are_all_within(list(tree_tensors(self.row_arrays)))
        return is_within and self._has_own_memory(loss)

    def _has_own_memory(self, loss: Tensor) -> bool:
        """Whether no later step changes the loss's memory, and the loss keeps no larger storage alive."""
        is_small = loss.untyped_storage().nbytes() <= _SMALL
        return is_small and _address(loss) not in map(_address, self._bound or ())

    def _run_unchecked(self, batch: Any, samples: int, step: int) -> Tensor:
        """Runs the program on a batch without checks; returns the loss, which isn't added to the sums."""
        return self._call(batch, [*self._bound, *tree_tensors(batch)], samples, step)[0]  # type: ignore[misc]

    def _count(self, losses: list[_PendingResult]) -> None:
        """Adds losses to the sums, and clears the list."""
        for loss, weight, samples in losses:
            self._add(loss, {}, weight)
            self.sums["samples"] += samples
        losses.clear()

    def __call__(self, batch: Any, samples: int, step: int) -> Tensor:
        """Runs step number `step`; returns the loss, 0-dim, on the device."""
        if self._runner is None or batch_signature(batch) != self._signature or not self._has_host_scalars():
            return self._run_eagerly(batch, samples, step)
        if not self._is_bound() or self._is_another(batch):
            return self._run_eagerly(batch, samples, step)
        flat = [*self._bound, *tree_tensors(batch)]  # type: ignore[misc]
        if self._indices is not None and not self._indices.is_within(flat):
            return self._run_eagerly(batch, samples, step)  # raises an error that names the layer
        self._set_scale()
        outputs = self._call(batch, flat, samples, step)
        loss, scalars = self._finish(list(outputs))
        self._add(loss, scalars, self.parts.weigh(batch, samples))
        self.sums["samples"] += samples
        self.draws.note()
        return loss

    def _call(self, batch: Any, flat: list[Tensor], samples: int, step: int) -> Any:
        """Returns the program's outputs as step number `step`."""
        if self._may_draw or self.draws.always or not self.draws.spare:
            self.draws.seed(step)
        was_enabled = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)  # `no_grad` takes 6 us between two programs
            outputs = self._runner(flat)  # type: ignore[misc]
            self.steps_run += 1
            return outputs
        except Exception:
            torch._C._set_grad_enabled(True)
            self._backward(batch, samples, step)  # raises the clearer error if the batch is faulty
            raise
        finally:
            torch._C._set_grad_enabled(was_enabled)

    def _run_eagerly(self, batch: Any, samples: int, step: int) -> Tensor:
        self._bound = None  # an eager step may replace tensors of the optimizer's state
        self._eager_steps += 1
        if self._runner is not None and batch_signature(batch) != self._signature:
            kind = f"of {samples} instead of {self._samples} samples"
            if samples == self._samples:
                kind = "of other keys, shapes, dtypes or strides than the first"
            self._report("batch", f"a batch {kind}: steps on such batches run eagerly")
        with WordDrawMode() if self.draws_by_words else nullcontext():
            return EagerStep.__call__(self, batch, samples, step)

    def _report(self, kind: str, line: str) -> None:
        """Shows a line once per kind, such as why a step runs eagerly."""
        if kind not in self._reported:
            self._reported.add(kind)
            self.parts.say(line)

    def _has_host_scalars(self) -> bool:
        """Passes the optimizer's numbers to the program; False if a constant of the program has changed."""
        try:
            if self.whole:
                self._hyper.fill()
        except FixedScalarChanged as moved:
            self._report_fallback(moved)
            return False
        return True

    def _report_fallback(self, moved: FixedScalarChanged) -> None:
        self._report("number", f"{moved}: while that is so, steps run eagerly")

    def _finish(self, outputs: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns loss and scalars; with compile=forward it updates, too."""
        assert self._captured is not None
        loss, names = outputs[0], self._captured.scalars
        scalars = dict(zip(names, outputs[1 : 1 + len(names)], strict=True))
        if not self.whole:
            self._clear_gradients()
            gradients = unalias(outputs[1 + len(names) :], Tensor.data_ptr)  # a compiler may merge equal ones
            for name, value in zip(self._captured.gradients, gradients, strict=True):
                self.parts.model.get_parameter(name).grad = value
            self._clip_unscaled()
            self._update()
            pairs = zip(self._bound or (), self._parameters, strict=False)
            if any(bound.data_ptr() != parameter.data_ptr() for bound, parameter in pairs):
                self._bound = None  # `parameter.data = ...` has moved it
        self.step_schedule()
        if not self.whole and self.average:
            self.update_average(list(self.average.values()), self._averaged)
        return loss, scalars

    def _set_scale(self) -> None:
        if self.scaler is not None and self.scale is not None:
            self.scale.copy_(self.scaler.scale(torch.ones_like(self.scale)))

    def _is_bound(self) -> bool:
        """Binds the tensors of the program; False while the optimizer's state is incomplete."""
        if self._bound is None:
            found = tensors_by_place(step_tensors(self, self._hyper.cells, whole=self.whole))
            if not self._fits(found):
                return False
            self._bind([found[place] for place in self._expected])
        return True

    def _fits(self, found: dict[str, Tensor]) -> bool:
        """Whether the tensors fit the program; reports why not, unless eager steps may still create them."""
        why = describe_mismatch(found, self._expected)
        if why is not None and self._eager_steps >= _EAGER_STEPS:
            self._report("tensors", f"{why}: while that is so, steps run eagerly")
        return why is None

    def _bind(self, found: list[Tensor]) -> None:
        """Binds tensors, and frees gradients of an eager step."""
        self._bound = found
        if self.whole:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        for value in self._filled:
            value.grad = None


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def batch_signature(batch: Any) -> Any:
    """Returns what a compiled program assumes of a batch without a check, in about 1 us for each tensor.

    These are kinds of containers, their keys, and shapes, dtypes, strides and devices of tensors. A batch with other
    leaves is never captured; their type suffices.
    """
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype, batch.stride(), batch.device
    if isinstance(batch, tuple | list):
        return type(batch), *[batch_signature(item) for item in batch]
    if isinstance(batch, Mapping):
        return type(batch), *batch, *[batch_signature(item) for item in batch.values()]
    return type(batch)


def build_program(captured: CapturedStep, parts: LoweringContext) -> Runner:
    """Compiles the captured step into one program with the graph's inputs.

    Raises:
        PlanError: the step can't be compiled.
    """
    if parts.device.type != "cpu":
        return _compile(captured, parts)
    captured, scalars = split_host_scalars(captured)
    run = _compile(captured, parts)
    return run if scalars is None else lambda flat: run([*flat, scalars(flat)])


def _compile(captured: CapturedStep, parts: LoweringContext) -> Runner:
    options = inductor_options()
    try:
        with warnings.catch_warnings(), silence_loggers("torch"):
            warnings.simplefilter("ignore")  # they concern torch's own code
            if parts.plan.compile == "package":
                return load_or_build_package(captured, parts.device, options, parts.say, parts.package)
            return _compile_now(captured, parts, options)
    except Exception as error:
        raise PlanError(
            f"the captured step can't be compiled: {describe_error(error)}",
            expected="a step that the compiler accepts",
            fix="choose compile=none",
        ) from error


def _compile_now(captured: CapturedStep, parts: LoweringContext, options: dict[str, Any]) -> Runner:
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad(), inductor_patches(parts.device, parts.say):
        compiled: Any = compile_fx(captured.graph, captured.examples, config_patches=options)
    return lambda flat: compiled(*flat)
