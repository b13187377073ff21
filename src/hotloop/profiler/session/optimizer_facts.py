"""Puts into the facts of a watch what its parts have seen so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotloop.core.float32_switches import read_switches
from hotloop.profiler.autograd.evaluation_pauses import EvaluationPauses
from hotloop.profiler.autograd.patterns import AutogradPatterns
from hotloop.profiler.autograd.probes import find_identities
from hotloop.profiler.base.step_facts import ProfileFacts
from hotloop.profiler.hooks.dataloaders import LoaderRecorder
from hotloop.profiler.hooks.forward_calls import CallInputs
from hotloop.profiler.hooks.optimizer_hooks import OptimizerRecorder
from hotloop.profiler.hooks.resources import compile_seconds, memory_in_use
from hotloop.profiler.session.step_sequence import StepSequence


def gather_facts(
    course: StepSequence,
    loaders: LoaderRecorder,
    optimizers: OptimizerRecorder,
    graphs: AutogradPatterns,
    pauses: EvaluationPauses,
    *,
    wait: bool = False,
) -> ProfileFacts:
    """All facts so far; with `wait`, of steps too that the device hasn't done yet."""
    facts = course.facts
    course.count_light_steps()
    course.read_device_steps(wait=wait)
    facts.loaders, facts.optimizers = loaders.records(), optimizers.records(course.n_measured())
    facts.seldom = course.rare_updates.records(optimizers)
    facts.samples_per_step = loaders.samples_per_step()
    apart = pauses.records(facts.steps, course.rare_updates.steps)  # of all steps, while graphs are those of a few
    known = {habit["what"] for habit in apart}
    facts.habits = [habit for habit in graphs.records() if habit["what"] not in known] + apart
    facts.one_batch = graphs.has_one_batch
    for observer in reversed(list(course.observers)):  # what operators say of the phases, lines go by
        for field, values in observer.records().items():
            setattr(facts, field, values)
    facts.identities = find_identities(facts.operators)
    facts.threads, facts.peak_memory_bytes = course.cores.record(), memory_in_use(facts.device, peak=True)
    facts.switches = read_switches()
    facts.compile_s, facts.versions = compile_seconds(), {"torch": torch.__version__}
    return facts


def note_batch(facts: ProfileFacts, loaders: LoaderRecorder, called: CallInputs) -> None:
    """The first that a network is given is taken for the batch."""
    if not facts.batch:
        facts.batch, loaders.rows = called.shapes, called.rows


def amend_batch(facts: ProfileFacts, loaders: LoaderRecorder, trained: Sequence[CallInputs]) -> None:
    """The batch is one of those that a backward came back to, once these are known."""
    if trained and facts.batch not in [one.shapes for one in trained]:
        facts.batch = trained[0].shapes
        loaders.rows = trained[0].rows if loaders.rows is not None else None
