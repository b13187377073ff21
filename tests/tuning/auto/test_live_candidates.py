"""What `--plan auto` tries while the run trains, what earlier races exclude, and where it searches nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotloop.core.hardware.machine import machine_name, speed_versions
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.race import Timing
from hotloop.core.records.training import SourceRecord
from hotloop.core.state import differing_paths
from hotloop.lowering.build import lower
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.task_file import LoadedTask
from hotloop.tuning import auto, race_cache
from hotloop.tuning.auto import facts_with_fingerprint, list_options, lower_cached_or_auto, why_not_live
from hotloop.tuning.run_context import RunContext
from tests.support.programs import a_task, labelled
from tests.support.runs import lower_cached_or_auto as lowered
from tests.support.tuning.choices import AUTO, CPU, Samples, images
from tests.support.tuning.handmade_verdicts import timing, verdict

RECORD = SourceRecord(file="t.py", module="t", attribute="task", digest="d", reference="t.py", origin=".")
PACKAGE = Plan(compile="package")
LAID = PACKAGE.with_axes(layout="channels_last")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_cache, "races_folder", lambda: tmp_path / "races")


def tried(task: Task, wanted: PlanRequest = AUTO, **fields: Any) -> tuple[list[Plan], list[str]]:
    """Returns the candidates of the search, and the lines for the user."""
    found, said = list[Plan](), list[str]()
    program = lowered(LoadedTask(task, RECORD, {}), wanted, said.append, is_live=True, candidates=found, **fields)
    program.close()
    assert program.parts.plan.compile == wanted.plan.compile
    return found, said


def store(task: Task, *timings: Timing) -> None:
    """Stores an earlier race of the Task."""
    found = facts_with_fingerprint(LoadedTask(task, RECORD, {})).fingerprint
    here = dict(fingerprint=found, machine=machine_name(), versions=speed_versions())
    assert race_cache.save_races(verdict(*timings, **here)) == []


def test_a_long_run_tries_the_compiled_step_with_the_optimizer_of_the_task() -> None:
    assert tried(a_task(epochs=1000)) == ([PACKAGE], ["auto: optimizer=fused, from the first step on"])


def test_images_are_tried_with_channels_last_and_rewrites_first() -> None:
    both = LAID.with_axes(rewrites="all")
    assert tried(images())[0] == [both, LAID, PACKAGE.with_axes(rewrites="all"), PACKAGE]
    laid_eager = Plan(optimizer="fused", layout="channels_last")
    assert tried(images(normed=True))[0][-1] == laid_eager
    contiguous = PlanRequest(Plan(device="cpu", layout="contiguous", rewrites="none"), is_auto=True)
    assert tried(images(), contiguous)[0] == [PACKAGE], "axes that are set stay"


def test_a_short_run_tries_nothing_and_no_line_is_lost_on_it() -> None:
    assert tried(a_task()) == ([], ["auto: optimizer=fused, from the first step on"])


def test_a_run_without_a_search_compiles_nothing() -> None:
    found = list[Plan]()
    program = lowered(LoadedTask(a_task(epochs=1000), RECORD, {}), AUTO, candidates=found)
    assert program.parts.plan == Plan(optimizer="fused") and found == []


UNDECIDED: dict[str, Any] = dict(ratio_low=0.9, ratio_high=1.2, verdict="no difference", parity=None)
BEFORE: dict[str, tuple[Timing, str]] = {
    "failed": (Timing(name="", plan=PACKAGE.model_dump(), failure="no luck"), "it failed before (no luck)"),
    "broken": (timing(PACKAGE, 2.0, parity="broken", parity_reason="NaN"), "it was found broken: NaN"),
    "unproven": (
        timing(PACKAGE, 2.0, parity="unproven", parity_reason="no memory"),
        "it was found unproven: no memory",
    ),
    "slower": (timing(PACKAGE, 0.8, verdict="slower", parity=None), "it was raced before, and isn't faster"),
    "undecided for long": (
        timing(PACKAGE, 1.07, **{**UNDECIDED, "windows": 8}),
        "it was raced before for as long as a search races, and isn't clearly faster",
    ),
    "too long a start": (
        timing(PACKAGE, 2.0, compile_s=9e3, compile_warm_s=9e3),
        "it is faster and proven, and takes longer to start than it saves",
    ),
    "faster, and not proven": (timing(PACKAGE, 2.0, parity=None), ""),
    "undecided": (timing(PACKAGE, 1.07, **{**UNDECIDED, "windows": 4}), ""),
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_an_earlier_race_excludes_is_not_tried_again(name: str) -> None:
    before, why = BEFORE[name]
    task = a_task(epochs=1000)
    store(task, before)
    found, said = tried(task)
    assert (PACKAGE in found) is not bool(why), said
    told = [line for line in said if line.startswith("auto leaves out compile=package: ")]
    assert bool(told) is bool(why) and (not told or told[0].endswith(why))


def test_an_unproven_plan_is_tried_again_where_the_run_pays_for_its_proof() -> None:
    stored = race_cache.CachedRace(key={}, timing=timing(PACKAGE, 2.0, parity=None), baseline=timing(Plan(), 1.0))
    why = {steps: race_cache.RaceHistory([stored], steps).why_not_again(PACKAGE, Plan()) for steps in (500, 501, None)}
    assert why == {500: "it was raced before, and its proof takes longer than it saves", 501: "", None: ""}
    together = race_cache.RaceHistory([stored], 300, future_steps=201)
    assert together.why_not_again(PACKAGE, Plan()) == "", "runs to come profit from the proof, too"


def test_a_layout_that_lost_is_not_tried_again_with_other_rewrites() -> None:
    task = images()
    store(task, timing(LAID.with_axes(rewrites="all"), 0.8, verdict="slower", parity=None))
    assert tried(task)[0] == [PACKAGE.with_axes(rewrites="all"), PACKAGE]


def test_an_eager_plan_that_was_slower_is_no_candidate() -> None:
    task, laid = images(normed=True), Plan(optimizer="fused", layout="channels_last")
    store(task, timing(laid, 0.8, verdict="slower", parity=None))
    assert laid not in tried(task)[0]


# --- where nothing is searched

TUNE = "; --tune searches before the training"


def weighted() -> Task:
    data, sampler = torch.utils.data.TensorDataset(*labelled()), torch.utils.data.WeightedRandomSampler
    loader = torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler(torch.ones(24), 24))
    return a_task(data=loader, batch_size=None, epochs=1000)


def of_a_stream() -> Task:
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter([(torch.ones(6), 1)] * 24)

    return a_task(data=Endless(), batch_size=4)


def asking(**axes: Any) -> PlanRequest:
    return PlanRequest(Plan(device="cpu", **axes), is_auto=True)


NOT_SEARCHED: dict[str, tuple[Task, PlanRequest, dict[str, Any], str]] = {
    "resumed": (a_task(epochs=1000), AUTO, {"is_resumed": True}, "the run has begun with one plan; --tune"),
    "callback": (a_task(epochs=1000), AUTO, {"callbacks": [print]}, f"a search makes others{TUNE}"),
    "order": (weighted(), AUTO, {}, "so no other plan can be proven equal"),
    "stream": (of_a_stream(), AUTO, {}, "so no other plan can be proven equal"),
    "memory": (a_task(epochs=1000), asking(accumulation=2), {}, f"where accumulation is set{TUNE}"),
}


@pytest.mark.parametrize("name", NOT_SEARCHED)
def test_where_nothing_is_searched_one_line_gives_the_reason(name: str) -> None:
    task, wanted, fields, why = NOT_SEARCHED[name]
    found, said = tried(task, wanted, **fields)
    (line,) = (line for line in said if line.startswith("auto searches for no faster plan beside this training: "))
    assert found == [] and why in line
    assert said[-1].startswith("auto: ") and "from the first step on" not in said[-1]


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(device="cuda:0"), f"a fork can't use cuda:0{TUNE}"),
        (Plan(device="cpu", parallel="data"), "several processes train together; --tune searches before a training"),
        (Plan(device="cpu", precision="bf16"), f"where precision is set{TUNE}"),
    ],
)
def test_other_devices_ranks_and_fewer_bits_have_their_reasons(
    plan: Plan, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = LoadedTask(a_task(epochs=1000), None, {})
    monkeypatch.setattr(auto, "resolve_device", lambda plan: plan)
    facts = facts_with_fingerprint(loaded)
    assert why in why_not_live(RunContext(loaded, wanted=PlanRequest(plan, is_auto=True)), facts)


def test_a_system_without_fork_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    found, said = tried(a_task(epochs=1000))
    assert found == [] and f"can't fork the process that compiles{TUNE}" in said[0]


def test_a_stored_plan_is_taken_where_nothing_is_searched() -> None:
    task = a_task(epochs=1000)
    store(task, timing(Plan(threads=1), 2.0))
    found, said = tried(task, is_resumed=True)
    assert found == [] and said == ["auto: threads=1, stored as the fastest that is proven equal"]


class Reader(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[:, None])[0][:, -1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_not_compiled(kind: type[nn.Module]) -> None:
    task = a_task(model=lambda: Reader(kind(6, 4, batch_first=True)), epochs=1000)
    choices = list_options(task, CPU).choices
    assert {choice.plan.compile for choice in choices} == {"none"}
    assert any("compile=none: a captured step unrolls recurrent layers" in why for why in choices[0].why)
    found, said = tried(task)
    assert found == [] and len([line for line in said if "recurrent layers" in line]) == 1
    assert list_options(task, Plan(device="cpu", compile="step")).choices[0].plan.compile == "step"  # asked for


def test_the_choice_asks_the_data_for_few_samples() -> None:
    data = Samples()
    context = RunContext(LoadedTask(a_task(data=data, epochs=1), None, {}), wanted=AUTO)
    program = lower_cached_or_auto(context)
    fresh = lower(a_task(data=Samples(), epochs=1), program.parts.plan)
    assert len(data.asked) <= 2 + 2 + 5 + 2
    assert differing_paths(program.state(), fresh.state()) == []
