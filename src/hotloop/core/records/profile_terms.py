"""What a training loop does again and again that costs more than it gives."""

from __future__ import annotations

from typing import Literal

from hotloop.core.records.training import Record


class SlowPattern(Record):
    """Something that the loop does again and again, as it was seen to happen; not what its text says.

    Attributes:
        what: `kept graph`: a loss whose graph is alive steps later, `bytes` of memory growing by it each step;
            `carried graph`: such a one that later backwards go through as well, and so have more to do each time;
            `retained graph`: a backward that keeps a graph that nobody walks again;
            `created graph`: one that makes a graph of itself, and is the last of its step;
            `wasted forward`: a forward whose graph no backward walked, of a network that is trained on the same inputs;
            `unused graph`: such a one of other inputs, or of a network that isn't trained;
            `evaluation`: a forward that no backward walks, of a network that is trained in the step: in evaluation mode, or
            without a graph of inputs that it is trained on;
            `autograd in evaluation`: a forward in evaluation that builds graphs which no backward walks;
            `repeated forward`: a forward of the same network on the same inputs with the same outputs, both trained on;
            `recomputed forward`: one that runs again within the backward, as checkpointing of activations has it;
            `shared graph`: a backward that walks nodes of an earlier one of the same step, and adds to its gradients;
            `unused gradients`: of parameters that no optimizer steps, and that stay as they are;
            `cleared gradients`: of a network that a backward goes through, cleared before its optimizer steps;
            `unread gradients`: of the weights of such a network, whose inputs need gradients;
            `argument validation`: checks of torch.distributions;
            `input gradients`: of other tensors, which nobody asked for by `torch.autograd.grad`;
            `hook`: torch's anomaly detection;
            `profiler`: a profiler of the script's own;
            `garbage collection`: of Python's;
            `checkpoint`: what `torch.save` writes.
        where: the line.
        per_step: times in a step; gradients, of which some are unused.
        call_us: what a tiny operator takes meanwhile, and `calls`, how many operators there are; for `profiler` alone.
        ms: what it takes per step, where it can be told.
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
"""What a step does, at each instant one of them.

- `data`: waiting for the next batch: the loader, the samples, the workers, collating.
- `batch`: making the batch out of what came: transforms and augmentation in the loop.
- `copy`: tensors going from the host to a device or back.
- `forward`: of the modules, from entering the outermost to leaving it.
- `loss`: what autograd sees between forward and backward.
- `backward`: gradients.
- `update`: the optimizer's step and zeroing of gradients, gradient clipping, schedule, average.
- `logging`: metrics, printing, writing files and pictures.
- `synchronisation`: waiting for a device, as `.item()` does.
- `waiting`: of a rank, until the others have come to the same place.
- `communication`: between processes, as far as nothing is computed meanwhile.
- `python`: Python of the loop itself.
- `unattributed`: the rest; never hidden.
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
"""What holds a step up; `overhead` is Python and launches."""
