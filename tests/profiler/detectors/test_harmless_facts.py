"""What a profile's facts are not taken to mean, what is a note alone, and in which order remedies stand."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.core.records.profile import HardwareLimits, PagingRecord, Profile, ThreadUse, TimeOutsideSteps
from hotloop.core.records.profile_terms import SlowPattern
from hotloop.profiler.detectors import diagnose
from tests.support.profiler.handmade_steps import (
    adam,
    as_task,
    each_once,
    first,
    line,
    loader,
    loop,
    operator,
    product,
    remedies,
    seen,
    table,
)

HARMLESS: dict[str, Profile] = {
    "a short wait": seen({"data": 0.3}, loaders=[loader(sample_ms=0.004)]),
    "a fused optimizer": seen({"update": 3.0}, optimizers=[adam(3.0, "fused")]),
    "a for-loop over one large parameter, at the memory's speed": seen(
        {"update": 3.0}, optimizers=[adam(3.0, tensors=1, numbers=1_000_000)]
    ),
    "a loop of two rounds": seen({"forward": 8.0}, operators=[product(7.0, calls=2, where="net.py:7")]),
    "a loop over large operations": seen({"forward": 8.0}, operators=[product(7.0, calls=10, where="net.py:7")]),
    "a loader that puts samples together": seen(
        {"python": 1.0}, operators=loop(64, 0.01, "train.py:8", phase="python"), loaders=[loader(sample_ms=0.001)]
    ),
    "many layers behind one line": seen(
        operators=[operator("addmm", 0.03, 1, module=f"net.{n}", flops=1e6, bytes=1e4) for n in range(60)]
    ),
    "as many threads as cores": seen(threads=ThreadUse(torch=2, cores=2, busy=1.9, others=0.0)),
    "a batch of two that is much work": seen(samples_per_step=2),
    "float64 of a single number": seen(operators=[operator("add", 0.01, dtype="float64", where="train.py:15")]),
    "an embedding whose rows are mostly used": seen(
        {"update": 3.0},
        optimizers=[adam(3.0, "fused", numbers=100_000)],
        operators=table("1000x100", "dense", "64x16"),
    ),
    "an embedding with sparse gradients": seen(
        {"update": 5.0}, optimizers=[adam(5.0, "fused", numbers=1_000_000)], operators=table("10000x100", "sparse")
    ),
    "a frozen embedding": seen(
        {"update": 5.0}, optimizers=[adam(5.0, "fused", numbers=1_000_000)], operators=table("10000x100")
    ),
    "a frozen embedding beside one that is used as a whole": seen(
        {"update": 5.0},
        optimizers=[adam(5.0, "fused", numbers=1_000_000)],
        operators=[*table("10000x100", module="net.frozen"), *table("8x100", "dense", module="net.positions")],
    ),
    "an embedding whose weights are those of the output layer": seen(
        {"update": 5.0},
        optimizers=[adam(5.0, "fused", numbers=1_000_000)],
        operators=[
            *table("10000x100", "dense"),
            operator("addmm", 1.0, where="net.py:21", shapes=["64x100", "100x10000"], flops=1e8, bytes=1e6),
        ],
    ),
    "layers behind one line that a loop goes over, each with what the one before gave": seen(
        {"forward": 8.0}, operators=each_once(100)
    ),
    "a tensor asked for the dtype that it has": seen(
        operators=[operator("to.dtype", 0.001, where="train.py:6", phase="python", shapes=["2048x256"])]
    ),
    "a whole tensor turned into NumPy's": seen(
        operators=[
            operator(name, 0.001, where="train.py:6", phase="python", shapes=["2048x256"])
            for name in ("to", "resolve_neg")
        ]
    ),
    "bfloat16 where it is supported": seen(
        operators=[operator("addmm", 3.0, dtype="bfloat16", flops=2e8, bytes=1e5)],
        limits=HardwareLimits(flop_per_s={"fp32": 100e9, "bf16": 200e9}, bytes_per_s=10e9, launch_us=3.0),
    ),
    "the seed of a loader that is opened now and then": seen(
        operators=[operator("item", 0.01, 0.5, where="train.py:8", phase="python")], loaders=[loader(sample_ms=0.001)]
    ),
    "a small scatter": seen(operators=[operator("scatter_", 0.02, where="train.py:11")]),
    "a little garbage": seen(habits=[SlowPattern(what="garbage collection", where="t.py:1", per_step=2.0, ms=0.1)]),
    "an evaluation now and then": seen(habits=[SlowPattern(what="evaluation", where="t.py:1", per_step=0.1, ms=0.05)]),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_costs_nothing_is_not_named(case: str) -> None:
    assert remedies(HARMLESS[case]) == []


@pytest.mark.parametrize(
    ("module", "uses", "habit"),
    [("", (False,), None), ("", (True,), None), ("net.0", (True, False), None), ("", (True, False), "unused graph")],
)
def test_what_no_backward_uses_is_done_in_vain_only_beside_what_it_uses(
    module: str, uses: tuple[bool, ...], habit: str | None
) -> None:
    ones = [operator("tanh", 2.0, where="loss.py:4", bytes=2e7, flops=1e6, module=module, used=used) for used in uses]
    habits = [SlowPattern(what=habit, where="train.py:3", per_step=1.0)] if habit else []
    found = remedies(seen({"forward": 6.0}, operators=ones, habits=habits))
    assert not [one for one in found if "double evaluation" in one.cause]


def test_what_compiling_a_model_leaves_as_it_is_is_not_won_by_it() -> None:
    """Products, the loss and the update; of a Task the whole step is compiled."""
    ones = [
        operator(name, 0.02, 2, phase=phase, where=f"net.py:{n}", bytes=1e3, flops=1e3)
        for n in range(100)
        for name, phase in (("addmm", "forward"), ("mul", "loss"), ("mul", "update"))
    ]
    profile = seen({"forward": 4.0, "loss": 2.5, "update": 2.5, "backward": 1.0}, operators=ones)
    named = [diagnose(p).candidates for p in (profile, as_task(profile))]
    assert [len(found) for found in named] == [0, 1]


@pytest.mark.parametrize(("layer", "named"), [("aten::gru", False), ("aten::lstm", False), ("aten::linear", True)])
def test_what_a_recurrent_layer_does_by_itself_is_not_won_by_compiling(layer: str, named: bool) -> None:
    """torch.compile calls it as it is; raced, a network of a GRU took longer compiled. A Task's step is taken apart."""
    given = dict(module="rnn", where="net.py:8", bytes=1e3, flops=1e3, line_runs=1.0)
    forward = [operator(name, 0.5, 100, outer=layer, **given) for name in ("add", "mul", "tanh", "sigmoid")]
    backward = [operator(name, 0.5, 100, phase="backward", **given) for name in ("mul", "tanh_backward")]
    profile = seen({"forward": 5.0, "backward": 5.0}, operators=[*forward, *backward])
    told = [bool(diagnose(p).candidates) for p in (profile, as_task(profile))]
    assert told == [named, True]


