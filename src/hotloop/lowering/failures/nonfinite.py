"""Search for the first NaN or infinite loss, gradient or parameter, by a replay of the steps before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.random.rng import preserve_generators
from hotloop.core.state import Position
from hotloop.core.task_parts.optimizers import owner_optimizer
from hotloop.core.torch_private import TorchDispatchMode, tree_leaves
from hotloop.data.batch_tree import to_device
from hotloop.data.sources import Source
from hotloop.errors import HotloopError, NonFiniteError, describe_error
from hotloop.lowering.evaluation import evaluate
from hotloop.lowering.failures.location import (
    describe_bad_samples,
    describe_checkpoint,
    floating_parts,
    nonfinite_rows,
    step_under_way,
)
from hotloop.lowering.failures.value_hooks import ValueEvent, ValueHooks
from hotloop.lowering.program import Program
from hotloop.task import StepResult

_RISE_RATIO = 10.0
"""Growth of the loss, or of the largest weight, from which on the training counts as divergent."""

_LARGE_VALUE = 1e6
"""Weights above this value don't occur in a training that converges."""

_OUTPUT_FIX = "look for a log, sqrt or division by 0 in it, or an exp that overflows, and add an eps or clamp its input"

_LOSS_FIX = (
    "look for a log, sqrt or division by 0 in the loss, or an exp that overflows, and add an eps or clamp its input"
)

_GRADIENT_FIX = (
    "look for a sqrt, norm, log or division at 0, whose derivative torch.where doesn't stop; add an eps inside"
)


def find_nonfinite(
    program: Program, reached: int, figures: Mapping[int, float] | None = None, losses: Sequence[float] = ()
) -> NonFiniteError:
    """Returns the error that names the step and the first value in it that isn't finite.

    Args:
        program: restored to the last good State, or new if there is none; it can't be used afterwards.
        reached: the step, counted from 1, by which the value occurred.
        figures: the monitored figure of each finished epoch, by its number from 0, for schedulers that use it.
        losses: the known training losses before that State, in order.
    """
    replay = _Replay(program, reached, figures or {}, list(losses))
    try:
        return replay.run()
    except Exception as error:
        what = str(error) if isinstance(error, HotloopError) else describe_error(error)
        return NonFiniteError(
            f"by step {reached} the loss or a parameter became NaN or infinite; replaying it for the place failed in"
            f" {step_under_way(program.position)}: {what}",
            fix=replay.saved,
        )


