"""What is said of what a step waits for: samples, loaders, and the size of the batch."""

from __future__ import annotations

import pytest

from tests.unit.made_steps import first, line, loader, loop, operator, product, remedies, seen


def test_the_batch_itself_must_come_to_the_device() -> None:
    assert remedies(seen(operators=[operator("to", 0.001, where="train.py:6", phase="python")])) == []


def test_making_samples_one_by_one_is_said_of_the_loader_alone() -> None:
    found = remedies(seen({"data": 3.0}, loaders=[loader()], operators=loop(64, 0.015, phase="data")))
    assert found[0].cause.startswith(("slow samples", "per-sample loading"))
    assert not [one for one in found if "Python loop" in one.cause]


def test_samples_that_take_long_take_as_long_in_a_larger_batch() -> None:
    def gain(sample_ms: float) -> float:
        loaders = [loader(workers=0, batch_size=16, sample_ms=sample_ms)]
        found = remedies(seen({"data": 8.0}, samples_per_step=16, loaders=loaders))
        return max((one.gain for one in found if one.cause.startswith("too small a batch")), default=0.0)

    assert gain(sample_ms=0.5) < 0.1 < gain(sample_ms=0.0001)


@pytest.mark.parametrize(("own_ms", "named"), [(5.0, True), (0.0, False), (1.0, False)])
def test_a_line_takes_most_of_a_wait_only_if_it_does_so_itself(own_ms: float, named: bool) -> None:
    lines = [line("data", own_ms, "data.py:6", ms=6.0), line("data", 6.0 - own_ms, "train.py:8")]
    found = first(seen({"data": 6.0}, loaders=[loader(workers=2)], lines=lines))
    assert ("data.py:6 takes most of it" in found.remedy) is named


@pytest.mark.parametrize(
    ("samples", "calling_ms", "named"),
    [(2, 1.4, False), (2, 3.0, True), (31, 4.0, False), (31, 6.0, True), (64, 6.0, False), (64, 8.0, True)],
)
def test_how_small_a_batch_is_follows_from_what_calling_costs(samples: float, calling_ms: float, named: bool) -> None:
    calls = [
        operator("mul", 0.003, phase="forward", module=f"net.{n}", where=f"net.py:{n}", bytes=1.0)
        for n in range(round(calling_ms / 0.003))
    ]
    each = 10.0 - calling_ms
    work = operator("addmm", each, phase="backward", module="net", flops=each * 1e8, bytes=1e5)
    profile = seen({"forward": calling_ms, "backward": 10.0 - calling_ms}, samples_per_step=samples)
    found = remedies(profile.model_copy(update={"operators": [*calls, work]}))
    assert any(one.cause.startswith("too small a batch") for one in found) is named


def test_a_loader_that_puts_many_samples_together_makes_no_batch_too_small() -> None:
    def named(samples: int) -> bool:
        loaders = [loader(batch_size=samples, sample_ms=0.001)]
        found = remedies(seen({"data": 8.0}, samples_per_step=samples, loaders=loaders))
        return any(one.cause.startswith("too small a batch") for one in found)

    assert (named(8), named(64)) == (True, False)


@pytest.mark.parametrize(("sample_ms", "where"), [(0.001, "collate.py:9"), (0.09, "data.py:5")])
def test_what_puts_samples_together_is_told_from_what_makes_them(sample_ms: float, where: str) -> None:
    lines = [line("data", 5.0, "collate.py:9", function="packed"), line("data", 1.0, "train.py:8")]
    found = first(seen({"data": 6.0}, loaders=[loader(sample_ms=sample_ms)], lines=lines))
    assert found.cause.startswith("slow samples") and found.where == where


def test_whole_batches_that_take_long_may_take_longer_where_they_are_larger() -> None:
    def gain(batch_ms: float) -> float:
        loaders = [loader(batch_size=None, at_once=True, sample_ms=batch_ms)]
        found = remedies(seen({"data": 8.0}, samples_per_step=16, loaders=loaders))
        return max((one.gain for one in found if one.cause.startswith("too small a batch")), default=0.0)

    assert gain(batch_ms=7.9) < 0.1 < gain(batch_ms=1.0)  # 16 times 1 ms would be more than all of the wait


def test_calls_of_a_loop_are_not_the_batchs_fault() -> None:
    found = remedies(seen({"forward": 9.0}, samples_per_step=8, operators=loop(100, 0.02)))
    assert [one.where for one in found if one.cause.startswith("many tiny kernels")] == ["net.py:7"]
    assert not [one for one in found if one.cause.startswith("too small a batch")]


def test_what_held_a_few_large_operators_up_is_not_the_batchs_fault() -> None:
    ones = [product(1.0, phase=phase, module="net") for phase in ("forward", "backward")]
    found = remedies(seen({"forward": 4.0, "backward": 6.0}, samples_per_step=2).model_copy(update={"operators": ones}))
    assert not [one for one in found if one.cause.startswith("too small a batch")]


def test_the_loops_own_python_is_not_the_batchs_fault() -> None:
    found = remedies(seen({"python": 4.0, "batch": 2.0}, samples_per_step=4, lines=[line("python", 4.0)]))
    assert not [one for one in found if one.cause.startswith("too small a batch")]
