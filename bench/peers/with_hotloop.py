"""hotloop, as `hotloop train` runs it: under `--plan auto`, without a plan, after `--tune`, or under axes that are named.

`tune` searches before the first step; `train-auto` is `hotloop train --plan auto`, which searches while it trains; `auto` takes
what is stored, or the plan of the rules.

python -m bench.peers.with_hotloop W4 --epochs 3 --device cpu auto|train-auto|unasked|tune|baseline|compile=package,threads=1|tune,precision=bf16
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import Any

import hotloop
from bench.peers.on_torch import judged
from bench.speed.job import Evaluate, Job, main
from bench.speed.lanes import TRAIN_AUTO, UNSEARCHED, axes_of, base_of
from bench.speed.marks import Marks
from hotloop.core.plan_request import AUTO, PlanRequest
from hotloop.core.reporter import Reporter
from hotloop.task_file import LoadedTask, load_task
from hotloop.training.start import start_run
from hotloop.tuning.run_context import RunContext
from hotloop.tuning.tune import cached_or_tuned_plan


class Counting:
    """A callback of `fit`, which hears of spans of about a tenth of a second; the end is asked for as by Ctrl-C.

    Like the progress bar that `hotloop train` has in its place, it changes nothing of the model.
    """

    read_only = True

    def __init__(self, marks: Marks) -> None:
        self.marks, self.step = marks, 0

    def __call__(self, view: hotloop.View) -> None:
        steps, self.step = view.step - self.step, view.step
        if steps and not self.marks.step(steps):
            signal.raise_signal(signal.SIGTERM)


def planned(job: Job, loaded: LoadedTask) -> dict[str, Any]:
    asked = job.options[0] if job.options else "tune"
    base, axes = base_of(asked), {"device": job.device, **axes_of(asked)}
    if base == "tune":
        plan, said = cached_or_tuned_plan(loaded, PlanRequest.from_value("auto", axes))
        job.marks.report(event="said", line=said)
        return {"plan": plan, "axes": axes}
    if base == TRAIN_AUTO:
        return {"plan": AUTO, "axes": axes, "is_live": True}
    return {"plan": None if job.options == UNSEARCHED else base, "axes": axes}


def train(job: Job) -> Evaluate:
    loaded = load_task("bench.speed.tasks:task", {"name": job.workload.name, "epochs": str(job.epochs)})
    folder = tempfile.TemporaryDirectory()
    context = RunContext(
        loaded,
        callbacks=[Counting(job.marks)],
        # In turns with others, most of the time that goes by is theirs: it must not make checkpoints due.
        checkpoint_every="1000h" if job.marks.in_turns else "auto",
        reporter=Reporter(lambda line: job.marks.report(event="said", line=line)),
        **planned(job, loaded),
    )
    run, _ = start_run(context, Path(folder.name) / "run")
    job.marks.report(event="plan", plan=run.plan.model_dump(exclude_none=True), brief=run.plan.brief())

    def evaluate() -> tuple[float, float]:
        """Reads the model here, for which the others take no time and no memory of training's."""
        with folder:
            return judged(hotloop.load_model(run), job)

    return evaluate


if __name__ == "__main__":
    main(train)
