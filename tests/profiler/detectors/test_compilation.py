"""Compiling is a remedy where a measurement found a gain, and never a guess; one cost is told once."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.core.records.profile import (
    CompiledNetwork,
    HardwareLimits,
    LineTime,
    ModuleTime,
    Profile,
    TimeOutsideSteps,
)
from hotloop.profiler.detectors import diagnose
from hotloop.profiler.detectors.small_ops import MANY_SMALL_OPERATIONS
from hotloop.profiler.operator_cost import with_limit_shares
from hotloop.report.profile import NOTHING
from tests.report.test_profile import shown
from tests.support.profiler.handmade_steps import as_task, loader, operator, remedies, seen


def said(profile: Profile) -> str:
    return " ".join(shown(profile, width=1000).split())


def overhead(**fields: Any) -> Profile:
    ones = [operator("mul", 0.02, 2, module=f"net.{n}", where=f"net.py:{n}") for n in range(200)]
    return seen({"forward": 8.0}, operators=ones, **fields)


def test_without_a_measurement_compiling_is_one_line_outside_of_the_remedies() -> None:
    found = diagnose(overhead())
    assert found.remedies == [] and [one.cause for one in found.candidates] == [MANY_SMALL_OPERATIONS]
    [line] = found.advice
    assert line.startswith("Starting operations one by one takes up to") and line.endswith("--try measures it.")
    assert NOTHING not in said(found) or line in said(found)


def test_a_measured_gain_is_a_remedy_with_that_gain() -> None:
    race = CompiledNetwork(ratio=1.6, low=1.4, high=1.8, pairs=40, compile_s=12.0, network="Net")
    found = diagnose(overhead(compiled=race))
    [remedy] = found.remedies
    assert remedy.cause == MANY_SMALL_OPERATIONS and remedy.won == (1.6, 1.4, 1.8)
    share = sum(found.phases[phase] for phase in ("forward", "backward")) / 10.0
    assert remedy.gain == pytest.approx(share * (1 - 1 / 1.6))
    assert found.candidates == [] and found.advice == []


@pytest.mark.parametrize(
    ("race", "says"),
    [
        (CompiledNetwork(ratio=0.73, low=0.70, high=0.76, network="Net"), "Compiling is no remedy here."),
        (CompiledNetwork(ratio=1.02, low=0.98, high=1.06, network="Net"), "1.02 times as fast (0.98 to 1.06)"),
        (
            CompiledNetwork(failure="compiling did not finish within 30 s"),
            "was not measured: compiling did not",
        ),
    ],
)
def test_without_a_measured_gain_compiling_is_no_remedy(race: CompiledNetwork, says: str) -> None:
    found = diagnose(overhead(compiled=race))
    assert found.remedies == [] and found.candidates == []
    assert says in found.advice[0]


def test_no_remedy_guesses_that_another_way_gives_the_same() -> None:
    sort = operator("sort", 6.0, where="net.py:44", flops=0.0, bytes=1e6)
    draws = operator("bernoulli_", 6.0, where="net.py:44", flops=0.0, bytes=1e6)
    [remedy] = remedies(seen(operators=[sort]))
    assert "torch.compile" not in remedy.remedy and "another operation" not in remedy.remedy
    assert not [one for one in remedies(seen(operators=[draws])) if "takes much" in one.cause]  # drawing is wanted


def test_a_task_is_told_to_look_for_a_plan_where_nothing_was_found() -> None:
    found = diagnose(as_task(seen()))
    assert "compile=package may win. Run hotloop tune." in said(found) and NOTHING not in said(found)
    assert NOTHING in said(diagnose(seen()))


def test_a_task_is_not_told_to_change_how_hotloop_loads() -> None:
    [script], [of_task] = (remedies(one) for one in (seen({"data": 6.0}), as_task(seen({"data": 6.0}))))
    assert "before the loop" in script.remedy
    assert "before the loop" not in of_task.remedy and "hotloop tune" in of_task.remedy


@pytest.mark.parametrize(
    ("data", "cores", "busy", "least", "wins"),
    [
        (6.0, 4, 1.0, "4.00 ms", "60 %"),  # all else
        (9.0, 2, 0.5, "4.50 ms", "55 %"),  # loading over the workers, which wait for a disk
        (6.0, 2, 1.0, "5.00 ms", "50 %"),  # the work of both over the cores
        (6.0, 4, 3.0, "7.50 ms", "25 %"),  # operations of several threads need the same cores
    ],
)
def test_what_workers_win_has_a_ceiling(data: float, cores: int, busy: float, least: str, wins: str) -> None:
    """The longest of loading over the workers, of all else, and of all work over the cores, in a step of 10 ms."""
    threads = dict(torch=1, cores=cores, busy=busy, others=0.0)
    slow = loader(sample_ms=data / 64, sample_where="data.py:5")
    [remedy] = remedies(seen({"data": data}, loaders=[slow], threads=threads, samples_per_step=64))
    assert f"num_workers={cores}, persistent_workers=True), which wins up to {wins}" in remedy.remedy
    assert f"a step then takes {least} at least" in remedy.remedy


def test_workers_are_no_remedy_on_one_busy_core() -> None:
    threads = dict(torch=1, cores=1, busy=1.0, others=0.0)
    slow = loader(sample_ms=0.1, sample_where="data.py:5")
    [remedy] = remedies(seen({"data": 6.4}, loaders=[slow], threads=threads, samples_per_step=64))
    assert "before training" in remedy.remedy and "workers" not in remedy.remedy


@pytest.mark.parametrize("busy", ["", "The machine is busy: other programs kept 1.0 of 2 cores busy."])
def test_on_a_busy_machine_remedies_by_absolute_speed_are_withheld(busy: str) -> None:
    sort = operator("sort", 6.0, where="net.py:44", flops=0.0, bytes=1e6)
    found = diagnose(seen(operators=[sort], busy=busy))
    assert bool([one for one in found.remedies if "takes much" in one.cause]) is not bool(busy)
    if busy:
        assert said(found).startswith(busy)


def test_limits_measured_under_load_rank_nothing() -> None:
    sort = operator("sort", 6.0, where="net.py:44", flops=0.0, bytes=1e6)
    quiet = seen(operators=[sort])
    loaded = quiet.model_copy(update={"limits": quiet.limits.model_copy(update={"busy": True})})
    assert remedies(quiet) and not remedies(loaded)
    assert "hotloop devices --refresh" in " ".join(diagnose(loaded).bound_evidence)


@pytest.mark.parametrize(("rate", "share"), [(1e9, 0.5), (1e6, None)])
def test_no_module_reaches_more_than_a_limit(rate: float, share: float | None) -> None:
    """A limit that a module exceeds is none for what comes from caches."""
    module = ModuleTime(name="own", kind="Net", calls=1, forward_ms=2.0, backward_ms=0.0, share=0.2, flops=1e6)
    one = operator("mul", 2.0, module="own", phase="forward", flops=1e6, bytes=None)
    limits = HardwareLimits(flop_per_s={"fp32": rate})
    [found] = with_limit_shares(
        seen(operators=[one]).model_copy(update={"modules": [module], "limits": limits})
    ).modules
    assert found.limit_share == share


def test_one_cost_is_told_at_one_line() -> None:
    """A line of the loop calls a function whose line takes all of that time."""
    lines = [
        LineTime(where="train.py:20", function="main", phase="python", ms=4.0, own_ms=2.0, looks=100),
        LineTime(
            where="help.py:5", function="helper", phase="python", ms=2.0, own_ms=2.0, within="train.py:20", looks=100
        ),
    ]
    found = [one.where for one in remedies(seen({"python": 4.0}, lines=lines)) if not one.note]
    assert found.count("train.py:20") + found.count("help.py:5") == 1, found


def test_the_update_has_one_number_on_the_page() -> None:
    """What torch's profiler marks around an update is a part of its time, and no operator."""
    mark = operator("x", 1.46, phase="update").model_copy(update={"name": "Optimizer.step#Adam.step"})
    page = said(seen({"update": 2.0}, operators=[mark, operator("mul", 1.0)]))
    assert "1.46 ms" not in page and "Optimizer.step#" not in page and "mul" in page


@pytest.mark.parametrize(("other_s", "says"), [(1.8, "75 % of the time. Gains"), (0.1, "")])
def test_work_between_steps_has_a_line_if_it_takes_much_of_the_time(other_s: float, says: str) -> None:
    profile = seen(steps=60).model_copy(update={"apart": TimeOutsideSteps(other_s=other_s)})
    said_of_it = [line for line in diagnose(profile).advice if "Other work between steps" in line]
    assert bool(said_of_it) is bool(says) and all(says in line for line in said_of_it)