@dataclass
class _Replay:
    program: Program
    reached: int
    figures: Mapping[int, float]
    losses: list[float]
    weights: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = self.program.position.step
        self.saved = describe_checkpoint(self.start)
        self.watch = ValueHooks(self.program.model)

    def run(self) -> NonFiniteError:
        program = self.program
        if (name := _bad_parameter(program.model)) is not None:
            return NonFiniteError(
                f"parameter {name!r} holds NaN or infinity before step {self.start + 1}",
                fix="check how the model is initialised",
            )
        self.weights.append(_largest_weight(program.model))
        with self.watch.record():
            self._record_usual_values()
            while program.position.step < self.reached:
                start = program.position
                left = self.reached - start.step
                for batch, _ in islice(program.feed.epoch(start.epoch, start.batch), left):
                    if (error := self._step(batch)) is not None:
                        return error
                if program.position.step < self.reached:
                    program.end_epoch(self.figures.get(start.epoch, math.nan))
        return self._report_finite()

    def _record_usual_values(self) -> None:
        """Records the usual values on a neighbouring batch, in case the first replayed step is the bad one."""
        program, state = self.program, self.program.state()
        place = state.position.batch - 1 if state.position.batch else 1
        if program.parts.splits.order is None or place >= program.parts.splits.order.batches:
            return
        batch, _ = next(iter(program.feed.epoch(state.position.epoch, place)))
        self.watch.begin(batch)
        if math.isfinite(float(program.step(batch))):
            self.watch.end_step()
        program.restore(state)

    def _step(self, batch: Any) -> NonFiniteError | None:
        program, position = self.program, self.program.position
        self.watch.begin(batch)
        loss = float(program.step(batch))
        self.losses.append(loss)
        self.weights.append(_largest_weight(program.model))
        bad_sum = not math.isfinite(program.read_sums()["loss"])
        if math.isfinite(loss) and math.isfinite(self.weights[-1]) and not bad_sum:
            self.watch.end_step()
            return None
        event = self.watch.first(loss_finite=math.isfinite(loss))
        if event is None:
            given, fix = self._explain_loss_or_update(batch, loss)
        elif event.kind == "batch":
            given, fix = self._batch_error(event, position, batch)
        else:
            given, fix = self._model_error(event)
        return NonFiniteError(
            f"{step_under_way(position)}: {given}{self._describe_growth()}", fix=f"{fix}; {self.saved}"
        )

    def _batch_error(self, event: ValueEvent, position: Position, batch: Any) -> tuple[str, str]:
        values = dict(floating_parts(batch))[event.name]
        given, fix = describe_bad_samples(self.program, position, event.name, nonfinite_rows(values))
        return f"{given} {'NaN' if event.state == 'NaN' else 'infinity'} in its {event.name}", fix

    def _model_error(self, event: ValueEvent) -> tuple[str, str]:
        if event.kind == "output":
            return f"{event.name} became {event.state}", self._lower_rate() or _OUTPUT_FIX
        before = self.watch.finite_before(event)
        given = f"{event.name} became {event.state}"
        if before is not None:
            given += f", right after {before.name}, which was finite"
        elif " output " in event.name:
            given += ", from the loss function's derivative"
        return given, self._lower_rate() or _GRADIENT_FIX

    def _explain_loss_or_update(self, batch: Any, loss: float) -> tuple[str, str]:
        """Explains a loss, a loss weight or an update that isn't finite though the model's values are."""
        program = self.program
        task, state = program.parts.task, "NaN" if math.isnan(loss) else "infinite"
        if not math.isfinite(loss):
            known = type(task.loss).__name__ if isinstance(task.loss, nn.Module) else getattr(task.loss, "__name__", "")
            if math.isnan(loss) and (empty := find_empty_mean(program, batch)):
                return f"the loss became {state}: it has {empty}, in this batch", EMPTY_MEAN_FIX
            given = f"the loss itself{f' ({known})' if known else ''} became {state}; all outputs of modules are finite"
            return given, self._lower_rate() or _LOSS_FIX
        if (name := _bad_parameter(program.model)) is None:
            return "the loss is finite but its weight is not", "check what the Task's weight(batch) returns"
        holder = owner_optimizer(program.optimizer, dict(program.model.named_parameters())[name])
        rate = holder.param_groups[0]["lr"]
        return (
            f"the update by {type(holder).__name__} made parameter {name!r} NaN or infinite, from finite gradients",
            f"lower the learning rate (now {float(rate):g}), or raise the optimizer's eps",
        )

    def _describe_growth(self) -> str:
        if (rise := _find_rise(self.losses[:-1])) is not None:
            return f", after the loss had risen from {rise[0]:.4g} to {rise[1]:.4g}"
        if (rise := _find_rise(self.weights[:-1])) is not None:
            return f", after the largest weight had grown from {rise[0]:.4g} to {rise[1]:.4g}"
        return f", with a weight as large as {self.weights[-2]:.4g}" if self.weights[-2] > _LARGE_VALUE else ""

    def _lower_rate(self) -> str:
        if not self._describe_growth():
            return ""
        rate = float(self.program.optimizer.param_groups[0]["lr"])
        clip = "" if self.program.parts.task.clip_norm else " or set clip_norm"
        return f"lower the learning rate (now {rate:g}){clip}"

    def _report_finite(self) -> NonFiniteError:
        roles = self.program.parts.splits
        reason = (
            "a module with a state outside of its buffers, an operator that isn't deterministic, or faulty hardware"
            if roles.is_exact
            else "data with an order of its own, which can't be replayed"
        )
        return NonFiniteError(
            f"by step {self.reached} the loss or a parameter became NaN or infinite, but stayed finite when the steps"
            f" from {self.start + 1} on were replayed, which points to {reason}",
            fix=f"go on with --resume; {self.saved}",
        )


def _find_rise(values: list[float]) -> tuple[float, float] | None:
    """Returns the smallest and the last value if the values grew by `_RISE_RATIO`."""
    low = min((value for value in values if value > 0), default=math.inf)
    return (low, values[-1]) if values and values[-1] > _RISE_RATIO * low else None


def _trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    named = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    return {name: value for name, value in named.items() if value.numel()}


def _largest_weight(model: nn.Module) -> float:
    values = list(_trained_tensors(model).values())
    return float(torch.nn.utils.get_total_norm(values, math.inf)) if values else 0.0


