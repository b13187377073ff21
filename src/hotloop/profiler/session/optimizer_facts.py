"""Gathers the facts of a session from its recorders."""

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
    sequence: StepSequence,
    loaders: LoaderRecorder,
    optimizers: OptimizerRecorder,
    graphs: AutogradPatterns,
    pauses: EvaluationPauses,
    *,
    wait: bool = False,
) -> ProfileFacts:
    """Returns all facts so far; `wait` includes steps that the device has not finished."""
    facts = sequence.facts
    sequence.count_light_steps()
    sequence.read_device_steps(wait=wait)
    facts.loaders, facts.optimizers = loaders.records(), optimizers.records(sequence.n_measured())
    facts.seldom = sequence.rare_updates.records(optimizers)
    facts.samples_per_step = loaders.samples_per_step()
    apart = pauses.records(facts.steps, sequence.rare_updates.steps)  # of all steps; graphs are of a few
    known = {habit["what"] for habit in apart}
    facts.habits = [habit for habit in graphs.records() if habit["what"] not in known] + apart
    facts.one_batch = graphs.has_one_batch
    for observer in reversed(list(sequence.observers)):  # operators first: lines need their phases
        for field, values in observer.records().items():
            setattr(facts, field, values)
    facts.identities = find_identities(facts.operators)
    facts.threads, facts.peak_memory_bytes = sequence.cores.record(), memory_in_use(facts.device, peak=True)
    facts.switches = read_switches()
    facts.compile_s, facts.versions = compile_seconds(), {"torch": torch.__version__}
    return facts


def note_batch(facts: ProfileFacts, loaders: LoaderRecorder, called: CallInputs) -> None:
    """The first input of a network counts as the batch."""
    if not facts.batch:
        facts.batch, loaders.rows = called.shapes, called.rows


def amend_batch(facts: ProfileFacts, loaders: LoaderRecorder, trained: Sequence[CallInputs]) -> None:
    """Once the inputs that a backward reached are known, one of them is the batch."""
    if trained and facts.batch not in [inputs.shapes for inputs in trained]:
        facts.batch = trained[0].shapes
        loaders.rows = trained[0].rows if loaders.rows is not None else None
