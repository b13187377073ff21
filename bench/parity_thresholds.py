"""How far honest plans are from the truth: what the limits of parity are fixed on, and tried on. Takes a quarter hour.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python -m bench.parity_thresholds
    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python -m bench.parity_thresholds --seeds 1 --no-compile --no-record

Ten architectures (tests/support/tasks/parity_families.py), each under every plan that a CPU can run and that gives the same result,
with several seeds, by turns on one thread and on two. The largest ratios of five of them, times a margin, are the limits;
on the other five no honest plan may exceed them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.claim import write_claim
from hotloop import margins
from hotloop.core.records.race import TRUSTED_CLASSES, Parity
from hotloop.errors import PlanError
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.parity import proof
from hotloop.parity import verdict as judging
from hotloop.parity.comparison import Evidence, StepErrors
from hotloop.parity.free_run import FreeRunResult
from hotloop.parity.noise_floor import noise_floors, typical_errors
from hotloop.parity.shared_rng import PieceDraws
from hotloop.parity.step_collector import floor_ratio
from hotloop.plan import BASELINE, Plan
from hotloop.task import Task
from tests.support.tasks.parity_families import FIXED_ON, MORE_FAMILIES, another_family

DRAWS = ("vae", "batchnorm", "encoder")
"""Families that draw: in pieces they draw something else."""

MARGINS = {"typical": 2.0, "anywhere": 4.0, "freely": 16.0}
"""Times the largest ratio that was seen, before the limit is rounded up to a power of two.