NOTES: dict[str, tuple[Profile, str]] = {
    ".item() on a CPU": (seen(operators=[operator("item", 0.01, where="train.py:14")]), ".item()"),
    ".tolist() of a single number": (
        seen(operators=[operator("resolve_neg", 0.01, where="train.py:14", phase="synchronisation", shapes=[])]),
        ".item()",
    ),
    "a graph that is never used": (
        seen(habits=[SlowPattern(what="unused graph", where="t.py:1", per_step=1.0, ms=3.0)]),
        "a graph is built for a forward that no backward uses",
    ),
    "a graph kept for nothing": (
        seen(habits=[SlowPattern(what="retained graph", where="t.py:1", per_step=1.0)]),
        "retain_graph",
    ),
    "kept losses": (
        seen(habits=[SlowPattern(what="kept graph", where="t.py:1", per_step=1.0, bytes=2**20)]),
        "growing list of losses",
    ),
    ".to() on a CPU of what isn't the batch": (
        seen(operators=[operator("to", 0.001, where="train.py:6", phase="python", shapes=["2048x256"])]),
        ".to()",
    ),
}


@pytest.mark.parametrize("case", NOTES)
def test_what_costs_next_to_nothing_here_is_a_note_and_comes_last(case: str) -> None:
    profile, cause = NOTES[case]
    [note] = remedies(profile)
    assert cause in note.cause and note.note and note.gain < 0.05
    slow = profile.model_copy(update={"optimizers": [adam(5.0)], "phases": {**profile.phases, "update": 5.0}})
    assert [one.note for one in remedies(slow)] == [False, True]


def test_remedies_are_ordered_by_what_they_win() -> None:
    both = seen({"data": 5.0, "update": 3.0}, loaders=[loader(sample_ms=0.07)], optimizers=[adam(3.0)])
    gains = [one.gain for one in remedies(both)]
    assert gains == sorted(gains, reverse=True) and len(gains) == 2


def test_a_place_that_is_named_is_not_named_again_in_general() -> None:
    profile = seen(
        {"forward": 8.0},
        operators=loop(100, 0.01),
        lines=[line("forward", 4.0, "net.py:7", function="forward")],
    )
    assert [one.where for one in remedies(profile)].count("net.py:7") == 1


