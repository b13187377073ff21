"""Slow patterns, phases and bounds of a training step."""

from __future__ import annotations

from typing import Literal

from hotloop.core.records.training import Record


class SlowPattern(Record):
    """A repeated action of the training loop that costs more than it gives, as observed at run time.

    Attributes:
        what: `kept graph`: a loss whose graph lives several steps; memory grows by `bytes` each step;
            `carried graph`: a kept graph that later backwards traverse again;
            `retained graph`: a backward that retains a graph without a second backward;
            `created graph`: a backward with `create_graph` that is the last of its step;
            `wasted forward`: a forward without a backward, of a network that is trained on the same inputs;
            `unused graph`: a forward without a backward, of other inputs or an untrained network;
            `evaluation`: a forward without a backward of a trained network, in evaluation mode or without a graph;
            `autograd in evaluation`: a forward in evaluation that builds graphs without a backward;
            `repeated forward`: a second forward of a network with the same inputs and outputs, both trained;
            `recomputed forward`: a forward within the backward, as in activation checkpointing;
            `shared graph`: a backward through nodes of an earlier backward of the step, which adds to its gradients;
            `unused gradients`: of parameters that no optimizer updates;
            `cleared gradients`: of a network, cleared before its optimizer steps;
            `unread gradients`: of the weights of a network whose input gradients are needed;
            `argument validation`: checks of torch.distributions;
            `input gradients`: of other tensors, without a request by `torch.autograd.grad`;
            `hook`: torch's anomaly detection;
            `profiler`: a profiler in the script;
            `garbage collection`: Python's;
            `checkpoint`: `torch.save`.
        where: the line.
        per_step: occurrences per step; for unused gradients, their number.
        call_us, calls: for `profiler`: duration of a tiny operator, and the number of operators.
        ms: per step; None if unknown.
        bytes: per step.
    """

    what: Literal[
        "kept graph",
        "carried graph",
        "retained graph",
        "created graph",
        "wasted forward",
        "unused graph",
        "evaluation",
        "autograd in evaluation",
        "repeated forward",
        "recomputed forward",
        "shared graph",
        "unused gradients",
        "cleared gradients",
        "unread gradients",
        "argument validation",
        "input gradients",
        "hook",
        "profiler",
        "garbage collection",
        "checkpoint",
    ]
    where: str
    per_step: float
    ms: float | None = None
    bytes: float | None = None
    calls: float | None = None
    call_us: float | None = None


Phase = Literal[
    "data",
    "batch",
    "copy",
    "forward",
    "loss",
    "backward",
    "update",
    "logging",
    "synchronisation",
    "waiting",
    "communication",
    "python",
    "unattributed",
]
"""What a step does; each instant belongs to one phase.

- `data`: waiting for the next batch: loader, samples, workers, collating.
- `batch`: transforms and augmentation of a batch in the loop.
- `copy`: tensors copied between host and device.
- `forward`: from entering to leaving the outermost module.
- `loss`: autograd operations between forward and backward.
- `backward`: gradients.
- `update`: optimizer step, zeroing and clipping of gradients, schedule, average.
- `logging`: metrics, printing, writing files and pictures.
- `synchronisation`: waiting for a device, as in `.item()`.
- `waiting`: of a rank for other ranks.
- `communication`: between processes, without concurrent computation.
- `python`: Python code of the loop.
- `unattributed`: the rest.
"""

Bound = Literal[
    "input",
    "copy",
    "overhead",
    "memory bandwidth",
    "arithmetic",
    "synchronisation",
    "waiting",
    "communication",
    "unknown",
]
"""What limits a step; `overhead` is Python and launches."""
