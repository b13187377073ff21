"""What is said of what a step waits for: samples, loaders, and the size of the batch."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.core.records.profile import ThreadUse
from hotloop.core.records.profile_terms import SlowPattern
from tests.support.profiler.handmade_steps import first, line, loader, loop, operator, product, remedies, seen


def test_the_batch_itself_must_come_to_the_device() -> None:
    assert remedies(seen(operators=[operator("to", 0.001, where="train.py:6", phase="python")])) == []


def test_making_samples_one_by_one_is_said_of_the_loader_alone() -> None:
    found = remedies(seen({"data": 3.0}, loaders=[loader()], operators=loop(64, 0.015, phase="data")))
    assert found[0].cause.startswith(("slow samples", "per-sample loading"))
    assert not [one for one in found if "Python loop" in one.cause]


@pytest.mark.parametrize(
    ("stream", "said"), [(False, "a BatchSampler as the sampler"), (True, "hand out whole batches")]
)
def test_a_stream_has_no_sampler_to_give_it_whole_batches(stream: bool, said: str) -> None:
    found = first(seen({"data": 3.0}, loaders=[loader(sample_where="", stream=stream, sample_ms=0.001)]))
    assert found.cause.startswith("per-sample loading") and said in found.remedy and "batch_size=None" in found.remedy


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
    together = loader(sample_ms=sample_ms, collate_where="collate.py:8")
    found = first(seen({"data": 6.0}, loaders=[together], lines=lines))
    assert found.cause.startswith("slow samples") and found.where == where


@pytest.mark.parametrize("collate_where", ["", "collate.py:8"])
def test_what_a_sample_calls_is_the_sample_however_short_the_timed_ones_were(collate_where: str) -> None:
    lines = [
        line("data", 0.1, "data.py:7", function="Files.__getitem__", within="train.py:8"),
        line("data", 5.0, "data.py:20", function="turned", within="data.py:7"),
        line("data", 0.2, "train.py:8"),
    ]
    found = first(seen({"data": 6.0}, loaders=[loader(sample_ms=0.001, collate_where=collate_where)], lines=lines))
    assert found.cause == "slow samples: they are loaded one by one" and found.where == "data.py:5"


def test_a_transform_of_a_librarys_data_set_is_not_said_to_put_a_batch_together() -> None:
    lines = [line("data", 5.0, "train.py:4", function="turned", within="train.py:8"), line("data", 0.2, "train.py:8")]
    found = first(seen({"data": 6.0}, loaders=[loader(sample_ms=0.001, sample_where="train.py:8")], lines=lines))
    assert found.cause == "slow samples: they are loaded one by one" and found.where == "train.py:4"


def test_what_makes_samples_is_not_said_to_put_them_together_where_they_take_longer_than_was_timed() -> None:
    lines = [line("data", 5.0, "data.py:7", function="main.<locals>.Texts.__getitem__.<locals>.<listcomp>")]
    found = first(seen({"data": 6.0}, loaders=[loader(sample_ms=0.02)], lines=lines))
    assert found.cause == "slow samples: they are loaded one by one" and found.where == "data.py:5"


def test_whole_batches_that_take_long_may_take_longer_where_they_are_larger() -> None:
    def gain(batch_ms: float) -> float:
        loaders = [loader(batch_size=None, at_once=True, sample_ms=batch_ms)]
        found = remedies(seen({"data": 8.0}, samples_per_step=16, loaders=loaders))
        return max((one.gain for one in found if one.cause.startswith("too small a batch")), default=0.0)

    assert gain(batch_ms=7.9) < 0.1 < gain(batch_ms=1.0)  # 16 times 1 ms would be more than all of the wait


@pytest.mark.parametrize(
    ("fields", "proposed"),
    [
        ({}, "32 or more"),
        ({"one_batch": True}, ""),
        ({"loaders": [loader(samples=2, batch_size=2)]}, ""),
        ({"loaders": [loader(samples=20, batch_size=2)]}, "20"),
        ({"loaders": [loader(samples=1, batch_size=None, at_once=True)]}, ""),
        ({"loaders": [loader(samples=500, batch_size=2)]}, "32 or more"),
    ],
)
def test_no_batch_can_be_larger_than_all_there_is(fields: dict[str, Any], proposed: str) -> None:
    ones = [operator("mul", 0.02, 2, module=f"net.{n}", where=f"net.py:{n}") for n in range(200)]
    found = remedies(seen({"forward": 8.0}, samples_per_step=2, operators=ones, **fields))
    said = [one.remedy for one in found if one.cause.startswith("too small a batch")]
    assert [text.partition(" samples")[0] for text in said] == [f"a batch of {proposed}"] * bool(proposed)


@pytest.mark.parametrize(
    ("samples", "first"), [(4, "too small a batch"), (8, "per-sample loading"), (64, "per-sample loading")]
)
def test_what_leaves_the_training_as_it_is_comes_before_a_batch_that_is_not_that_small(
    samples: int, first: str
) -> None:
    ones = [operator("mul", 0.02, 2, module=f"net.{n}", where=f"net.py:{n}") for n in range(200)]
    fields = dict(samples_per_step=samples, operators=ones, loaders=[loader(batch_size=samples, sample_ms=0.001)])
    found = [
        one for one in remedies(seen({"forward": 8.0, "data": 1.0}, **fields)) if "started one by one" not in one.cause
    ]
    causes = [one.cause.partition(":")[0] for one in found]
    assert causes[0] == first and ("too small a batch" in causes) is (samples < 32)
    assert found == sorted(found, key=lambda one: (one.note, -one.gain))


def test_calls_of_a_loop_are_not_the_batchs_fault() -> None:
    found = remedies(seen({"forward": 9.0}, samples_per_step=8, operators=loop(100, 0.02)))
    assert [one.where for one in found if one.cause.startswith("many tiny kernels")] == ["net.py:7"]
    assert not [one for one in found if one.cause.startswith("too small a batch")]


def test_what_held_a_few_large_operators_up_is_not_the_batchs_fault() -> None:
    ones = [product(1.0, phase=phase, module="net") for phase in ("forward", "backward")]
    found = remedies(seen({"forward": 4.0, "backward": 6.0}, samples_per_step=2).model_copy(update={"operators": ones}))
    assert not [one for one in found if one.cause.startswith("too small a batch")]


@pytest.mark.parametrize(
    ("samples", "spent_ms", "first"), [(2, 2.0, "too"), (8, 0.2, "too"), (8, 2.0, "logging"), (20, 2.0, "logging")]
)
def test_a_small_batch_gives_way_to_what_leaves_the_training_as_it_is(
    samples: int, spent_ms: float, first: str
) -> None:
    ones = [operator("mul", 0.02, 2, module=f"net.{n}", where=f"net.py:{n}") for n in range(200)]
    fields = dict(samples_per_step=samples, operators=ones, lines=[line("logging", spent_ms)])
    found = remedies(seen({"forward": 9.0 - spent_ms, "logging": spent_ms}, **fields))
    assert found[0].cause.startswith(first)
    assert [one.note for one in found if one.cause.startswith("too small a batch")] == [first != "too"]


def test_the_loops_own_python_is_not_the_batchs_fault() -> None:
    found = remedies(seen({"python": 4.0, "batch": 2.0}, samples_per_step=4, lines=[line("python", 4.0)]))
    assert not [one for one in found if one.cause.startswith("too small a batch")]


def test_of_several_loaders_the_one_is_named_whose_samples_take_longest() -> None:
    fast = loader(sample_ms=0.001, sample_where="fast.py:1", batch_size=16)
    slow = loader(sample_ms=0.3, sample_where="slow.py:1", batch_size=16)
    rare = loader(sample_ms=3.0, sample_where="validation.py:1", batch_size=16, share=0.02)
    found = first(seen({"data": 6.0}, loaders=[fast, slow, rare], samples_per_step=16))
    assert found.cause.startswith("slow samples") and found.where == "slow.py:1"


def test_of_several_loaders_one_may_be_slow_whose_samples_nobody_timed() -> None:
    fast = loader(sample_ms=0.001, sample_where="fast.py:1", batch_size=16)
    unknown = loader(workers=2, sample_where="unknown.py:1", batch_size=16)
    found = first(seen({"data": 6.0}, loaders=[fast, unknown], samples_per_step=16))
    assert "2 workers" in found.cause and found.where == "unknown.py:1"


def test_samples_that_a_library_makes_are_told_of_at_the_loader_or_at_a_line_of_the_users() -> None:
    use = loader(sample_ms=0.09, sample_where="train.py:8")
    assert first(seen({"data": 6.0}, loaders=[use])).where == "train.py:8"
    found = first(seen({"data": 6.0}, loaders=[use], lines=[line("data", 5.0, "transform.py:3")]))
    assert found.cause.startswith("slow samples: they are loaded one by one") and found.where == "transform.py:3"


def test_what_workers_do_is_not_said_to_have_been_measured() -> None:
    use = loader(workers=2, collate_where="collate.py:9")
    found = first(seen({"data": 6.0}, loaders=[use]))
    assert found.where == use.where and "collate_fn for each batch (collate.py:9)" in found.remedy
    assert "are not measured apart" in found.evidence and "more workers than 2" in found.remedy


def test_a_short_step_with_workers_is_told_to_load_in_the_process() -> None:
    profile = seen({"data": 6.0}, loaders=[loader(workers=2, sample_where="")])
    short = profile.model_copy(
        update={"step_ms": 1.0, "phases": {phase: ms / 10 for phase, ms in profile.phases.items()}, "operators": []}
    )
    found = first(short)
    assert "num_workers=0" in found.remedy and "more workers" not in found.remedy and found.where == "train.py:8"


@pytest.mark.parametrize("workers", [2, 4])
def test_no_more_workers_than_cores_are_proposed(workers: int) -> None:
    threads = ThreadUse(torch=2, cores=2, busy=2.0, others=0.0)
    assert (
        "more workers than cores don't help"
        in first(seen({"data": 6.0}, loaders=[loader(workers=workers)], threads=threads)).remedy
    )


ANEW = dict(opened=1.0, opening_ms=5.0, opened_where="train.py:7", batches=100)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_each_step_opens_is_named_and_nothing_else_of_it(workers: int) -> None:
    found = remedies(seen({"data": 5.2}, loaders=[loader(workers=workers, **ANEW)]))
    assert [(one.cause, one.where) for one in found] == [("a DataLoader is opened anew at each step", "train.py:7")]
    assert found[0].gain == pytest.approx(0.5)


@pytest.mark.parametrize(
    "fields",
    [{"opened": 0.1}, {"batches": 1}, {"draws": 60.0}, {"batches": 2, "opened": 0.5}, {"batches": 1, "draws": 1.0}],
)
def test_an_epoch_that_a_step_or_two_take_in_is_none_that_is_opened_in_vain(fields: dict[str, Any]) -> None:
    found = remedies(seen({"data": 5.2}, loaders=[loader(**ANEW | fields)]))
    assert found and not any("opened anew" in one.cause for one in found)


def test_what_opening_leaves_of_the_wait_is_told_as_well() -> None:
    causes = [one.cause for one in remedies(seen({"data": 8.0}, loaders=[loader(sample_ms=0.04, **ANEW)]))]
    assert causes[0].startswith("a DataLoader is opened") and causes[1].startswith("slow samples")


def test_of_several_loaders_what_counts_is_how_many_batches_a_step_draws() -> None:
    often = loader(sample_ms=0.05, sample_where="often.py:1", batch_size=16, draws=8.0)
    large = loader(sample_ms=0.05, sample_where="large.py:1", batch_size=32)
    assert first(seen({"data": 6.0}, loaders=[large, often])).where == "often.py:1"


def test_what_an_evaluation_waits_for_is_no_wait_of_the_training() -> None:
    training = loader(sample_ms=0.001)
    held = loader(sample_ms=0.06, sample_where="held.py:1", evaluating_ms=4.0)
    habit = SlowPattern(what="evaluation", where="train.py:18", per_step=4.0, ms=1.0)
    found = remedies(seen({"data": 4.2}, loaders=[training, held], habits=[habit]))
    assert [one.where for one in found] == ["train.py:18"] and found[0].gain == pytest.approx(0.5)
    assert first(seen({"data": 4.2}, loaders=[training, held])).where == "held.py:1"
