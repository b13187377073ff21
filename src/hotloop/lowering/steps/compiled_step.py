"""The compile axis: steps that run as one compiled program, on the same tensors as the eager step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from hotloop.core.reporter import unlogged
from hotloop.data.batch_tree import batch_length, tensors
from hotloop.errors import PlanError, blame
from hotloop.lowering.compile.capture import Capture, Captured, Update, apart
from hotloop.lowering.compile.compiled_rng import draws_nothing
from hotloop.lowering.compile.host_scalars import host
from hotloop.lowering.compile.inductor_patches import ready_to_compile
from hotloop.lowering.compile.inputs import Hyper, Moved, by_place, hyper_of, misfit, step_tensors
from hotloop.lowering.compile.package_cache import captured_surely, packaged
from hotloop.lowering.compile.runtime_checks import Again, Indices
from hotloop.lowering.context import Ingredients
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.rewrites import rewrite
from hotloop.lowering.rewrites.dropout_from_words import ByWords

Runner = Callable[[list[Tensor]], Any]
_Uncounted = tuple[Tensor, Any, int]
"""A loss, what it counts, and its samples."""

_AT_ONCE, _SMALL = 256, 64
"""Losses that are added up together, so that no more are held; and bytes of memory that each may keep."""

_OPTIONS = {"fallback_random": True}
"""Draws come from torch's generators, as in the eager step, and not from the compiler's own."""

_EAGER_STEPS = 2
"""That a step is made ready with: the optimizer has all its state after them."""


class CompiledStep(EagerStep):
    """One training step as a compiled program, for batches like the one that it was prepared with.

    Other batches, such as an incomplete last one, steps before the optimizer has all its state, and those for which a
    schedule has moved a number that the program holds fixed, run eagerly on the same tensors: the program only reads and
    changes what the eager step does. A whole step keeps its gradients to itself: parameters have none after it.
    """

    def __init__(self, parts: Ingredients) -> None:
        super().__init__(parts)
        self.whole = parts.plan.compile != "forward"
        self._runner: Runner | None = None
        self._captured: Captured | None = None
        self._hyper = Hyper(self.optimizer, {})
        self._indices: Indices | None = None
        self._bound: list[Tensor] | None = None  # parameters first
        self._expected: dict[str, Tensor] = {}  # by place, like those that the program works on
        self._eager_steps = 0  # since the State was another
        self._again: Again | None = None
        self._held = list(parts.model.parameters())
        self._signature: Any = ()
        self._given = self._samples = 0
        self._may_draw = True
        self._told: set[str] = set()
        self.ran: int = 0

    def make_ready(self, batch: Any, samples: int) -> None:
        """Compiles the step for batches like this one, after two eager steps.

        Raises:
            PlanError: it can't be captured, compiled or recorded.
        """
        self(batch, samples, 0)  # the optimizer makes its state in its first step
        first = hyper_of(self.optimizer)
        self(batch, samples, 1)
        self.end_epoch(0.0)  # a schedule by epochs moves now; whoever prepares a Program puts its State back
        later = hyper_of(self.optimizer)
        if self.whole:
            self._drop_gradients()
        self.prepare(batch, {place for place in later if later[place] != first[place] or place.endswith("/lr")})

    def prepare(self, batch: Any, varying: set[str]) -> None:
        """Captures and compiles; the eager step must have run once, so that the optimizer's state is there.

        Args:
            batch: on the device, like those to come.
            varying: places of the optimizer's numbers that a schedule changes.

        Raises:
            PlanError: the step can't be captured or compiled.
        """
        cells = {place: torch.zeros((), dtype=torch.float64) for place in sorted(varying)}
        self._hyper = Hyper(self.optimizer, cells)
        self._given = len(list(tensors(batch)))
        self._captured = self._capture(batch, cells)
        if self.parts.device.type == "cpu":
            self._indices = Indices(self._captured, self._given)
        self._may_draw = not (self.whole and self._alone and draws_nothing(self._captured.graph))
        self._rewrite(self._captured)
        self._runner = built(self._captured, self.parts)
        self._signature, self._samples = signature(batch), batch_length(batch)

    def _capture(self, batch: Any, cells: dict[str, Tensor], update: Update = "singly") -> Captured:
        capture = Capture(self, batch_length(batch), cells, whole=self.whole, update=update)
        kept = self.parts.plan.compile == "package"
        captured = captured_surely(capture, batch, self.parts) if kept else capture.twice(batch)
        names = by_place(step_tensors(self, cells, whole=self.whole))
        self._expected = dict(zip(names, captured.examples, strict=False))  # behind them are those of the batch
        self._again, self.look_s = Again(captured, capture.once), capture.once_s
        return captured

    def _rewrite(self, captured: Captured) -> None:
        which, in_pieces = self.parts.plan.rewrites, self.parts.plan.accumulation > 1
        if which != "none":
            but = ("draw_by_words",) if in_pieces else ()
            found = rewrite(captured.graph, which, but, self.parts.device.type)
            self.draws_by_words = bool(found.get("draw_by_words"))
            times = ", ".join(f"{name} {count}" for name, count in found.items() if count)
            self._tell("rewrote", f"rewrote the step: {times}")

    @property
    def graph(self) -> GraphModule | None:
        """What was captured and rewritten of it."""
        return None if self._captured is None else self._captured.graph

    @property
    def _alone(self) -> bool:
        """Whether no function of the Task's runs beside the program, which might draw."""
        return self.schedule is None and self.parts.task.weight is None

    def rebind(self) -> None:
        """Notes that tensors of the optimizer's state were replaced."""
        self._bound, self._eager_steps = None, 0

    def unbind(self) -> None:
        """Has the next step find its tensors, which callbacks may have replaced.

        Raises:
            TaskError: the model has other parameters than the optimizer.
        """
        super().unbind()
        self._check_ownership()
        self._bound = None

    def look_again(self) -> None:
        """Looks before the next batch that it was compiled for whether the step still does the same."""
        if self._again is not None:
            self._again.due = True

    def _is_another(self, batch: Any) -> bool:
        """Whether the step does something else than what was compiled; looks where that is due."""
        if self._again is None or not self._again.differs(batch):
            return False
        self._tell(
            "another",
            "a callback changes what the step does, which was compiled before: from here on steps run eagerly",
        )
        self.run_eagerly()
        return True

    def run_eagerly(self) -> None:
        """From now on, operation by operation, so that hooks of modules see what happens."""
        self._runner = None

    def run(self, batches: Iterator[tuple[Any, int]], step: int) -> Iterator[tuple[int, int]]:
        """Runs a step on each batch, from step number `step` on; yields (steps, samples) as they are done.

        Looking at everything before a program, and adding up after it, takes several times as long between two programs,
        which leave little else in a processor's caches, as in one go: where nothing can change, it is done once for all.
        """
        uncounted: list[_Uncounted] = []
        last: Tensor | None = None  # the loss of a compiled step, before it was asked whether its like may follow
        asked = steady = False
        try:
            for batch, samples in batches:
                if last is not None:
                    asked, steady, last = True, self._is_steady(last), None
                if steady and samples == self._samples:
                    loss = self._run_unseen(batch, samples, step)
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
        """Whether steps like the last one, whose loss this is, will find all as it did: batches are rows of arrays that
        nobody treats, no function of the user's runs, and losses have memory of their own."""
        alone = self.parts.task.weight is None and (self.schedule is None or not self._each_step)
        runs = self.whole and self._runner is not None and self._bound is not None and self.scaler is None
        if not (alone and runs) or self.cut_from is None or self._captured is None or self._captured.scalars:
            return False
        within = self._indices is None or self._indices.within_all(list(tensors(self.cut_from)))
        return within and self._is_apart(loss)

    def _is_apart(self, loss: Tensor) -> bool:
        """Whether a loss lies in memory that no later step changes, and keeps nothing else there."""
        own = loss.untyped_storage().nbytes() <= _SMALL
        return own and _memory(loss) not in map(_memory, self._bound or ())

    def _run_unseen(self, batch: Any, samples: int, step: int) -> Tensor:
        """Runs the program on a batch that is surely like the last one; returns the loss, which isn't counted yet."""
        return self._called(batch, [*self._bound, *tensors(batch)], samples, step)[0]  # type: ignore[misc]

    def _count(self, losses: list[_Uncounted]) -> None:
        """Adds up losses, each with what it counts and its samples, and forgets them."""
        for loss, weight, samples in losses:
            self._add(loss, {}, weight)
            self.sums["samples"] += samples
        losses.clear()

    def __call__(self, batch: Any, samples: int, step: int) -> Tensor:
        """Runs step number `step`; returns the loss, 0-dim, on the device."""
        if self._runner is None or signature(batch) != self._signature or not self._knows_numbers():
            return self._run_eagerly(batch, samples, step)
        if not self._is_bound() or self._is_another(batch):
            return self._run_eagerly(batch, samples, step)
        flat = [*self._bound, *tensors(batch)]  # type: ignore[misc]
        if self._indices is not None and not self._indices.within(flat):
            return self._run_eagerly(batch, samples, step)  # it says what is wrong
        self._set_scale()
        outputs = self._called(batch, flat, samples, step)
        loss, scalars = self._finish(list(outputs))
        self._add(loss, scalars, self.parts.weigh(batch, samples))
        self.sums["samples"] += samples
        self.draws.note()
        return loss

    def _called(self, batch: Any, flat: list[Tensor], samples: int, step: int) -> Any:
        """What the program returns as step number `step` for its tensors, those of the batch among them."""
        if self._may_draw or self.draws.always or not self.draws.spare:
            self.draws.seed(step)
        grows = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)  # `no_grad` takes 6 us between two programs
            outputs = self._runner(flat)  # type: ignore[misc]
            self.ran += 1
            return outputs
        except Exception:
            torch._C._set_grad_enabled(True)
            self._backward(batch, samples, step)  # which says better what is wrong, if something is with the batch
            raise
        finally:
            torch._C._set_grad_enabled(grows)

    def _run_eagerly(self, batch: Any, samples: int, step: int) -> Tensor:
        self._bound = None  # an eager step may replace tensors of the optimizer's state
        self._eager_steps += 1
        if self._runner is not None and signature(batch) != self._signature:
            other = f"of {samples} instead of {self._samples} samples"
            if samples == self._samples:
                other = "of other keys, shapes, dtypes or strides than the first"
            self._tell("batch", f"a batch {other}: steps on such batches run eagerly")
        with ByWords() if self.draws_by_words else nullcontext():
            return EagerStep.__call__(self, batch, samples, step)

    def _tell(self, what: str, line: str) -> None:
        """Says a line, once of each `what`, such as why a step runs eagerly."""
        if what not in self._told:
            self._told.add(what)
            self.parts.say(line)

    def _knows_numbers(self) -> bool:
        """Gives the program the optimizer's numbers; False where a schedule has moved one that the program holds fixed."""
        try:
            if self.whole:
                self._hyper.fill()
        except Moved as moved:
            self._tell_of(moved)
            return False
        return True

    def _tell_of(self, moved: Moved) -> None:
        self._tell("number", f"{moved}: while that is so, steps run eagerly")

    def _finish(self, outputs: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and scalars; with gradients, the update too."""
        assert self._captured is not None
        loss, names = outputs[0], self._captured.scalars
        scalars = dict(zip(names, outputs[1 : 1 + len(names)], strict=True))
        if not self.whole:
            self._clear_gradients()
            gradients = apart(outputs[1 + len(names) :], Tensor.data_ptr)  # a compiler may make one of equal ones
            for name, value in zip(self._captured.gradients, gradients, strict=True):
                self.parts.model.get_parameter(name).grad = value
            self._clip_unscaled()
            self._update()
            if any(
                one.data_ptr() != other.data_ptr() for one, other in zip(self._bound or (), self._held, strict=False)
            ):
                self._bound = None  # by `parameter.data = ...`
        self.step_schedule()
        if not self.whole and self.average:
            self.update_average(list(self.average.values()), self._averaged)
        return loss, scalars

    def _set_scale(self) -> None:
        """Gives the program what fp16's loss is scaled by now."""
        if self.scaler is not None and self.scale is not None:
            self.scale.copy_(self.scaler.scale(torch.ones_like(self.scale)))

    def _is_bound(self) -> bool:
        """Finds the tensors that the program works on; False while the optimizer's state is not complete."""
        if self._bound is None:
            found = by_place(step_tensors(self, self._hyper.cells, whole=self.whole))
            if not self._fits(found):
                return False
            self._bind([found[place] for place in self._expected])
        return True

    def _fits(self, found: dict[str, Tensor]) -> bool:
        """Whether these are the tensors that the program is for; says why not, unless eager steps may still make them."""
        why = misfit(found, self._expected)
        if why is not None and self._eager_steps >= _EAGER_STEPS:
            self._tell("tensors", f"{why}: while that is so, steps run eagerly")
        return why is None

    def _bind(self, found: list[Tensor]) -> None:
        """From now on the program works on these, and what an eager step left of gradients is memory that nobody needs."""
        self._bound = found
        if self.whole:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        for value in self._filled:
            value.grad = None


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def signature(batch: Any) -> Any:
    """What a compiled program holds fixed of a batch, and checks nowhere itself, in about 1 us for each tensor.

    That is the kinds of containers, their keys, and the shapes, dtypes, strides and devices of tensors. Of other leaves,
    with which no batch is captured, it is their kind.
    """
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype, batch.stride(), batch.device
    if isinstance(batch, tuple | list):
        return type(batch), *[signature(item) for item in batch]
    if isinstance(batch, Mapping):
        return type(batch), *batch, *[signature(item) for item in batch.values()]
    return type(batch)


def built(captured: Captured, parts: Ingredients) -> Runner:
    """The captured step as one compiled program, which takes what its graph takes.

    Raises:
        PlanError: it can't be compiled.
    """
    if parts.device.type != "cpu":
        return _compiled(captured, parts)
    hosted, numbers = host(captured)
    run = _compiled(hosted, parts)
    return run if numbers is None else lambda flat: run([*flat, numbers(flat)])


def _compiled(captured: Captured, parts: Ingredients) -> Runner:
    options = _OPTIONS | _known_to_compilers()
    try:
        with warnings.catch_warnings(), unlogged("torch"):
            warnings.simplefilter("ignore")  # of torch's own parts to each other
            if parts.plan.compile == "package":
                return packaged(captured, parts.device, options, parts.say)
            return _compiled_now(captured, parts.device, options)
    except Exception as error:
        raise PlanError(
            f"the captured step can't be compiled: {blame(error)}",
            expected="a compiler that takes it",
            fix="choose compile=none",
        ) from error


def _known_to_compilers() -> dict[str, Any]:
    """Spares torch a trial of 5 s: each compiler that takes its headers knows AVX2 and AVX-512, but perhaps not AMX."""
    plain = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and not torch.cpu._is_amx_tile_supported()
    return {"cpp.vec_isa_ok": True} if plain else {}


def _compiled_now(captured: Captured, device: torch.device, options: dict[str, Any]) -> Runner:
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad(), ready_to_compile(device):
        compiled: Any = compile_fx(captured.graph, captured.examples, config_patches=options)
    return lambda flat: compiled(*flat)
