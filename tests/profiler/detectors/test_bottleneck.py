"""What bounds a step, of one process and of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.core.records.profile import HardwareLimits, Profile, RankTime
from hotloop.profiler.detectors import diagnose
from tests.support.profiler.handmade_steps import first, operator, remedies, seen

BOUNDS: dict[str, Profile] = {
    "input": seen({"data": 7.0}),
    "copy": seen({"copy": 7.0}),
    "synchronisation": seen({"synchronisation": 7.0}),
    "communication": seen({"communication": 7.0}),
    "waiting": seen({"waiting": 7.0}),
    "overhead": seen({"python": 7.0}),
    "arithmetic": seen(),
    "memory bandwidth": seen({"forward": 8.0}, operators=[operator("relu", 7.0, flops=1e6, bytes=5e7)]),
}


@pytest.mark.parametrize("bound", BOUNDS)
def test_what_bounds_the_step(bound: str) -> None:
    found = diagnose(BOUNDS[bound])
    assert found.bound == bound
    assert any(bound in sentence and "%" in sentence for sentence in found.bound_evidence)


def test_many_small_operations_are_overhead() -> None:
    small = [operator("mul", 0.004, 1, module=f"net.{n}", phase="backward") for n in range(2000)]
    profile = seen({"forward": 1.0, "backward": 9.0}, operators=small)
    assert diagnose(profile).bound == "overhead"


def test_how_far_it_is_from_the_limit_is_said() -> None:
    assert any("50 %" in sentence for sentence in diagnose(seen()).bound_evidence)
    unmeasured = seen().model_copy(update={"limits": HardwareLimits()})
    assert diagnose(unmeasured).limit_ms is None


def of_ranks(*phases: dict[str, float], slowest: int | None = 1, plan: str = "parallel=data ranks=2") -> Profile:
    """Of the first rank, whose phases stand first."""
    ranks = [RankTime(step_ms=sum(one.values()), phases=one) for one in phases]
    return seen(dict(phases[0]), plan=plan, ranks=ranks, slowest=slowest)


def axes_of(profile: Profile) -> list[dict[str, Any]]:
    return [one.axes for one in remedies(profile) if one.axes]


def test_a_rank_that_others_wait_for_is_named_with_what_it_does_longer() -> None:
    quick, slow = {"waiting": 6.0, "forward": 4.0, "data": 0.1}, {"waiting": 0.5, "forward": 4.0, "data": 5.6}
    named = first(of_ranks(quick, slow))
    assert (named.cause, named.gain) == ("waiting: rank 1 is slower than the others", pytest.approx(0.55))
    assert "Rank 1 spends 5.5 ms more in data" in named.evidence
    # The slowest may be the one that speaks.
    assert any("rank 0 is slower" in one.cause for one in remedies(of_ranks(slow, quick, slowest=0)))
    assert not [one for one in remedies(of_ranks(quick, quick, slowest=0)) if "slower" in one.cause]


def test_what_ranks_send_is_spared_by_another_plan_or_by_one_process() -> None:
    heavy = {"communication": 4.0, "forward": 2.0, "backward": 4.0}
    assert axes_of(of_ranks(heavy, heavy)) == [{"parallel": "local"}]
    light = {"communication": 8.0, "forward": 1.0, "backward": 1.0}
    assert axes_of(of_ranks(light, light)) == [{"parallel": "local"}, {"parallel": "none", "ranks": 1}]
    alone = next(one for one in remedies(of_ranks(light, light)) if one.axes.get("ranks") == 1)
    assert alone.gain == pytest.approx(0.6)  # 10 ms - 8 ms + 2 ms of the other rank's
    assert axes_of(of_ranks(light, light, plan="parallel=tensor ranks=2")) == []
    assert axes_of(seen({"communication": 8.0}, plan="baseline")) == []


def test_stages_that_wait_get_more_microbatches() -> None:
    idle = {"waiting": 5.0, "forward": 2.0, "backward": 3.0}
    assert axes_of(of_ranks(idle, idle, plan="parallel=stages ranks=2")) == [{"microbatches": 16}]
    assert axes_of(of_ranks(idle, idle, plan="parallel=stages ranks=2 microbatches=3")) == [{"microbatches": 6}]


@pytest.mark.parametrize(("fields", "named"), [({}, True), ({"shapes": ["64"]}, False), ({"function": "other"}, False)])
def test_the_zeros_that_are_scattered_into_count_with_the_scatter(fields: dict[str, Any], named: bool) -> None:
    given = dict(phase="backward", function="Pool.backward", shapes=["16x48x1024"])
    zeros = operator("zero_", 1.0, **(given | dict(where="pool.py:7") | fields))
    scatter = operator("scatter_", 0.2, **(given | dict(where="pool.py:8")))
    found = remedies(seen({"backward": 5.0}, operators=[zeros, scatter]))
    assert [one.where for one in found if "scatter" in one.cause] == ["pool.py:8"] * named


@pytest.mark.parametrize(
    ("fields", "named"),
    [({}, True), ({"shapes": ["64"]}, False), ({"function": "other"}, False), ({"dtype": "float32"}, False)],
)
def test_what_works_out_the_index_counts_with_the_scatter(fields: dict[str, Any], named: bool) -> None:
    given = dict(phase="backward", function="Pool.backward")
    index = operator("add", 1.0, **(given | dict(where="pool.py:7", shapes=["320x196"] * 2, dtype="") | fields))
    shapes = ["250880", "62720"]
    scatter = operator("_index_put_impl_", 0.2, **(given | dict(where="pool.py:8", shapes=shapes, dtype="float32")))
    found = remedies(seen({"backward": 5.0}, operators=[index, scatter]))
    assert [one.where for one in found if "scatter" in one.cause] == ["pool.py:8"] * named