A median over states hardly moves; at a single state rounding has a long tail (a ReLU may switch); and what a free run
drifts is known from a handful of runs alone.
"""

EAGER = [
    {"optimizer": "forloop"},
    {"optimizer": "foreach"},
    {"optimizer": "fused"},
    {"layout": "channels_last"},
    {"layout": "channels_last", "optimizer": "fused"},
    {"threads": 1},
    {"threads": 2},
    {"accumulation": 2},
    {"accumulation": 3},
    {"residency": "host"},
    {"residency": "device"},
]
COMPILED = [
    {"compile": "forward"},
    {"compile": "step"},
    {"compile": "step", "layout": "channels_last"},
    {"compile": "package"},
    {"compile": "package", "rewrites": "all"},
    {"compile": "step", "accumulation": 2},
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(MORE_FAMILIES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--rows", type=Path, help="a file to which each proof is written, and from which to go on")
    parser.add_argument("--no-record", action="store_true", help="print the figures, write no claim")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.open()] if options.rows and options.rows.is_file() else []
    done = {(row["family"], row["seed"]) for row in rows}
    for seed in range(options.seeds):
        for name in options.families.split(","):
            if (name, seed) in done:
                continue
            torch.set_num_threads(1 + seed % 2)
            found = list(proofs(name, seed, EAGER if options.no_compile or seed else EAGER + COMPILED))
            rows += found
            if options.rows is not None:
                with options.rows.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
    figures = summary(rows)
    print(json.dumps(figures, indent=2))
    if not options.no_record:
        command = f"python -m bench.parity_thresholds --seeds {options.seeds}"
        print(write_claim("parity-thresholds", command, BASELINE, {**figures, "proofs": rows}))
    return 1 if figures["false_alarms"] else 0


def proofs(name: str, seed: int, plans: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """All honest plans of one family with one seed, and how far each was off."""
    task = another_family(name, seed=seed)
    programs = list(lowered(task, [Plan(**axes) for axes in plans if "accumulation" not in axes or name not in DRAWS]))
    seen: dict[str, dict[str, float]] = {}
    judged = judging.classify

    def noting(account: StepErrors, evidence: Evidence, free: FreeRunResult | None, **options: Any) -> dict[str, Any]:
        seen[account.name] = ratios(account, evidence, free)
        return judged(account, evidence, free, **options)

    began = time.monotonic()
    with mock.patch.object(proof, "classify", noting), mock.patch.object(proof, "_prove_group", beside_all):
        verdicts: list[Parity] = proof.prove_programs(task, programs)
    for program in programs:
        program.close()
    for verdict in verdicts:
        row = {"family": name, "seed": seed, "plan": verdict.plan, "parity": verdict.parity, **seen[verdict.plan]}
        row |= {"reason": verdict.reason, "first": verdict.first}
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)
        yield row
    print(f"{name}: {time.monotonic() - began:.0f}s", flush=True)


def beside_all(
    task: Task, programs: Sequence[Program], pieces: PieceDraws | None, progress: proof.ProofProgress
) -> list[Parity]:
    """The limits are about all harmless baselines; a proof first tries whether a plan passes beside one."""
    return proof._compare_programs(task, programs, pieces, progress, brief=False)


def lowered(task: Task, plans: list[Plan]) -> Iterator[Program]:
    """Those that can be run for this Task; the others are refused with a reason, so they prove nothing."""
    for plan in plans:
        try:
            yield lower(task, plan)
        except PlanError as error:
            print(f"{plan.brief()} refused: {error}", flush=True)


def ratios(account: StepErrors, evidence: Evidence, free: FreeRunResult | None) -> dict[str, Any]:
    """The largest of each of the three that there are limits of."""
    if evidence.unproven or free is None:
        return {}
    anywhere = [
        floor_ratio(error, floor.get(key))
        for errors, floor in zip(account.errors, noise_floors(evidence.rounding, evidence.nudged_rounding), strict=True)
        for key, error in errors.items()
    ]
    return {
        "typical": max(one.ratio for one in typical_errors(account, evidence.judges, evidence.rounding)),
        "anywhere": max(anywhere),
        "freely": free.largest_drift.times,
        "furthest": free.largest_drift.what,
    }


LIMITS = {"typical": margins.TYPICAL_LIMIT, "anywhere": margins.WORST_LIMIT, "freely": margins.FREE_RUN_LIMIT}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the limits follow from, and whether any honest plan of the other families exceeds them."""
    fixed = [row for row in rows if row["family"] in FIXED_ON]
    tried = [row for row in rows if row["family"] not in FIXED_ON]
    alarms = [row for row in rows if row["parity"] not in TRUSTED_CLASSES]
    return {
        "n_proofs": len(rows),
        "fixed_on": sorted({row["family"] for row in fixed}),
        "tried_on": sorted({row["family"] for row in tried}),
        "limits": LIMITS,
        "margins": MARGINS,
        "limits_that_follow": {key: limit([row[key] for row in fixed], margin) for key, margin in MARGINS.items()},
        "largest_where_fixed": {key: largest(fixed, key) for key in LIMITS},
        "largest_where_tried": {key: largest(tried, key) for key in LIMITS},
        "quantiles_where_fixed": {key: quantiles([row[key] for row in fixed]) for key in LIMITS},
        "quantiles_where_tried": {key: quantiles([row[key] for row in tried]) for key in LIMITS},
        "classes": {name: sum(row["parity"] == name for row in rows) for name in sorted({r["parity"] for r in rows})},
        "false_alarms": alarms,
    }


def limit(ratios: list[float], margin: float) -> float | None:
    """The power of two from so many times the largest on."""
    if not ratios:
        return None
    power = 1.0
    while power < margin * max(ratios):
        power *= 2
    return power


def largest(rows: list[dict[str, Any]], key: str) -> dict[str, Any] | None:
    if not rows:
        return None
    row = max(rows, key=lambda one: one[key])
    return {"ratio": row[key], **{name: row[name] for name in ("family", "plan", "seed")}}


def quantiles(values: list[float]) -> dict[str, float]:
    import numpy as np

    shares = (0.5, 0.9, 0.99, 1.0)
    return {f"{share:.0%}": float(np.quantile(values, share)) for share in shares} if values else {}


if __name__ == "__main__":
    sys.exit(main())