def shared(where: str, phases: dict[str, float], **fields: Any) -> Profile:
    """Of a line that hands the training to a library: backward and update are behind it."""
    samples = [line("backward", 4.0, where=where, library="torch"), line("python", 3.0, where=where, library="mylib")]
    return seen(phases, lines=samples, **({"optimizers": [adam(0.1, "fused", where=where)]} | fields))


@pytest.mark.parametrize("data", [1.0, 3.5])
def test_what_lies_behind_a_line_that_trains_is_many_things(data: float) -> None:
    """As behind `trainer.fit(...)`: neither a small nor a large remedy hides another of its line."""
    drawing = loader(sample_ms=data / 64, where="train.py:30", sample_where="train.py:30")
    found = remedies(shared("train.py:30", {"data": data, "python": 3.0}, loaders=[drawing]))
    assert {one.where for one in found} == {"train.py:30"}
    assert sorted(one.cause.partition(":")[0] for one in found) == ["mylib's own work in each step", "slow samples"]


PAGED = dict(paging=PagingRecord(pages=3000, system_ms=4.0), threads=ThreadUse(torch=1, cores=2, busy=1.0, others=0.0))


@pytest.mark.parametrize(
    ("beside", "note"),
    [
        ({"loaders": [loader(sample_ms=0.01)]}, True),
        ({"lines": [line("python", 1.0)]}, False),
        ({"lines": [line("python", 3.0)]}, True),
        ({}, False),
    ],
)
def test_memory_given_back_comes_after_what_may_allocate_it(beside: dict[str, Any], note: bool) -> None:
    """What is known to waste time is mended first; a line that merely takes time may do so for this very reason."""
    phases = {"data": 0.7} if "loaders" in beside else {"python": sum(one.ms for one in beside.get("lines", []))}
    found = remedies(seen(phases, **PAGED, **beside))
    assert bool(found[1:]) is bool(beside)
    assert [one.note for one in found if one.cause.startswith("memory")] == [note]
    assert found[0].cause.startswith("memory") is not note


def test_an_operator_that_takes_long_may_do_so_since_its_memory_comes_anew() -> None:
    ones = [operator("mul", 3.0, where="net.py:7", bytes=1e6, shapes=["160x64x32x32"])]
    found = remedies(seen({"forward": 6.0}, operators=ones, **PAGED))
    assert [one.cause.partition(" ")[0] for one in found] == ["memory", "aten::mul"] and not found[0].note


@pytest.mark.parametrize(("copied_ms", "is_first"), [(1.5, False), (5.0, True)])
def test_a_copy_that_takes_less_than_its_memory_comes_second(copied_ms: float, is_first: bool) -> None:
    copied = operator("cat", copied_ms, where="train.py:7", phase="batch", bytes=1e6, shapes=[""])
    first, *others = remedies(seen({"batch": copied_ms}, operators=[copied], **PAGED))
    assert "concatenated" in (first if is_first else others[0]).cause
    assert "memory is given back" in (others[0] if is_first else first).cause


def test_a_line_that_trains_may_have_too_small_a_batch_beside() -> None:
    small = [
        operator("mul", 0.02, 2, module=f"net.{n}", where="train.py:30", phase=phase)
        for n in range(100)
        for phase in ("forward", "backward")
    ]
    fields = dict(samples_per_step=2, optimizers=[adam(2.0, where="train.py:30")], operators=small)
    found = remedies(shared("train.py:30", {"forward": 4.0, "backward": 4.0, "update": 2.0}, **fields))
    assert [one.cause.partition(":")[0] for one in found][:2] == ["too small a batch", "a for-loop optimizer"]


@pytest.mark.parametrize(("share", "names"), [(4.0, True), (0.4, False)])
def test_a_small_remedy_hides_no_larger_one_of_its_line(share: float, names: bool) -> None:
    """Nor does one of which little is left beside come after a larger one."""
    both = [
        operator("addmm", 1.5, dtype="float64", where="net.py:44", flops=1e8, bytes=1e5),
        operator("sort", share, where="net.py:44", flops=0.0, bytes=1e6),
    ]
    found = remedies(seen({"forward": 8.0}, operators=both))
    assert any("float64" in one.cause for one in found)
    assert any("aten::sort takes much" in one.cause for one in found) is names


