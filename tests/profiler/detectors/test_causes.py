"""What a profile's facts are taken to mean: each cause with the fault. Records are made by hand."""

from __future__ import annotations

import pytest

from hotloop.core.records.profile import ModuleTime, PagingRecord, Profile, Remedy, ThreadUse
from hotloop.core.records.profile_terms import SlowPattern
from hotloop.profiler.detectors import diagnose
from tests.support.profiler.handmade_steps import (
    STEP_MS,
    adam,
    each_once,
    first,
    line,
    loader,
    loop,
    operator,
    remedies,
    seen,
    table,
)


def test_a_well_made_step_has_no_remedy() -> None:
    found = diagnose(seen())
    assert found.remedies == []
    assert found.bound == "arithmetic"
    assert found.limit_ms == pytest.approx(STEP_MS / 2)


def test_what_has_no_steps_is_left_as_it_is() -> None:
    profile = Profile(source="train.py", steps=0, step_ms=None)
    assert diagnose(profile) == profile


FAULTS: dict[str, tuple[Profile, str, str]] = {
    "slow samples": (
        seen({"data": 6.0}, loaders=[loader(sample_ms=0.09)]),
        "slow samples",
        "data.py:5",
    ),
    "slow samples in workers": (
        seen({"data": 6.0}, loaders=[loader(workers=2)]),
        "2 workers",
        "data.py:5",
    ),
    "too many workers": (
        seen({"data": 6.0}, loaders=[loader(workers=16)], threads=ThreadUse(torch=2, cores=2, busy=2.0, others=0.0)),
        "too many workers: 16",
        "data.py:5",
    ),
    "half precision without instructions": (
        seen({"forward": 8.0}, operators=[operator("addmm", 6.0, dtype="bfloat16", where="net.py:12", flops=2e7)]),
        "bfloat16 on a processor without",
        "net.py:12",
    ),
    "a large embedding": (
        seen(
            {"update": 5.0},
            optimizers=[adam(5.0, "fused", numbers=1_000_000)],
            operators=table("10000x100", "dense"),
        ),
        "embedding of 10000 rows",
        "net.py:20",
    ),
    "anomaly detection": (
        seen(habits=[SlowPattern(what="hook", where="train.py:2", per_step=1.0, ms=2.0)]),
        "anomaly detection",
        "train.py:2",
    ),
    "a profiler": (
        seen(habits=[SlowPattern(what="profiler", where="train.py:2", per_step=1.0, calls=200.0, call_us=18.0)]),
        "profiler of the script's own",
        "train.py:2",
    ),
    "garbage collection": (
        seen(habits=[SlowPattern(what="garbage collection", where="train.py:2", per_step=1.0, ms=4.0)]),
        "garbage collection",
        "train.py:2",
    ),
    "gradients in vain": (
        seen(habits=[SlowPattern(what="unused gradients", where="train.py:2", per_step=6.0, ms=4.0)]),
        "unused gradients",
        "train.py:2",
    ),
    "a graph that is carried over": (
        seen({"backward": 8.0}, habits=[SlowPattern(what="carried graph", where="t.py:1", per_step=1.0, ms=6.0)]),
        "carried over steps",
        "t.py:1",
    ),
    "waiting for the device": (
        seen({"synchronisation": 5.0}, device="cuda:0", lines=[line("synchronisation", 5.0, "train.py:21")]),
        "waiting for the device",
        "train.py:21",
    ),
    "per-sample loading": (
        seen({"data": 6.0}, loaders=[loader(sample_ms=0.002)]),
        "per-sample loading",
        "train.py:8",
    ),
    "a data set that makes whole batches": (
        seen({"data": 6.0}, loaders=[loader(sample_ms=5.0, batch_size=None, at_once=True)]),
        "slow samples: the data set takes long to hand out a batch",
        "data.py:5",
    ),
    "whole batches that are put together once more": (
        seen({"data": 6.0}, loaders=[loader(sample_ms=0.09, at_once=True)]),
        "per-sample loading",
        "train.py:8",
    ),
    "a loader around whole batches": (
        seen({"data": 6.0}, loaders=[loader(sample_ms=0.09, batch_size=None, at_once=True)]),
        "waiting for data: the loader",
        "train.py:8",
    ),
    "batches without a loader": (
        seen({"data": 6.0}, lines=[line("data", 5.0, "batches.py:3")]),
        "waiting for data",
        "batches.py:3",
    ),
    "logging": (
        seen({"logging": 5.0}, lines=[line("logging", 4.5, "log.py:9", library="PIL", function="log")]),
        "logging at each step with PIL",
        "log.py:9",
    ),
    "work in NumPy": (
        seen(
            {"batch": 5.0},
            lines=[line("batch", 4.5, "aug.py:4", library="numpy")],
            operators=[operator("resolve_neg", 0.01, phase="batch", where="aug.py:4")],
        ),
        "moved back and forth",
        "aug.py:4",
    ),
    "plain Python, spread over lines": (
        seen({"python": 5.0}, lines=[line("python", 1.0, f"train.py:{n}", function="count") for n in (40, 41, 42)]),
        "plain Python in the loop, on numbers, lists or arrays: count",
        "train.py:40",
    ),
    "Python within the forward": (
        seen({"forward": 8.0}, lines=[line("forward", 5.0, "net.py:4", function="forward")]),
        "Python code within the forward",
        "net.py:4",
    ),
    "a scatter": (
        seen(
            {"backward": 8.0},
            operators=[operator("_index_put_impl_", 6.0, phase="backward", where="net.py:30", bytes=1e6, flops=0.0)],
        ),
        "scatter by index",
        "net.py:30",
    ),
    "a scatter to where whole numbers say that take as long to work out": (
        seen(
            {"backward": 8.0},
            operators=[
                operator("_index_put_impl_", 1.5, phase="backward", where="net.py:30", bytes=1e6, flops=0.0),
                operator("remainder", 2.5, phase="backward", where="net.py:30", dtype="", bytes=1e6),
                operator("floor_divide", 2.5, phase="backward", where="net.py:30", dtype="", bytes=1e6),
            ],
        ),
        "scatter by index",
        "net.py:30",
    ),
    "messages that are summed over the edges of a graph": (
        seen({"forward": 8.0}, operators=[operator("scatter_add_", 6.0, where="net.py:30", bytes=1e6, flops=0.0)]),
        "scatter by index",
        "net.py:30",
    ),
    "float64": (
        seen(operators=[operator("addmm", 9.0, dtype="float64", where="net.py:12", flops=2e8, bytes=1e6)]),
        "float64",
        "net.py:12",
    ),
    "a for-loop optimizer": (seen({"update": 5.0}, optimizers=[adam(5.0)]), "for-loop optimizer", "train.py:13"),
    "a for-loop in an optimizer of one's own": (
        seen(
            {"update": 5.0},
            optimizers=[adam(5.0, "", kind="Mine")],
            operators=[
                operator("add_", 1.0, 60, phase="update", where="mine.py:7", shapes=["16x16"], line_runs=100.0),
                operator("add_", 0.5, 40, phase="update", where="mine.py:7", shapes=["16"], line_runs=100.0),
            ],
        ),
        "for-loop optimizer: Mine",
        "mine.py:7",
    ),
    "an update by hand": (
        seen(
            {"update": 5.0},
            optimizers=[adam(5.0, "", kind="by hand", groups=[])],
            operators=[operator("sub_", 1.0, 100, phase="update", where="sgd.py:3", line_runs=100.0)],
        ),
        "by hand",
        "sgd.py:3",
    ),
    "a Python loop of small operations": (
        seen({"forward": 8.0}, operators=loop(100, 0.01)),
        "many tiny kernels",
        "net.py:7",
    ),
    "heads that are asked one after the other": (
        seen({"forward": 8.0}, operators=each_once(100, alike=100)),
        "many tiny kernels: a Python loop of 100 rounds",
        "net.py:7",
    ),
    "a Python loop over time steps": (
        seen(
            {"forward": 8.0},
            operators=loop(100, 0.01, module="net.cell"),
            modules=[
                ModuleTime(name="net.cell", kind="LSTMCell", calls=100, forward_ms=5, backward_ms=None, share=0.5)
            ],
        ),
        "time steps",
        "net.py:7",
    ),
    "a Python loop over samples": (
        seen({"forward": 8.0}, operators=loop(64, 0.01, shapes=["256"]), loaders=[loader()]),
        "64 samples",
        "net.py:7",
    ),
    "too many threads": (
        seen(threads=ThreadUse(torch=16, cores=2, busy=1.9, others=0.0, slower=3.0)),
        "too many threads",
        "train.py:30",
    ),
    "memory given back": (
        seen(paging=PagingRecord(pages=4000, system_ms=4.0), threads=ThreadUse(torch=2, cores=2, busy=1.6, others=0.0)),
        "memory is given back",
        "train.py:30",
    ),
    "too small a batch": (
        seen(
            {"forward": 8.0},
            samples_per_step=2,
            operators=[operator("mul", 0.02, 2, module=f"net.{n}", where=f"net.py:{n}") for n in range(200)],
        ),
        "too small a batch",
        "train.py:30",
    ),
    "the loss twice": (
        seen(habits=[SlowPattern(what="wasted forward", where="train.py:17", per_step=1.0, ms=3.0)]),
        "double evaluation",
        "train.py:17",
    ),
    "a function of the loss twice": (
        seen(
            {"forward": 6.0},
            operators=[
                operator("tanh", 2.0, where="loss.py:4", bytes=2e7, flops=1e6, used=used) for used in (True, False)
            ],
        ),
        "double evaluation",
        "loss.py:4",
    ),
    "validation at each step": (
        seen(habits=[SlowPattern(what="evaluation", where="train.py:18", per_step=4.0, ms=3.0)]),
        "evaluation at each step",
        "train.py:18",
    ),
    "a copy at each step": (
        seen(
            {"copy": 5.0},
            device="cuda:0",
            operators=[operator("copy_", 4.0, phase="copy", where="train.py:9", copies="cpu>cuda:0")],
        ),
        "a copy between devices",
        "train.py:9",
    ),
    "a tensor moved back and forth": (
        seen(
            {"copy": 5.0},
            device="cuda:0",
            operators=[
                operator("copy_", 2.0, phase="copy", where="train.py:9", copies=way)
                for way in ("cpu>cuda:0", "cuda:0>cpu")
            ],
        ),
        "back and forth",
        "train.py:9",
    ),
    "a number read at each step": (
        seen(
            {"synchronisation": 5.0},
            device="cuda:0",
            operators=[operator("item", 0.01, phase="synchronisation", where="train.py:14", dtype="")],
        ),
        ".item()",
        "train.py:14",
    ),
    "unpinned memory": (
        seen({"copy": 5.0}, device="cuda:0", loaders=[loader()]),
        "unpinned memory",
        "train.py:8",
    ),
    "an operator that is far from its limit": (
        seen(operators=[operator("sort", 6.0, where="net.py:44", flops=0.0, bytes=1e6)]),
        "aten::sort takes much of the forward",
        "net.py:44",
    ),
}


