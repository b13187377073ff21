"""The README of the record of predictions: the table, what the predictions rest on, and what is weak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTES = {
    "neusight_unseen": "Transformers in fp32 on A100, V100, MI100 and MI210. No kernel and no run of the judged chip is in the fit. "
    "Boards with another memory or form of the same chip count as other chips.",
    "neusight_seen": "The same runs. Kernels of the judged chip are in the fit; training runs of the chip are left out.",
    "torch_estimator": "Estimates of `torch.distributed._tools.runtime_estimator.RuntimeEstimator` of torch 2.14 with `gpu_type`, mode "
    "`operator-level-cost-model`, for the runs above on chips that torch has data of: A100 and MI210, on one GPU. The stored "
    "estimates have five runs on an MI210. torch has no data of the chips of the torchvision runs. Without an accelerator the class raises `AssertionError: Roofline estimation needs to access "
    "CUDA capabilities to make estimations`; `bench/foresight/torch_estimator.py` reports an accelerator to it. The estimates take "
    "75 % of the peak rate, halve the FLOPs, and count the bytes of each operator at the full bandwidth.",
    "torchvision": "30 networks, batch 12, fp32 and fp16. The judged chip is left out of the fit.",
    "mpt": "MPT of 125 million to 70 billion parameters in bf16. The judged model size is left out of the fit. "
    "`hotloop.advisor.estimate.estimate` predicts each run with sharded parameters, as in `hotloop advise --gpus`; the coefficients of "
    "products, attention, bytes and gathers are fitted to one of six runs.",
    "vtrain": "GPT with tensor, data and pipeline parallelism. The judged number of GPUs is left out of the fit, which "
    "takes one of 25 runs. `hotloop.advisor.estimate.estimate` predicts each run, with the split of the run. `hotloop advise` itself "
    "compares data parallelism and sharded parameters alone.",
    "gpu": "W1 to W4 and W6 as a tutorial's loop and as hotloop's plans, from the record `speed-h200`. Two factors of the host's "
    "time are fitted to the other networks of the record. The shares of bytes and launches that fusion leaves were set by hand "
    "after the same record. The loop computes convolutions in TF32, torch's default; predicted in fp32 instead, the "
    "error was 33.6 %.",
    "pays": "Step on a CPU over step on the H200, for each CPU record of the same network with the same kind of loop. The CPU's "
    "step is measured; the H200's step is predicted as in the row above. The error is the share of wrong answers; coverage "
    "is that of the ratio.",
    "cpu": "Forward, backward and update with Adam, one thread, at five batch sizes. Only probes of single operators on this "
    "machine are used. The formulas were corrected on these networks, and several probes resemble their layers.",
    "memory": "Peak of tensors' bytes in the third step, against the allocator's record. No factor is fitted. The formulas of oneDNN's "
    "workspaces were corrected on these networks; the interval was set by hand to 0.93 to 1.10 times the prediction.",
}

CHANGED = "2026-11-28T11:00"
"""Time of the last change of the predictions below; rows that were judged earlier say so."""

EARLIER = {
    "mpt": "The row was judged before the bench called `estimate`, by formulas of the same form. `estimate` on all runs: mean 4.4 % with the "
    "package's coefficients, 3.9 % with coefficients fitted to one of three of the same runs.",
    "vtrain": "The row was judged before the bench called `estimate`, by formulas of the same form. `estimate` on one of ten runs, with "
    "coefficients fitted to the same runs: mean 7.3 %.",
    "gpu": "The row was judged before short kernels widened the interval, by a rule fitted to kernels of other chips.",
    "pays": "The row was judged before short kernels widened the interval.",
}

NOT_RECORDED = {
    "cpu": "The machine was busy with other programs; times of steps on the CPU need a quiet machine.",
    "memory": "The machine was busy with other programs; the comparison did not end in the time available.",
}

WEAK = """\
## Weaknesses

- Facts of chips were typed without the pages that they name at hand. `src/hotloop/advisor/facts/comparisons.csv` lists which facts
  of 90 chips agree with other public tables, and where the tables differ. Nothing was compared for links between chips, CPUs, and
  the fp16 rates of most GeForce cards, which follow from their fp32 rates. Prices have the date and provider of each; those of L4,
  RTX 4090 and H100 SXM were not compared with another table.
- The intervals of predictions for a CPU, of time and of memory, were set by hand with the same networks known.
- MPT and vTrain are predicted by the functions of `hotloop advise`, with coefficients fitted to each set. The package has the
  coefficients of MPT. The overlap of all-reduces with the backward pass of DistributedDataParallel was set by hand.
- The record of the H200 has one network at a time on a host that other programs used; a wrong answer of `pays` comes from steps that take about as long on the CPU as on the H200.
- All runs on GPUs but those of the H200 were measured by others, with other versions of torch.
- The formulas were developed on the same data sets from which single chips, sizes and numbers of GPUs are left out for each fit.
"""


def page(record: Mapping[str, Any]) -> str:
    """Returns the README of a record of `bench.foresight`."""
    processor, versions = record["machine"]["processor"], record["versions"]
    rows = [row for row in record["results"] if "set" in row]
    missing = [name for name in NOTES if name not in {row["set"] for row in rows}]
    lines = [
        "# Predictions for other hardware, beside measured times",
        "",
        f"Command: `{record['command']}`; PATH is a folder with the tables of others.",
        f"Machine of the computation: {processor['model']}, {processor['allowed_cores']} cores, {record['threads']}. "
        f"Python {versions['python']}, torch {versions['torch']}, hotloop {versions['hotloop']}.",
        "",
        "An error is |predicted / measured - 1|. Coverage is the share of measured values within the 90 % interval; the goal is 85 to "
        "95 %. Each judged run is left out of the fit of its prediction. `record.json` has every prediction and measured value.",
        "",
        "| set | n | error | goal | coverage | others, or base rate | fitted on |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(_row(row) for row in rows),
        "",
        "## Sets",
        "",
        *(
            f"- **{row['name']}.** {NOTES[row['set']]} {_earlier(row)}Judged {row['taken'][:16].replace('T', ' ')} UTC."
            for row in rows
        ),
    ]
    if missing:
        lines += [
            "",
            "## Not in this record",
            "",
            *(f"- `{name}`: {NOTES[name]} {NOT_RECORDED.get(name, '')}".strip() for name in missing),
        ]
    return "\n".join([*lines, "", WEAK])


def _earlier(row: Mapping[str, Any]) -> str:
    return f"{EARLIER[row['set']]} " if row["set"] in EARLIER and row["taken"] < CHANGED else ""


def _row(row: Mapping[str, Any]) -> str:
    goal = "" if row["must"] is None else f"{row['must']:.0%}" + ("" if row["error"] <= row["must"] else ", missed")
    coverage = "no interval" if row["coverage"] is None else f"{row['coverage']:.0%}"
    figure = f"{row['statistic']} {row['error']:.2%}"
    return f"| {row['name']} | {row['runs']} | {figure} | {goal} | {coverage} | {row['base']} | {row['fitted_on']} |"
