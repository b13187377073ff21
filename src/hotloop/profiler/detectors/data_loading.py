"""Waits for data: slow samples and collation, reopened loaders, unpinned memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from hotloop.core.records.profile import COUNTS, LineTime, LoaderUse, Remedy
from hotloop.profiler.detectors.code_regions import function_of
from hotloop.profiler.detectors.step import OFTEN, ProfiledStep, named_function, percent

_MAIN_SHARE = 0.5
"""Least share of the wait for its main cause, and of the steps that a loader feeds."""

_SAMPLE_METHODS = ("__getitem__", "__getitems__")  # a data set's functions that make samples

_HANDOVER_MS = 2.0
"""Step time below which the transfer from a worker may be the bound; a transfer takes 0.7 to 0.9 ms."""


def slow_loading(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields a remedy for slow samples or collation, without the opening of loaders and waits of evaluations."""
    waited = loading_wait_ms(step)
    # The lines of reopened loaders can't be separated from those of loading.
    lines = [] if _reopened_loaders(step) else sorted(step.lines("data"), key=lambda line: -line.own_ms)
    loader = _slowest(step, waited)
    where = lines[0].where if lines else ""
    if not waited:
        return
    if loader is None and step.profile.plan:
        yield Remedy(
            cause="waiting for data: hotloop makes each batch while the step waits",
            where=where or step.profile.source,
            remedy="keep the data in memory, or load it by workers (residency=, workers=); run hotloop tune to find the fastest",
            gain=step.share(waited),
            evidence=f"{step.part(waited)} are spent waiting for the batch",
            axes={"residency": "host"},
        )
    elif loader is None:
        yield Remedy(
            cause="waiting for data: batches are made in Python, one after the other",
            where=where or step.profile.step_where,
            remedy="read the data into tensors once, before the loop, and cut each batch out with one index",
            gain=step.share(waited),
            evidence=f"{step.part(waited)} are spent waiting for the batch",
        )
    else:
        yield _loader_remedy(step, loader, waited, lines)


def loading_wait_ms(step: ProfiledStep) -> float:
    """Returns the ms per step in which the training waits for data from open loaders."""
    opening = sum(step.loading_ms(use, use.opening_ms) for use in _reopened_loaders(step))
    return max(0.0, step.phase("data") - step.evaluating_ms - opening)


def _slowest(step: ProfiledStep, waited: float) -> LoaderUse | None:
    """Returns the loader with the slowest samples; an untimed loader if these explain little of the wait."""
    loaders = [use for use in step.profile.loaders if use.share >= _MAIN_SHARE and use not in step.evaluation_loaders]
    loader = max(loaders, key=lambda use: use.share * _timed_samples_ms(step, use), default=None)
    if loader is None or _timed_samples_ms(step, loader) >= _MAIN_SHARE * waited:
        return loader
    return next((use for use in loaders if use.sample_ms is None), loader)


def _timed_samples_ms(step: ProfiledStep, loader: LoaderUse) -> float:
    """Returns the timed ms of a loader's samples per step."""
    samples = step.profile.samples_per_step if len(step.profile.loaders) == 1 else None
    each = loader.batch_size or step.profile.samples_per_step or 1.0
    calls = loader.draws if loader.at_once else samples or loader.draws * each
    return calls * (loader.sample_ms or 0.0)