def test_calls_of_operations_on_float64_cost_as_much_in_float32() -> None:
    """Of many small ones the gain is no more than half of their own time, and of products what this machine does faster."""
    small = operator("mul", 1.0, 100, dtype="float64", where="train.py:15", flops=2e2, bytes=6e3)
    large = operator("addmm", 6.0, dtype="float64", where="train.py:15", flops=1e8, bytes=1e5)
    gains = [
        [one.gain for one in remedies(seen({"forward": 8.0}, operators=[kind])) if "float64" in one.cause]
        for kind in (small, large)
    ]
    step_ms = seen({"forward": 8.0}).step_ms or 0.0
    assert sum(gains[0]) <= 0.5 / step_ms
    assert gains[1] and gains[1][0] > 2.9 / step_ms


def test_anomaly_detection_takes_what_it_remembers_and_looks_for() -> None:
    """What an update calls is its own, under whichever name."""

    def gain(phase: str, remembering_ms: float) -> float:
        calls = [operator("isnan", 1.0, 50, phase=phase)]
        habit = SlowPattern(what="hook", where="train.py:2", per_step=1.0, ms=remembering_ms)
        found = remedies(seen({"update": 4.0, "backward": 4.0}, operators=calls, habits=[habit]))
        return next(one.gain for one in found if "anomaly" in one.cause)

    assert (gain("update", 0.0), gain("update", 2.0)) == (0.0, pytest.approx(0.2))
    assert (gain("backward", 0.0), gain("backward", 2.0)) == (pytest.approx(0.1), pytest.approx(0.3))


def test_looking_at_tensors_from_many_sides_is_no_loop() -> None:
    views = [operator(name, 0.01, 10, where="net.py:7", flops=0.0, bytes=0.0) for name in ("view", "transpose")]
    assert not [one for one in remedies(seen(operators=views)) if "loop" in one.cause]
    assert [one for one in remedies(seen(operators=loop(30, 0.02))) if "loop" in one.cause]


def test_a_loop_of_a_librarys_own_is_no_line_of_the_users() -> None:
    def named(line_runs: float | None) -> bool:
        found = remedies(seen({"forward": 8.0}, operators=loop(100, 0.02, line_runs=line_runs)))
        return any("a Python loop of" in one.cause for one in found)

    assert [named(runs) for runs in (1.0, 2.0, 100.0, None)] == [False, False, True, True]


def test_rows_of_what_no_loader_gave_may_be_time_steps_as_well() -> None:
    found = first(seen({"forward": 8.0}, operators=loop(64, 0.01)))
    assert "64 rounds" in found.cause and "time steps" in found.cause


@pytest.mark.parametrize(("bytes_", "named"), [(1e6, True), (0.0, False)])
def test_a_view_takes_no_time_however_long_it_was_held_up(bytes_: float, named: bool) -> None:
    ones = [operator("t", 6.0, where="net.py:44", flops=0.0, bytes=bytes_)]
    assert any("aten::t takes" in one.cause for one in remedies(seen(operators=ones))) is named


def test_a_loop_that_waits_is_told_from_one_that_works() -> None:
    lines = [line("python", 2.0)]
    assert first(seen({"python": 2.0}, lines=lines)).cause.startswith("plain Python")
    found = first(seen({"unattributed": 2.0}, lines=lines))
    assert found.cause.startswith("waiting in the loop") and found.where == "train.py:20"
    assert found.gain == pytest.approx(0.2)


@pytest.mark.parametrize("phase", ["python", "loss", "update"])
def test_what_a_library_does_that_trains_is_its_own_work(phase: str) -> None:
    """As in `trainer.fit(model)`, which calls backward and update from the script's one line."""
    fit = dict(where="train.py:30", function="main")
    lines = [line("backward", 4.0, library="torch", **fit), line(phase, 3.0, library="lightning", **fit)]
    (found,) = remedies(seen({phase: 3.0}, lines=lines))
    assert found.cause == "lightning's own work in each step" and "less often" not in found.remedy


def test_a_library_that_the_loop_calls_beside_is_called_at_each_step() -> None:
    lines = [line("backward", 4.0, library="torch", where="train.py:29"), line("python", 3.0, library="wandb")]
    assert first(seen({"python": 3.0}, lines=lines)).cause == "wandb is called at each step"


@pytest.mark.parametrize("kernel", ["cpp_fused_add_relu_3", "triton_poi_fused_add_0"])
def test_what_is_compiled_is_not_to_be_compiled(kernel: str) -> None:
    small = [operator("add", 0.005 * 600, 600, phase="forward", where="")]
    profile = seen({"forward": 5.0}, operators=small)
    assert diagnose(profile).candidates
    joined = small[0].model_copy(update={"name": kernel, "calls": 1.0, "ms": 0.1})
    for compiled in (
        profile.model_copy(update={"operators": [*profile.operators, joined]}),
        profile.model_copy(update={"apart": TimeOutsideSteps(compile_s=3.0)}),
    ):
        assert not diagnose(compiled).candidates
