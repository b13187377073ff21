"""Rules that exclude plans with a compiled, rewritten or recorded step."""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.core.feasibility.forecast import FeasibilityInput, Rule, Violation

# --- compile


def _check_compiler(case: FeasibilityInput) -> Iterator[Violation]:
    if case.plan.compile != "none" and case.device.kind == "cpu" and case.hardware.compiler is None:
        reason = "compiling for the CPU needs a C++ compiler, and there is none"
        yield Violation(("compile",), reason, f"{case.hardware.compiler_remedy}, or use compile=none")


def _check_compiled_step(case: FeasibilityInput) -> Iterator[Violation]:
    plan, facts = case.plan, case.facts
    if plan.compile == "none":
        return
    fix = "use compile=none"
    if facts.closure:
        yield Violation(("compile",), f"{facts.optimizer} calls the loss itself, any number of times", fix)
    if plan.compile == "package" and case.device.kind != "cpu":
        reason = "a package is made for the CPU: packages for other devices are untested"
        yield Violation(("compile", "device"), reason, "use compile=step")
    if plan.precision == "fp16" and plan.compile != "forward":
        reason = "fp16 skips a step whose gradients overflow, and that decision is outside of the compiled step"
        yield Violation(("compile", "precision"), reason, "use compile=forward, or precision=bf16")


_KIND_NAMES = {"cpu": "the CPU", "cuda": "CUDA devices"}

_REWRITES_BY_DEVICE = {"mm_by_onednn": "cpu", "draw_by_words": "cpu", "mm_as_sum": "cuda", "mm_in_parts": "cuda"}
"""Rewrites that exist for one kind of device."""


def _check_rewrites(case: FeasibilityInput) -> Iterator[Violation]:
    plan = case.plan
    if plan.rewrites == "none":
        return
    if plan.compile == "none":
        reason = "only a captured step can be rewritten"
        yield Violation(("rewrites", "compile"), reason, "use compile=step, or rewrites=none")
    if plan.rewrites in _REWRITES_BY_DEVICE and case.device.kind != (kind := _REWRITES_BY_DEVICE[plan.rewrites]):
        yield Violation(("rewrites", "device"), f"{plan.rewrites} is for {_KIND_NAMES[kind]}", "use rewrites=none")
    elif case.device.kind not in _KIND_NAMES:
        reason = "rewrites are measured on CPUs and CUDA devices alone"
        yield Violation(("rewrites", "device"), reason, "use rewrites=none")
    if plan.rewrites == "conv_in_pool" and not case.facts.convolutions:
        yield Violation(("rewrites",), "the model has no convolution", "use rewrites=none")
    if plan.rewrites == "draw_by_words" and plan.accumulation > 1:
        reason = "a proof replays the random numbers of whole batches, and with accumulation each piece draws its own"
        yield Violation(("rewrites", "accumulation"), reason, "use accumulation=1, or rewrites=none")


# --- graphs


def _check_cuda_graphs(case: FeasibilityInput) -> Iterator[Violation]:
    plan, facts = case.plan, case.facts
    if plan.graphs == "none":
        return
    fix = "use graphs=none"
    if case.device.kind != "cuda":
        yield Violation(("graphs", "device"), f"graphs are for CUDA devices, not for {case.device.name}", fix)
    if plan.graphs != "step" and plan.residency != "device":
        reason = "several steps in one replay cut their batches on the device, so the data must be stored there"
        yield Violation(("graphs", "residency"), reason, "use residency=device, or graphs=step")
    if plan.compile == "forward":
        reason = "a graph contains the whole step, and compile=forward leaves the update out"
        yield Violation(("graphs", "compile"), reason, "use compile=step, or compile=none")
    if plan.compile == "package":
        yield Violation(
            ("graphs", "compile"), "a package is for the CPU, and graphs are for CUDA devices", "use compile=step"
        )
    if plan.precision == "fp16":
        reason = "fp16 skips a step whose gradients overflow, and the host decides which"
        yield Violation(("graphs", "precision"), reason, "use precision=bf16, or graphs=none")
    if facts.closure:
        yield Violation(("graphs",), f"{facts.optimizer} calls the loss itself, any number of times", fix)


CAPTURE_RULES: tuple[Rule, ...] = (_check_compiler, _check_compiled_step, _check_rewrites, _check_cuda_graphs)
