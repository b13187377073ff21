"""The compile axis: steps that run as one compiled program, on the same tensors as the eager step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from hotloop.data.tree import batch_length, tensors
from hotloop.errors import PlanError, blame
from hotloop.lowering.capture import Captured, capture, step_tensors
from hotloop.lowering.hosted import host
from hotloop.lowering.hyper import Hyper, hyper_of
from hotloop.lowering.indices import Indices
from hotloop.lowering.ingredients import Ingredients
from hotloop.lowering.packages import packaged
from hotloop.lowering.rewrites import rewrite
from hotloop.lowering.step import EagerStep
from hotloop.lowering.threads import embeddings_in_parallel

Runner = Callable[[list[Tensor]], Any]

_OPTIONS = {"fallback_random": True}
"""Draws come from torch's generators, as in the eager step, and not from the compiler's own."""


class CompiledStep(EagerStep):
    """One training step as a compiled program, for batches like the one that it was prepared with.

    Other batches, such as an incomplete last one, and steps before the optimizer has all its state, run eagerly on the
    same tensors: the program only reads and changes what the eager step does.
    """

    def __init__(self, parts: Ingredients) -> None:
        super().__init__(parts)
        self.whole = parts.plan.compile != "forward"
        self._runner: Runner | None = None
        self._captured: Captured | None = None
        self._hyper = Hyper(self.optimizer, {})
        self._indices: Indices | None = None
        self._bound: list[Tensor] | None = None
        self._signature: tuple = ()
        self._samples = 0
        self._told = False
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
        self._hyper = Hyper(self.optimizer, cells, fix="choose compile=forward")
        self._captured = capture(self, batch, batch_length(batch), cells, whole=self.whole)
        if self.parts.device.type == "cpu":
            self._indices = Indices(self._captured, len(signature(batch)))
        self._rewrite(self._captured)
        self._runner = built(self._captured, self.parts)
        self._signature, self._samples = signature(batch), batch_length(batch)

    def _rewrite(self, captured: Captured) -> None:
        which = self.parts.plan.rewrites
        if which != "none":
            found = rewrite(captured.graph, which)
            self.parts.say(
                "rewrote the step: " + ", ".join(f"{name} {count}" for name, count in found.items() if count)
            )

    def rebind(self) -> None:
        """Notes that tensors of the optimizer's state were replaced."""
        self._bound = None

    def run_eagerly(self) -> None:
        """From now on, operation by operation, so that hooks of modules see what happens."""
        self._runner = None

    def __call__(self, batch: Any, samples: int, step: int) -> Tensor:
        """Runs step number `step`; returns the loss, 0-dim, on the device."""
        if self._runner is None or signature(batch) != self._signature or not self._is_bound():
            return self._run_eagerly(batch, samples, step)
        flat = [*self._bound, *tensors(batch)]  # type: ignore[misc]
        if self._indices is not None and not self._indices.within(flat):
            return self._run_eagerly(batch, samples, step)  # it says what is wrong
        self.draws.seed(step)
        if self.whole:
            self._hyper.fill()
        self._set_scale()
        try:
            with torch.no_grad():
                outputs = self._runner(flat)
        except Exception:
            self._backward(batch, samples, step)  # which says better what is wrong, if something is with the batch
            raise
        self.ran += 1
        loss, scalars = self._finish(list(outputs))
        self._add(loss, scalars, self.parts.weigh(batch, samples))
        self.sums["samples"] += samples
        return loss

    def _run_eagerly(self, batch: Any, samples: int, step: int) -> Tensor:
        self._bound = None  # an eager step may replace tensors of the optimizer's state
        self._tell(batch, samples)
        return EagerStep.__call__(self, batch, samples, step)

    def _tell(self, batch: Any, samples: int) -> None:
        """Says, once, that a batch is not like the one that the program was made for."""
        if self._told or self._runner is None or signature(batch) == self._signature:
            return
        self._told = True
        other = f"of {samples} instead of {self._samples} samples"
        if samples == self._samples:
            other = "of other shapes, dtypes or strides than the first"
        self.parts.say(f"a batch {other}: steps on such batches run eagerly")

    def _finish(self, outputs: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and scalars; with gradients, the update too."""
        assert self._captured is not None
        loss, names = outputs[0], self._captured.scalars
        scalars = dict(zip(names, outputs[1 : 1 + len(names)], strict=True))
        if not self.whole:
            self._clear_gradients()
            for name, value in zip(self._captured.gradients, outputs[1 + len(names) :], strict=True):
                self.parts.model.get_parameter(name).grad = value
            self._clip_unscaled()
            self._update()
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
            assert self._captured is not None
            values = step_tensors(self, self._hyper.cells, whole=self.whole)
            found = pytree.tree_leaves(values)
            expected = self._captured.examples[: len(found)]
            count = len(self._captured.examples) - len(self._signature)
            if len(found) != count or any(not alike(a, b) for a, b in zip(found, expected, strict=True)):
                return False
            self._bound = found
        return True


def signature(batch: Any) -> tuple:
    """Shapes, dtypes and strides of a batch: a compiled program checks none of them itself."""
    return tuple([(value.shape, value.dtype, value.stride(), value.device) for value in tensors(batch)])


def alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()


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
        with warnings.catch_warnings(), embeddings_in_parallel(parts.device):
            warnings.simplefilter("ignore")  # of torch's own parts to each other
            if parts.plan.compile == "package":
                return packaged(captured, parts.device, options, parts.say)
            return _called(captured, options)
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


def _called(captured: Captured, options: dict[str, Any]) -> Runner:
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        compiled: Any = compile_fx(captured.graph, captured.examples, config_patches=options)
    return lambda flat: compiled(*flat)
