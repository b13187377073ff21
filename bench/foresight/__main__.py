"""Compares predictions of hotloop advise with measured times: `python -m bench.foresight --data PATH --record`.

Fitted and judged runs are disjoint; each row of the record says which runs were left out of which fit. With `--only`, the
record takes the other sets from the newest record, and each row states when and with which commit its runs were judged.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import mean, median

from bench.claim import CLAIMS, commit, write_claim
from bench.foresight import (
    gpu_claims,
    megatron,
    mosaic,
    neusight,
    torch_estimator,
    torchvision_networks,
    torchvision_runs,
)
from bench.foresight.claim_page import page
from bench.foresight.fit import fit_all, runs_coefficients, unit_coefficients, write
from bench.foresight.kernels import fit_kernels
from hotloop.advisor.rates import shipped
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.hardware.machine import current_time

Judged = list[tuple[str, float, float, float, float]]
"""Name, predicted, low, high and measured of each run."""


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        name: set of runs.
        fitted_on: what the prediction rests on, and what was left out.
        runs: number of runs.
        statistic: `mean` or `median` of absolute relative errors, or `share wrong` of yes and no.
        error: that statistic.
        must: largest error allowed; None where none was stated.
        coverage: share of runs inside of the 90 % interval; None without intervals.
        base: errors of others on the same runs.
        within_20: share of runs with an error of at most 20 %.
        taken: when the runs were judged.
        commit: checked out at that time.
    """

    name: str
    fitted_on: str
    runs: int
    statistic: str
    error: float
    must: float | None
    coverage: float | None
    base: str
    within_20: float
    taken: str = field(default_factory=current_time)
    commit: str | None = field(default_factory=commit)


def result_of(name: str, fitted_on: str, statistic: str, must: float | None, base: str, judged: Judged) -> Result:
    errors = [float(abs(predicted / measured - 1)) for _, predicted, _, _, measured in judged]
    inside = [bool(low <= measured <= high) for _, _, low, high, measured in judged]
    error = (mean if statistic == "mean" else median)(errors)
    return Result(
        name,
        fitted_on,
        len(judged),
        statistic,
        error,
        must,
        mean(map(float, inside)),
        base,
        mean(float(one <= 0.2) for one in errors),
    )


def with_interval(judged: Sequence[tuple[str, float, float, float]]) -> Judged:
    return [
        (name, predicted, predicted * math.exp(-1.645 * spread), predicted * math.exp(1.645 * spread), measured)
        for name, predicted, measured, spread in judged
    ]


class Sets:
    """The sets of runs, each judged on first use.

    Args:
        data: folder of measurements of others, one folder per origin.
        cache: file for the costs of torchvision's networks, which take minutes to trace.
    """

    def __init__(self, data: Path, networks: Path) -> None:
        self.data, self.networks = data, networks

    @cache  # noqa: B019  lives as long as the program
    def kernels(self, excluded: str = ""):
        return fit_kernels(self.data, {excluded} if excluded else set())

    def neusight_unseen(self) -> tuple[Result, Judged]:
        judged = with_interval(neusight.judge(self.data, self.kernels, sees_kernels=False))
        base = "roofline 31.9 %, one factor per chip with its own runs 9.4 %, NeuSight's model 7.3 %"
        return result_of(
            "NeuSight training fp32, chip unseen", "kernels and runs of the other chips", "mean", 0.12, base, judged
        ), judged

    def neusight_seen(self) -> tuple[Result, Judged]:
        judged = with_interval(neusight.judge(self.data, self.kernels, sees_kernels=True))
        base = "roofline 31.9 %, one factor per chip with its own runs 9.4 %, NeuSight's model 7.3 %"
        return result_of(
            "NeuSight training fp32, kernels seen",
            "kernels of all chips, runs of the other chips",
            "mean",
            0.09,
            base,
            judged,
        ), judged

    def torchvision(self) -> tuple[Result, Judged]:
        costs = torchvision_networks.traced(self.networks)
        judged = with_interval(torchvision_runs.judge(self.data, unit_coefficients(self.kernels()), costs))
        return result_of(
            "torchvision training fp32 and fp16", "the other chips' runs", "median", 0.15, "none published", judged
        ), judged

    def mpt(self) -> tuple[Result, Judged]:
        judged = with_interval(mosaic.judge(self.data, runs_coefficients(shipped())))
        return result_of(
            "MPT on A100, 8 to 128 GPUs", "the other model sizes", "mean", 0.09, "9 to 10 % with one MFU", judged
        ), judged

    def vtrain(self) -> tuple[Result, Judged]:
        judged = with_interval(megatron.judge(self.data, runs_coefficients(shipped())))
        base = "35 to 55 % by FLOPs; vTrain's simulator 8.4 % one node, 14.7 % many"
        return result_of(
            "vTrain, tensor, data and pipeline parallel", "the other numbers of GPUs", "mean", 0.15, base, judged
        ), judged

    def gpu(self) -> tuple[Result, Judged]:
        judged = gpu_claims.judge(shipped())
        return result_of(
            "small networks on an H200", "the other networks of the record", "median", 0.3, "none published", judged
        ), judged

    def pays(self) -> tuple[Result, Judged]:
        judged = gpu_claims.judge_pays(shipped())
        wrong = mean((predicted > 1) != (measured > 1) for _, predicted, _, _, measured in judged)
        always = mean(measured > 1 for *_, measured in judged)
        result = result_of(
            "does an H200 pay", "the other networks of the record", "share wrong", 0.05,
            f"the answer yes is right in {always:.0%}", judged,
        )  # fmt: skip
        return replace(result, error=float(wrong)), judged

    def torch_estimator(self) -> tuple[Result, Judged]:
        estimated = torch_estimator.stored_ms()
        own = {name: {run[0]: run for run in newest_record()[1][name]} for name in ("neusight_unseen", "neusight_seen")}
        judged = [(name, ms / 1e3, ms / 1e3, ms / 1e3, own["neusight_seen"][name][4]) for name, ms in estimated.items()]
        errors = {name: mean(abs(runs[one][1] / runs[one][4] - 1) for one in estimated) for name, runs in own.items()}
        base = f"hotloop on these runs: {errors['neusight_unseen']:.1%} chip unseen, {errors['neusight_seen']:.1%} kernels seen"
        result = result_of("torch 2.14 RuntimeEstimator on NeuSight training", "nothing", "mean", None, base, judged)
        return replace(result, coverage=None), judged

    def cpu(self) -> tuple[Result, Judged]:
        from bench.foresight.cpu import cpu_rows

        return result_of(
            "W1 to W9 on this CPU", "probes of single operators", "median", 0.2, "none published", rows := cpu_rows()
        ), rows

    def memory(self) -> tuple[Result, Judged]:
        from bench.foresight.memory import memory_rows

        return result_of(
            "memory of a step on the CPU", "nothing", "median", 0.05, "a few percent", rows := memory_rows()
        ), rows


