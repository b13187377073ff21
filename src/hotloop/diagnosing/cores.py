"""Threads: more of them than there are cores, or fewer."""

from __future__ import annotations

from collections.abc import Iterator

from hotloop.diagnosing.step import COMPUTING, Step
from hotloop.profiles import Remedy


def crowded(step: Step) -> Iterator[Remedy]:
    """Operations cut into more threads than can run at once: each waits for those that have no core."""
    threads = step.profile.threads
    if threads is None or threads.slower is None or not step.on_cpu:
        return
    computing = step.phase(*COMPUTING)
    yield Remedy(
        cause=f"too many threads: {threads.torch} of torch's on {threads.cores} cores",
        where=threads.where or step.profile.step_where,
        remedy=f"torch.set_num_threads({threads.cores}), or OMP_NUM_THREADS={threads.cores}",
        gain=step.share(computing * (1 - 1 / threads.slower)),
        evidence=f"operations are cut into {threads.torch} pieces and wait for the last of them: such take "
        f"{threads.slower:.1f} times as long as with {threads.cores}, and operations are {computing:.2f} ms of each step "
        f"of {step.ms:.2f} ms",
        axes={"threads": threads.cores},
    )


def idle(step: Step) -> Iterator[Remedy]:
    """Cores that nobody uses; whether operations are large enough to be cut, only a race tells, so Tasks alone ask."""
    threads = step.profile.threads
    if threads is None or not step.profile.plan or not step.on_cpu:
        return
    free = threads.cores - round(threads.others)
    if threads.torch >= free:
        return
    computing = step.phase(*COMPUTING)
    yield Remedy(
        cause=f"idle cores: torch uses {threads.torch} of {threads.cores}",
        where=threads.where or step.profile.step_where or step.profile.source,
        remedy=f"torch.set_num_threads({free})",
        gain=step.share(computing * (1 - threads.torch / free)),
        evidence=f"{threads.busy:.1f} cores were busy while operations took {computing:.2f} ms of each step of "
        f"{step.ms:.2f} ms; a race says whether more threads make them faster",
        axes={"threads": free},
    )
