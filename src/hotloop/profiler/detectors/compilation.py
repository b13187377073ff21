"""Compiling as a remedy, if a measurement supports it; otherwise a line that names the measurement to make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotloop.core.records.profile import Remedy
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.detectors.parameter_loops import hook_lines
from hotloop.profiler.detectors.step import COMPUTING_PHASES, ProfiledStep, heaviest, is_product, percent

_COMPILED_PHASES: tuple[Phase, ...] = ("forward", "backward")

_GENERATED_KERNELS = ("cpp_fused", "triton_")  # name prefixes of the kernels that torch's compiler generates

MANY_SMALL_OPERATIONS = "operations are started one by one from Python"
"""The cause that is reported for a step of many small operations."""

_COMPILED_CALL_MS = 0.1
"""Overhead of a compiled call, forward and backward: a linear layer and ReLU took 0.146 ms, eagerly 0.047 ms."""

_RECURRENT_OPS = ("aten::gru", "aten::lstm", "aten::rnn_tanh", "aten::rnn_relu")
"""Recurrent operators, which iterate over time steps internally. torch.compile calls them unchanged."""


def _recurrent_layers(step: ProfiledStep) -> set[tuple[str, str]]:
    """Returns (module, line) of the recurrent layers; their backward has the same module and line."""
    return {(one.module, one.where) for one in step.operators(lambda one: one.outer in _RECURRENT_OPS)}


def compile_candidates(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields compiling, with an estimated gain, if calls of single operations cost much and no part is compiled.

    For a script the remedy compiles the model alone, without loss and update. Python still starts each product.
    """
    if step.profile.apart.compile_s or step.operators(lambda one: one.name.startswith(_GENERATED_KERNELS)):
        return
    hooks = hook_lines(step)  # the compiler excludes hooks
    layers = set() if step.profile.plan else _recurrent_layers(step)  # a Task's step compiles their parts
    operators = step.operators(
        lambda one: one.phase in COMPUTING_PHASES and one.where not in hooks and (one.module, one.where) not in layers
    )
    compiled = [one for one in operators if one.phase in _COMPILED_PHASES]
    joinable = operators if step.profile.plan else [one for one in compiled if not is_product(one)]
    calls = sum(one.calls for one in joinable)
    won = sum(one.calls * min(step.launch_ms, step.cost_ms(one) / max(one.calls, 1e-9)) for one in joinable)
    if not step.profile.plan:  # Python still starts at least one kernel between two products
        won -= _COMPILED_CALL_MS + step.launch_ms * sum(one.calls for one in compiled if is_product(one) and one.flops)
    if not calls:
        return
    yield Remedy(
        cause=MANY_SMALL_OPERATIONS,
        where=heaviest(operators, step) or step.profile.step_where,
        remedy="compile the step" if step.profile.plan else "compile the model: torch.compile(model)",
        gain=step.share(won),
        evidence=f"{calls:.0f} operations in a step of {step.ms:.2f} ms that compiling could join, each "
        f"{1e3 * step.launch_ms:.1f} us to start here",
        axes={"compile": "step"} if step.on_cpu else {"compile": "step", "graphs": "step"},
    )


def compile_race_result(step: ProfiledStep) -> tuple[list[Remedy], list[str]]:
    """Returns compiling as a remedy if the compiled network won its race, and otherwise the line on the race."""
    race = step.profile.compiled
    if race is None:
        return [], []
    if race.ratio is None or race.low is None or race.high is None:
        return [], [f"The gain of compiling was not measured: {race.failure or 'too few pairs of windows'}."]
    found = f"{race.ratio:.2f} times as fast ({race.low:.2f} to {race.high:.2f})"
    what = f"the forward and backward of {race.network}, compiled and as they are in turn, on the inputs of a step"
    if not race.is_faster:
        return [], [f"Compiling is no remedy here. Measured: {what}. Compiled, they are {found}."]
    won = Remedy(
        cause=MANY_SMALL_OPERATIONS,
        where=heaviest(step.operators(lambda one: one.phase in _COMPILED_PHASES), step) or step.profile.step_where,
        remedy="compile the model: torch.compile(model)",
        gain=step.share(step.phase(*_COMPILED_PHASES)) * (1 - 1 / race.ratio),
        evidence=f"measured: {what}; compiled, they are {found}, after {race.compile_s or 0.0:.0f} s of compiling",
        won=(race.ratio, race.low, race.high),
    )
    return [won], []


def missing_measurements(step: ProfiledStep, found: Sequence[Remedy]) -> Iterator[str]:
    """Yields lines that name a missing measurement and the command that makes it."""
    is_task = bool(step.profile.plan)
    for one in found[:1]:
        how = "--try measures it, and hotloop tune finds the fastest plan" if is_task else "--try measures it"
        yield f"Starting operations one by one takes up to {percent(one.gain)} of the step. Gain of compiling: {how}."
    if is_task and not found:
        yield "No other plan was tried: one such as compile=package may win. Run hotloop tune."
