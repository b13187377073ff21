"""The public functions that predict steps and compare machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hotloop.advisor.chips import find_chip
from hotloop.advisor.estimate import Estimate, parse_plan
from hotloop.advisor.estimate import estimate as estimate_costs
from hotloop.advisor.prices import read_prices
from hotloop.core.format import parse_seconds
from hotloop.core.records.advice import HardwareAdvice
from hotloop.core.reporter import Say
from hotloop.errors import TaskError, type_name
from hotloop.hardware_advice.task_advice import AdviceRequest, advise_task
from hotloop.plan import Plan
from hotloop.profiler.step_costs.trace import trace_step
from hotloop.task import Parameters, Task
from hotloop.task_file import LoadedTask


def advise(
    task: Task,
    *,
    chips: Sequence[str] = (),
    gpus: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    deadline: str | None = None,
    budget: float | None = None,
    prices: str | Path | None = None,
    precision: str = "fp32",
    plan: Plan | str = "baseline",
    carbon: float | None = None,
    say: Say = lambda line: None,
) -> HardwareAdvice:
    """Returns which hardware a Task needs: predicted steps, run times, memory and costs of machines, and the answer.

    The step is traced without memory. This machine's own step is measured where that takes a few seconds.

    Args:
        chips: names of chips, such as `["RTX 4090", "H100"]`; a few common ones by default.
        gpus: numbers of chips in a machine; 1 by default, and more where a single chip isn't enough.
        batch_sizes: rows of a step; the Task's by default.
        deadline: longest run, such as `8h`.
        budget: highest cost of the run.
        prices: a CSV file with columns `name` and `price per hour`; the package's dated US dollars by default.
        precision: of products: fp32, tf32, fp16, bf16 or fp8.
        plan: of the step: a Plan, `baseline`, or axes such as `compile=step`.
        carbon: grams of CO2 per kWh.
        say: reports stored predictions that can't be used.

    Raises:
        HotloopError: an unknown chip, precision or plan, prices that can't be read, or a step that can't be traced.
    """
    if not isinstance(task, Task):
        raise TaskError(f"advise got {type_name(task)}", expected="a hotloop.Task", fix="see hotloop.estimate_step")
    request = AdviceRequest(
        chips=tuple(chips),
        gpus=tuple(gpus),
        batch_sizes=tuple(batch_sizes),
        deadline_s=None if deadline is None else parse_seconds(deadline, "deadline"),
        budget=budget,
        prices=None if prices is None else read_prices(prices),
        precision=precision,
        plan=parse_plan(plan),
        carbon_g_per_kwh=carbon,
    )
    return advise_task(LoadedTask(task, None, {}), request, say=say)


def estimate_step(
    task_or_model: Task | nn.Module | Callable[[], nn.Module],
    inputs: Any = None,
    chip: str = "H100 SXM",
    precision: str = "fp32",
    plan: Plan | str = "baseline",
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[Parameters], Optimizer] | None = None,
    gpus: int = 1,
) -> Estimate:
    """Returns the predicted time and memory of a training step on a chip that needn't be here.

    Args:
        task_or_model: a Task; a module; or a factory of a module, which is called without memory.
        inputs: of a module, an example batch: a tensor, a tuple of positional arguments or a dict of keyword arguments;
            with `loss`, the last of a tuple is the target. Shapes and dtypes count, values don't.
        chip: name, such as `RTX 4090`, or a CPU as `cpu 16 cores avx512 2.5 GHz`.
        precision: of products: fp32, tf32, fp16, bf16 or fp8.
        plan: a Plan, `baseline`, or axes such as `compile=step graphs=32`.
        loss: `loss(output, target)`; default the output's `loss`, else the mean of the output.
        optimizer: a factory as in a Task; default Adam.
        gpus: chips that share the batch by data parallelism.

    Returns:
        `step_ms` with the 90 % interval `low_ms` to `high_ms`, `memory_bytes` of each chip, `parts` in milliseconds, and
        `source`, what the prediction rests on.

    Raises:
        HotloopError: an unknown chip, precision or plan, or a step that can't be traced.
    """
    plan, place = parse_plan(plan), find_chip(chip)
    device = "cpu" if place.kind == "cpu" else "cuda"
    costs = trace_step(task_or_model, inputs, loss=loss, optimizer=optimizer, plan=plan, device=device)
    return estimate_costs(costs, place, precision, plan, gpus)