def reopened_loader(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields remedies for loaders that each step opens for a first batch."""
    for use in _reopened_loaders(step):
        spent = step.loading_ms(use, use.opening_ms)
        starting = "starting its workers and waiting for their first batch" if use.workers else "beginning it"
        yield Remedy(
            cause="a DataLoader is opened anew at each step",
            where=use.opened_where or use.where,
            remedy="create the loader and its iterator once, before the loop, and take the next batch from the iterator at each "
            "step; create a new iterator when it is exhausted: for batch in loader does that",
            gain=step.share(spent),
            evidence=f"{starting} takes {step.part(spent)}, for {use.draws:.0f} of its "
            f"{'' if use.batches is None else f'{use.batches} '}batches",
            note=step.share(spent) < COUNTS,
        )


def _reopened_loaders(step: ProfiledStep) -> list[LoaderUse]:
    """Returns loaders that steps open repeatedly and leave mostly unread."""
    return [
        use
        for use in step.profile.loaders
        if use.opened >= OFTEN
        and (use.batches is None or use.draws <= _MAIN_SHARE * use.opened * use.batches)
        and use not in step.evaluation_loaders
    ]


def _loader_remedy(step: ProfiledStep, loader: LoaderUse, waited: float, lines: Sequence[LineTime]) -> Remedy:
    evidence = f"{step.part(waited)} are spent waiting for the next batch"
    remedy = partial(Remedy, gain=step.share(waited), axes={"residency": "host"})
    if (line := _collate_line(step, loader, waited, lines)) is not None:
        function = named_function(line.function)
        return remedy(
            cause=f"slow samples: collating the samples of a batch takes long, in {function}",
            where=line.where,
            remedy="compute for all samples at once, with operations on whole tensors, or once before training"
            + _workers_advice(step, waited, "; or "),
            evidence=evidence,
        )
    hottest = next(
        (line.where for line in lines if line.where != loader.where and line.own_ms >= _MAIN_SHARE * waited), ""
    )
    if loader.workers:
        return _worker_remedy(step, loader, waited, evidence, hottest)
    if loader.sample_where and _sample_making_ms(step, loader, lines) >= _MAIN_SHARE * waited:
        each = (
            ""
            if loader.sample_ms is None
            else f"; one {'batch' if loader.at_once else 'sample'} of {loader.dataset} takes {1e3 * loader.sample_ms:.0f} us"
        )
        cause = "slow samples: they are loaded one by one"
        if loader.at_once:
            cause = "slow samples: the data set takes long to hand out a batch"
        return remedy(
            cause=cause,
            where=hottest or loader.where if loader.sample_where == loader.where else loader.sample_where,
            remedy=_first_batch_advice(loader, hottest) + _workers_advice(step, waited, ", or "),
            evidence=evidence + each,
        )
    if loader.batch_size is None:
        return remedy(
            cause="waiting for data: the loader itself takes long, and its data set makes whole batches",
            where=loader.where,
            remedy="cut the batches out in the loop, without a loader" + _workers_advice(step, waited, ", or "),
            evidence=evidence,
        )
    return remedy(
        cause="per-sample loading: the loader reads each sample on its own and collates the batch",
        where=loader.where,
        remedy=_whole_batches_advice(loader),
        evidence=evidence,
    )


def _workers_advice(step: ProfiledStep, waited: float, joint: str) -> str:
    """Returns workers as an alternative remedy, with their largest possible gain; empty if workers win next to nothing.

    Workers load during the step. On a CPU the workers and the step share the cores.
    """
    threads = step.profile.threads
    cores = threads.cores if threads else 1
    over_cores = f"{waited:.2f} ms over {cores} workers", waited / cores
    rest = f"{step.ms - waited:.2f} ms for all else", step.ms - waited
    limits = [over_cores, rest]
    if threads and step.on_cpu:
        work_ms = min(threads.busy, cores) * step.ms
        limits.append((f"{work_ms:.2f} ms of all work over {cores} cores", work_ms / cores))
    least = max(ms for _, ms in limits)
    if step.share(step.ms - least) < COUNTS:
        return ""
    return (
        f"{joint}let workers do it during the step (num_workers={cores}, persistent_workers=True), which wins up to "
        f"{percent(step.share(step.ms - least))}: a step then takes {least:.2f} ms at least, the longest of "
        f"{', '.join(said for said, _ in limits[:-1])} and {limits[-1][0]}"
    )


def _whole_batches_advice(loader: LoaderUse) -> str:
    """A streaming data set has no indices for a sampler."""
    if loader.stream:
        return "let the data set hand out whole batches, and give the loader batch_size=None"
    return "index the tensors by a whole batch of numbers (a BatchSampler as the sampler, with batch_size=None)"


def _collate_line(step: ProfiledStep, loader: LoaderUse, waited: float, lines: Sequence[LineTime]) -> LineTime | None:
    """Returns the collate line with most of the wait, if the main process collates samples that load quickly."""
    if loader.workers or loader.at_once or (loader.sample_where and loader.sample_ms is None):
        return None
    if not loader.collate_where:
        return None  # torch's default collate has no line of the user's
    hot = [line for line in lines if line.where != loader.where and not _is_in_sample(line, loader, lines)]
    if (
        _timed_samples_ms(step, loader) >= _MAIN_SHARE * waited
        or sum(line.own_ms for line in hot) < _MAIN_SHARE * waited
    ):
        return None
    return max(hot, key=lambda line: line.own_ms)


def _is_in_sample(line: LineTime, loader: LoaderUse, lines: Sequence[LineTime]) -> bool:
    """Returns whether the stack has a function that makes samples; this is more precise than sample times."""
    around = {one.where: one for one in sorted(lines, key=lambda one: one.ms)}
    seen: set[str] = set()
    at: LineTime | None = line
    while at is not None and at.where not in seen:
        seen.add(at.where)
        if function_of(at)[1].rpartition(".")[2] in _SAMPLE_METHODS:
            return True
        at = around.get(at.within)
    return False


def _sample_making_ms(step: ProfiledStep, loader: LoaderUse, lines: Sequence[LineTime]) -> float:
    """Returns the larger of the timed samples and the sampled lines."""
    return max(_timed_samples_ms(step, loader), sum(line.own_ms for line in lines if line.where != loader.where))


def _worker_remedy(step: ProfiledStep, loader: LoaderUse, waited: float, evidence: str, hottest: str) -> Remedy:
    """Samples, collation and transfer aren't timed in workers."""
    many = f"{loader.workers} worker{'s'[: loader.workers - 1]}"
    cores = step.profile.threads.cores if step.profile.threads else None
    own = [place for place in (loader.sample_where, loader.collate_where) if place and place != loader.where]
    cause = f"waiting for data: {many} can't keep up with the step"
    remedy = f"{_first_batch_advice(loader, hottest)}, or give the loader more workers than {loader.workers}"
    if cores is not None and loader.workers >= cores:
        remedy = f"{_first_batch_advice(loader, hottest)}; more workers than cores don't help"
    if cores is not None and loader.workers > cores:
        cause = f"too many workers: {loader.workers} of the loader's on {cores} cores"
    elif step.ms < _HANDOVER_MS:
        cause = f"waiting for data: the step is short, and {many} must hand a batch over in each"
        remedy = f"load in the process (num_workers=0), or with fewer workers, and measure again; of what is in memory already: {_whole_batches_advice(loader)}"
    return Remedy(
        cause=cause,
        where=own[0] if len(own) == 1 else loader.where,
        remedy=remedy,
        gain=step.share(waited),
        evidence=f"{evidence}; in workers, the times of loading, collating and sending are not measured apart",
        axes={"residency": "host"},
    )


def _first_batch_advice(loader: LoaderUse, hottest: str) -> str:
    inside = f" ({hottest} takes most of it)" if hottest and hottest != loader.sample_where else ""
    collating = (
        f", or collate_fn for each batch ({loader.collate_where})" if loader.workers and loader.collate_where else ""
    )
    return f"compute once, before training, what the data set computes at each call{inside}{collating}"


def unpinned_memory(step: ProfiledStep) -> Iterator[Remedy]:
    """Yields a remedy for batches in pageable memory, which block the copy to an accelerator."""
    copied = step.phase("copy")
    for loader in step.profile.loaders:
        if step.on_cpu or loader.pinned or not copied:
            continue
        yield Remedy(
            cause="unpinned memory: the step waits for each batch to be copied to the device",
            where=loader.where,
            remedy="give the loader pin_memory=True and copy with .to(device, non_blocking=True)",
            gain=step.share(copied),
            evidence=f"{percent(step.share(copied))} of the step are copies, and the loader doesn't pin its memory",
            axes={"residency": "device"},
        )
        return
