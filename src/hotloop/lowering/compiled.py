"""The compile axis: steps that run as one compiled program, on the same tensors as the eager step."""

from __future__ import annotations

import hashlib
import io
import operator
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pooch
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from hotloop.data.tree import batch_length, tensors
from hotloop.errors import PlanError, blame
from hotloop.files import write_atomic
from hotloop.lowering.capture import Captured, capture, hyper_of, step_tensors
from hotloop.lowering.hosted import host
from hotloop.lowering.ingredients import Ingredients
from hotloop.lowering.rewrites import rewrite
from hotloop.lowering.step import EagerStep

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
        self._hyper: dict[str, Tensor] = {}
        self._constants: dict[str, float] = {}
        self._bound: list[Tensor] | None = None
        self._signature: tuple = ()
        self._samples = 0
        self._told = False
        self._seen: list[Any] = []

    def make_ready(self, batch: Any, samples: int) -> None:
        """Compiles the step for batches like this one, after two eager steps.

        Raises:
            PlanError: it can't be captured, compiled or recorded.
        """
        self(batch, samples, 0)  # the optimizer makes its state in its first step
        first = hyper_of(self.optimizer)
        self(batch, samples, 1)
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
        self._hold_constant(varying)
        self._seen = []
        self._hyper = {place: torch.zeros((), dtype=torch.float64) for place in sorted(varying)}
        self._captured = capture(self, batch, batch_length(batch), self._hyper, whole=self.whole)
        self._rewrite(self._captured)
        self._runner = built(self._captured, self.parts.plan.compile, self.parts.device)
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
        self.draws.seed(step)
        if self.whole:
            self._set_hyper()
        self._set_scale()
        with torch.no_grad():
            outputs = self._runner([*self._bound, *tensors(batch)])  # type: ignore[misc]
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

    def _set_hyper(self) -> None:
        """Gives the program what the schedule says now; nothing to do where each setting is the very object that it was."""
        groups = self.optimizer.param_groups
        now = [value for group in groups for key, value in group.items() if key != "params"]
        if len(now) == len(self._seen) and all(map(operator.is_, now, self._seen)):
            return
        for place, value in self._varying().items():
            self._hyper[place].fill_(value)
        self._seen = [] if any(isinstance(value, list) for value in now) else now  # a list may change and stay itself

    def _hold_constant(self, varying: set[str]) -> None:
        """Remembers the optimizer's numbers that no schedule changes."""
        now = hyper_of(self.optimizer)
        self._constants = {place: value for place, value in now.items() if place not in varying}

    def _varying(self) -> dict[str, float]:
        """What the schedule says now, by place.

        Raises:
            PlanError: it has changed what the program holds fixed.
        """
        now = hyper_of(self.optimizer)
        varying = {place: now.pop(place) for place in self._hyper}
        if now != self._constants:
            place = next(place for place in now if now[place] != self._constants.get(place))
            raise PlanError(
                f"the optimizer's {place} has changed to {now[place]}, which the compiled step holds fixed",
                expected="a schedule that changes the same numbers from its first steps on",
                fix="choose compile=forward" if self.parts.plan.graphs == "none" else "choose graphs=none",
            )
        return varying

    def _set_scale(self) -> None:
        """Gives the program what fp16's loss is scaled by now."""
        if self.scaler is not None and self.scale is not None:
            self.scale.copy_(self.scaler.scale(torch.ones_like(self.scale)))

    def _is_bound(self) -> bool:
        """Finds the tensors that the program works on; False while the optimizer's state is not complete."""
        if self._bound is None:
            assert self._captured is not None
            values = step_tensors(self, self._hyper, whole=self.whole)
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


def built(captured: Captured, how: str, device: torch.device) -> Runner:
    """The captured step as one compiled program, which takes what its graph takes.

    Raises:
        PlanError: it can't be compiled.
    """
    if device.type != "cpu":
        return _compiled(captured, how, device)
    hosted, numbers = host(captured)
    run = _compiled(hosted, how, device)
    return run if numbers is None else lambda flat: run([*flat, numbers(flat)])


def _compiled(captured: Captured, how: str, device: torch.device) -> Runner:
    options = _OPTIONS | _known_to_compilers()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own parts to each other
            return (_packaged if how == "package" else _called)(captured, device, options)
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


def _called(captured: Captured, device: torch.device, options: dict[str, Any]) -> Runner:
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        compiled: Any = compile_fx(captured.graph, captured.examples, config_patches=options)
    return lambda flat: compiled(*flat)


def _packaged(captured: Captured, device: torch.device, options: dict[str, Any]) -> Runner:
    """A package of the step, made once and kept in the user's cache folder; loading it takes milliseconds."""
    from torch._inductor.package import load_package, package_aoti

    path = Path(pooch.os_cache("hotloop")) / "packages" / f"{_key(captured, device)}.pt2"
    if not path.is_file():
        with redirect_stdout(io.StringIO()):
            files: Any = torch._inductor.aot_compile(
                captured.graph, tuple(captured.examples), options={**options, "aot_inductor.package": True}
            )
            archive = io.BytesIO()
            package_aoti(archive, files)
        write_atomic(path, archive.getvalue())
    return load_package(str(path)).loader.run


def _key(captured: Captured, device: torch.device) -> str:
    """What a package depends on: the graph with its constants, its inputs, the compiler, the processor, the threads."""
    inputs = [(tuple(value.shape), str(value.dtype), value.stride()) for value in captured.examples]
    constants = [
        getattr(captured.graph, str(node.target)) for node in captured.graph.graph.nodes if node.op == "get_attr"
    ]
    baked = [hashlib.sha256(repr(value.tolist()).encode()).hexdigest() for value in constants]
    threads, kernels = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    known = (captured.graph.code, baked, inputs, torch.__version__, kernels, threads, str(device))
    return hashlib.sha256(repr(known).encode()).hexdigest()