NAMES = (
    *("neusight_unseen", "neusight_seen", "torch_estimator", "torchvision"),
    *("mpt", "vtrain", "gpu", "pays", "cpu", "memory"),
)


FIELDS = ("run", "predicted", "low", "high", "measured")


def newest_record() -> tuple[dict[str, Result], dict[str, Judged]]:
    """Returns the results and runs of the newest record, by set."""
    paths = sorted(CLAIMS.glob("*_foresight/record.json"))
    if not paths:
        return {}, {}
    record = json.loads(paths[-1].read_text())
    rows = [row for row in record["results"] if "set" in row]
    results = {row["set"]: Result(**{name: row[name] for name in row if name != "set"}) for row in rows}
    runs = {name: [tuple(run[one] for one in FIELDS) for run in judged] for name, judged in record["runs"].items()}
    return results, runs


def line(result: Result) -> str:
    must = f"(must {result.must:.0%})" if result.must else ""
    coverage = "none" if result.coverage is None else f"{result.coverage:4.0%}"
    return (
        f"{result.name:45s} {result.runs:4d} runs  {result.statistic} {result.error:6.1%} {must:11s} "
        f"coverage {coverage}  within 20 %: {result.within_20:4.0%}  fitted on {result.fitted_on}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.foresight", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of measured times of others")
    parser.add_argument(
        "--networks", type=Path, default=Path("/tmp/hotloop-foresight-networks.json"), help="cache of traced costs"
    )
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES, help="sets to judge")
    parser.add_argument("--fit", action="store_true", help="fit the package's coefficients to all runs, and write them")
    parser.add_argument("--record", action="store_true", help="write the record")
    chosen = parser.parse_args(arguments)
    if not chosen.data.is_dir():
        parser.error(f"--data {chosen.data} is no folder")
    if chosen.fit:
        print(write(fit_all(chosen.data, torchvision_networks.traced(chosen.networks))))
    sets = Sets(chosen.data, chosen.networks)
    new: dict[str, Result] = {}
    new_runs: dict[str, Judged] = {}
    for name in chosen.only:
        judge: Callable[[], tuple[Result, Judged]] = getattr(sets, name)
        new[name], judged = judge()
        print(line(new[name]), flush=True)
        new_runs[name] = [(run[0], *map(float, run[1:])) for run in judged]
    results, runs = newest_record() if chosen.record else ({}, {})  # after the sets, which take minutes
    results, runs = results | new, runs | new_runs
    # The ratios of "pays" rest on the runs of "gpu", and torch's estimates aren't hotloop's.
    own = [name for name in runs if name not in ("pays", "torch_estimator")]
    everything = result_of("all sets", "as above", "median", None, "", [run for name in own for run in runs[name]])
    print(line(everything))
    if chosen.record:
        ordered = {name: results[name] for name in NAMES if name in results}
        figures = {
            "results": [{"set": name} | asdict(result) for name, result in ordered.items()] + [asdict(everything)],
            "runs": {name: [dict(zip(FIELDS, run, strict=True)) for run in runs[name]] for name in ordered},
        }
        folder = write_claim("foresight", "python -m bench.foresight --data PATH --record", None, figures)
        write_atomic(folder / "README.md", page(json.loads((folder / "record.json").read_text())))
        print(folder, file=sys.stderr)


if __name__ == "__main__":
    main()
