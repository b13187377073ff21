"""A trained run with everything that a report shows, and hostile names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import torch

import hotloop
from hotloop.core.records.race import Parity, Timing, Verdict
from hotloop.core.records.study import StudyResult, TrialRecord
from hotloop.report.evaluation import mistake_pictures
from hotloop.training.run import Run

HOSTILE = "<img src=x onerror=window.hacked=1></script><script>window.hacked=2</script>"


def trained(path: Path, **fields: Any) -> Run:
    images = torch.rand(60, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    labels = images.flatten(1)[:, :3].argmax(1)
    given: dict[str, Any] = dict(
        name=HOSTILE,
        classes=["shirt", HOSTILE, "bag"],
        model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3)),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=(images[:40], labels[:40]),
        validation=(images[40:], labels[40:]),
        test=(images[40:], labels[40:]),
        batch_size=10,
        epochs=4,
    )
    return hotloop.fit(hotloop.Task(**given | fields), run=path, progress=False)


def reported_run(path: Path) -> Run:
    """Returns a run with an evaluation, a race and a proof."""
    handle = trained(path)
    found = hotloop.evaluate(handle)
    folder = handle.path / "evaluation"
    folder.mkdir()
    (folder / "evaluation.json").write_text(found.model_dump_json())
    (folder / "pictures.json").write_text(json.dumps(mistake_pictures(found)))
    plans = [
        Timing(name="baseline", step_ms=2.0, ratio=1.0),
        Timing(name=HOSTILE, step_ms=1.0, ratio=2.0, ratio_low=1.8, ratio_high=2.2, verdict="faster", parity="bitwise"),
    ]
    figures = dict(task="t", fingerprint="", baseline="baseline", steps=100, machine="", versions={}, seconds=0)
    (handle.path / "race.json").write_text(Verdict(plans=plans, winner=HOSTILE, **figures).model_dump_json())
    proof = Parity(plan="compile=step", parity="bitwise", reason="all numbers are equal", states=16)
    (handle.path / "proof.json").write_text(proof.model_dump_json())
    return handle


def example_study(trials: int = 6) -> tuple[StudyResult, optuna.Study]:
    """Returns a study of two parameters with a hostile name."""
    records, study = [], optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for number in range(trials):
        trial = study.ask()
        lr, width = trial.suggest_float("lr", 0.01, 1, log=True), trial.suggest_categorical("width", [1, 2])
        curve = [lr + width / epoch for epoch in (1, 2, 3)]
        study.tell(trial, curve[-1])
        params = {"lr": lr, "width": width}
        records.append(
            TrialRecord(number=number, state="complete", params=params, value=curve[-1], epochs=3, curve=curve)
        )
    result = StudyResult(
        study="s",
        name=HOSTILE,
        figure="validation_loss",
        goal="min",
        sampler="tpe",
        pruner="none",
        seed=0,
        best=study.best_trial.number,
        importance={"width": 0.7, "lr": 0.3},
        exact=True,
        inexact=[],
        command="hotloop train task.py",
        ended="finished",
        trials=records,
    )
    return result, study
