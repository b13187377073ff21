"""What a training step does at each instant, and what may hold it up: names that records and watchers share."""

from __future__ import annotations

from typing import Literal

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