def _bad_parameter(model: nn.Module) -> str | None:
    named = _trained_tensors(model).items()
    return next((name for name, value in named if not bool(torch.isfinite(value).all())), None)


_EVALUATION_FIX = "look for statistics kept for evaluation mode, and for a log, sqrt or division by 0"


def nonfinite_figure_error(
    program: Program, source: Source | None, figure: str, value: float, saved_step: int | None
) -> NonFiniteError:
    """Returns the error for a NaN or infinite monitored figure, while training loss and parameters are finite.

    Args:
        source: the validation data, which a single process evaluates again to find the place; a rank has only its
            share.
        figure: its name, such as `validation_loss`.
    """
    state = "NaN" if math.isnan(value) else "infinite"
    after = f"after epoch {program.position.epoch + 1} the {figure.replace('_', ' ')} is {state}"
    if figure != "validation_loss" or source is None:
        return NonFiniteError(
            f"{after}, so that epochs can't be compared by it",
            fix=f"correct it in the Task, or monitor another figure; {describe_checkpoint(saved_step)}",
        )
    if not program.parts.world.is_single:
        return NonFiniteError(
            after,
            fix="go on with --set parallel=none --set ranks=none, which names the module or the sample;"
            f" {describe_checkpoint(saved_step)}",
        )
    finder = _BatchFinder(program)
    with finder.watch.record():
        evaluate(program, source, finder)
    sums = program.read_sums()
    advice = EMPTY_MEAN_FIX if finder.empty else _EVALUATION_FIX
    return NonFiniteError(
        f"{after} though the training loss is {sums['loss'] / (sums['weight'] or 1):.4g}: {finder.found}",
        fix=f"{advice}; {describe_checkpoint(saved_step)}",
    )


class _BatchFinder:
    def __init__(self, program: Program) -> None:
        self.watch, self._program = ValueHooks(program.model), program
        self.empty = ""
        self.found = "evaluating once more gave finite losses"
        self._done = False
        self._samples = 0

    def __call__(self, batch: Any, samples: int, computed: StepResult | None) -> None:
        finite = computed is None or math.isfinite(float(computed.loss))
        if not finite and not self._done:
            self._done = True
            self.watch.note_batch(batch)
            event = self.watch.first(loss_finite=False)
            undefined = computed is not None and math.isnan(float(computed.loss))
            self.empty = find_empty_mean(self._program, batch) if undefined and not event else ""
            where = f"it has {self.empty}, in a batch" if self.empty else "the loss itself, from finite outputs"
            self.found = self._error(event, batch) if event else where
        elif finite:
            self.watch.end_step()
        self.watch.begin()
        self._samples += samples

    def _error(self, event: ValueEvent, batch: Any) -> str:
        if event.kind == "output":
            return f"{event.name} became {event.state}"
        rows = nonfinite_rows(dict(floating_parts(batch))[event.name])
        return f"sample {self._samples + int(rows[0])} of the validation data has {event.state} in its {event.name}"


EMPTY_MEAN_FIX = (
    "make the loss 0 in such a batch, as by (losses * mask).sum() / mask.sum().clamp(min=1), and give the Task a"
    " weight(batch) that counts its targets"
)
_CROSS_ENTROPIES = ("nll_loss_forward", "nll_loss2d_forward")


def find_empty_mean(program: Program, batch: Any) -> str:
    """Returns the operation in a batch's loss that is a mean over no element; empty if there is none or the loss fails."""
    watch = _DivisionRecorder()
    try:
        with preserve_generators(*program.devices), torch.no_grad(), watch:
            program.parts.task.compute(program.model, to_device(batch, program.device))
    except Exception:
        pass  # the step itself ran before; this pass only searches for a mean over nothing
    return watch.found


class _DivisionRecorder(TorchDispatchMode):
    """Records the last operation that divides by a count of 0."""

    found = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        value = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(value, Tensor) and not value.ndim and value.is_floating_point() and math.isnan(float(value)):
            self.found = self._description(name, args, result) or self.found
        return result

    def _description(self, name: str, args: Any, result: Any) -> str:
        if name in _CROSS_ENTROPIES:
            return "a cross entropy of which all targets are ignored" * (not float(result[1]))
        if name == "div":
            return "a division by a sum that is 0, as of a mask that leaves out all" * (not float(args[1]))
        inputs = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
        return "a mean over no element" * any(value.ndim and not value.numel() for value in inputs)