def test_of_a_line_with_a_scatter_its_arithmetic_stays() -> None:
    """As in `torch.zeros(n, d).index_add(0, to, lin(x[at]))`."""
    fields = dict(phase="forward", where="net.py:30", bytes=1e6, flops=0.0)
    ones = [
        operator("index_add", 3.0, **fields),
        operator("addmm", 4.0, **fields),
        operator("add", 1.0, dtype="", **fields),
    ]
    found = [one for one in remedies(seen({"forward": 8.0}, operators=ones)) if "by index" in one.cause]
    assert [one.gain for one in found] == [pytest.approx(0.39, abs=0.02)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_first_with_its_place(fault: str) -> None:
    profile, cause, where = FAULTS[fault]
    found = first(profile)
    assert (cause in found.cause, found.where) == (True, where), found
    assert 0.05 <= found.gain <= 1 and not found.note
    assert found.remedy and any(letter.isdigit() for letter in found.evidence)


def test_sums_by_index_have_other_remedies_than_values_that_are_put_somewhere() -> None:
    faults = "messages that are summed over the edges of a graph", "a scatter"
    summed, put = (first(FAULTS[fault][0]).remedy for fault in faults)
    assert "torch.sparse.mm" in summed and "torch.segment_reduce" in summed and "F.max_pool2d" in put


@pytest.mark.parametrize(("name", "dtype"), [("mul", "float32"), ("sort", "")])
def test_a_scatter_beside_much_that_is_more_is_not_what_a_line_is_about(name: str, dtype: str) -> None:
    aside = operator(name, 6.0, phase="backward", where="net.py:30", dtype=dtype, bytes=1e6, flops=0.0)
    scatter = operator("scatter_", 0.5, phase="backward", where="net.py:30", bytes=1e6, flops=0.0)
    assert not any("by index" in one.cause for one in remedies(seen({"backward": 8.0}, operators=[aside, scatter])))


FOR_A_RACE: dict[str, tuple[Profile, dict[str, str | int]]] = {
    "convolutions far from the limit": (
        seen({"forward": 8.0}, operators=[operator("convolution", 6.0, module="conv", flops=1e6, bytes=1e5)]),
        {"layout": "channels_last"},
    ),
    "idle cores": (seen(threads=ThreadUse(torch=1, cores=8, busy=1.0, others=0.0)), {"threads": 8}),
}


@pytest.mark.parametrize("case", FOR_A_RACE)
def test_what_only_a_race_can_tell_is_proposed_for_a_task_alone(case: str) -> None:
    profile, axes = FOR_A_RACE[case]
    assert remedies(profile) == []
    assert first(profile.model_copy(update={"plan": "baseline"})).axes == axes


SHARES = {
    "slow samples": ("data", 0.6),
    "work in NumPy": ("batch", 0.5),
    "logging": ("logging", 0.5),
    "a for-loop optimizer": ("update", 0.5),
    "a copy at each step": ("copy", 0.5),
    "a number read at each step": ("synchronisation", 0.5),
}


@pytest.mark.parametrize("fault", SHARES)
def test_no_gain_is_more_than_the_share_of_what_it_is_about(fault: str) -> None:
    assert first(FAULTS[fault][0]).gain <= SHARES[fault][1]


def test_a_script_has_no_plan_and_gets_no_axes() -> None:
    fault = FAULTS["a for-loop optimizer"][0]
    assert first(fault).axes == {}
    assert first(fault.model_copy(update={"plan": "baseline"})).axes == {"optimizer": "fused"}


def asked(*calls: tuple[str, float], shape: str = "64x10") -> list[Remedy]:
    """What is said of a line with such calls, each of a name so many times."""
    ones = [operator(name, 0.001, often, where="train.py:6", phase="python", shapes=[shape]) for name, often in calls]
    return remedies(seen(operators=ones))


def test_outputs_that_are_brought_to_the_host_and_read_as_a_whole() -> None:
    """`.cpu()` asks for a device, and so does `.numpy()` itself."""
    (note,) = asked(("to", 2), ("resolve_neg", 1))
    assert "moved back and forth" in note.cause and note.where == "train.py:6" and note.note


@pytest.mark.parametrize(("shape", "calls"), [("64x10", 1), ("1", 2)])
def test_what_is_read_where_it_is_isnt_moved(shape: str, calls: int) -> None:
    assert not [one for one in asked(("to", calls), ("resolve_neg", 1), shape=shape) if "moved" in one.cause]


@pytest.mark.parametrize(
    ("shape", "is_batch"), [("64x256", True), ("64x10", True), ("64", True), ("32x256", False), ("2048x256", False)]
)
def test_what_has_as_many_rows_belongs_to_the_batch(shape: str, is_batch: bool) -> None:
    """As targets; and losses of torch's ask for a dtype of what they are given."""
    assert ["a copy to the device" in one.cause for one in asked(("to", 1), shape=shape)] == [True] * (not is_batch)


@pytest.mark.parametrize(
    ("left", "is_batch"), [("64x10", False), ("64x5", True), ("", True)], ids=["comes back", "another", "arrives"]
)
def test_but_not_what_comes_back_from_numpy(left: str, is_batch: bool) -> None:
    given = dict(where="train.py:16", phase="python", shapes=["64x10"])
    ones = [operator("lift_fresh", 0.001, **given), operator("to", 0.001, **given)]
    ones += [operator("resolve_neg", 0.001, where="train.py:15", phase="python", shapes=[left])] if left else []
    assert [one.where for one in remedies(seen(operators=ones))] == ["train.py:16"] * (not is_batch)
