"""What a profile's facts are taken to mean: each cause with the fault, and without it. Records are made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.diagnosing import diagnose
from hotloop.profiles import (
    GroupTime,
    Habit,
    Limits,
    LineTime,
    LoaderUse,
    ModuleTime,
    OperatorTime,
    OptimizerUse,
    Profile,
    RankTime,
    Remedy,
    Threads,
)

LIMITS = Limits(flop_per_s={"fp32": 100e9, "fp64": 50e9}, bytes_per_s=10e9, launch_us=3.0)
STEP_MS = 10.0


def operator(name: str, ms: float, calls: float = 1, **fields: Any) -> OperatorTime:
    given = dict(phase="forward", where="train.py:10", dtype="float32", shapes=["64x256"])
    return OperatorTime(name=f"aten::{name}", ms=ms, calls=calls, **(given | fields))


def product(ms: float, **fields: Any) -> OperatorTime:
    """A matrix product that reaches half of the machine's limit."""
    return operator("addmm", ms, flops=ms / 2 * 100e6, bytes=1e5, **fields)


def line(phase: str, own_ms: float, where: str = "train.py:20", **fields: Any) -> LineTime:
    return LineTime(**(dict(where=where, function="train", phase=phase, ms=own_ms, own_ms=own_ms) | fields))


def seen(phases: dict[str, float] | None = None, **fields: Any) -> Profile:
    """A profile of a step of 10 ms that is well made, but for what is given."""
    phases = phases or {}
    rest = STEP_MS - sum(phases.values())
    filled = {"forward": 0.4 * rest, "backward": 0.6 * rest} | phases
    others = fields.pop("operators", [])
    work = [
        product(left, phase=phase, module="net")
        for phase in ("forward", "backward")
        if (left := _left(filled, phase, others))
    ]
    given = dict(
        source="train.py",
        steps=50,
        step_ms=STEP_MS,
        step_where="train.py:30",
        phases=filled,
        samples_per_step=64,
        batch=["64x256"],
        limits=LIMITS,
    )
    return Profile(**(given | {"operators": [*work, *others]} | fields))


def _left(phases: dict[str, float], phase: str, operators: list[OperatorTime]) -> float:
    """Milliseconds of a phase that none of the operators takes."""
    return max(0.0, phases[phase] - sum(one.ms for one in operators if one.phase == phase))


def remedies(profile: Profile) -> list[Remedy]:
    return diagnose(profile).remedies


def first(profile: Profile) -> Remedy:
    return remedies(profile)[0]


def loader(**fields: Any) -> LoaderUse:
    given = dict(where="train.py:8", dataset="Files", sample_where="data.py:5", samples=1000, batch_size=64, workers=0)
    return LoaderUse(**(given | {"pinned": False} | fields))


def adam(ms: float, implementation: str = "forloop", tensors: int = 100, numbers: int = 10_000, **fields: Any) -> Any:
    group = GroupTime(name="0", tensors=tensors, numbers=numbers, ms=None)
    given = dict(kind="Adam", where="train.py:13", implementation=implementation, groups=[group], steps=1, ms=ms)
    return OptimizerUse(**(given | fields))


def loop(calls: int, each_ms: float, where: str = "net.py:7", **fields: Any) -> list[OperatorTime]:
    """Small operations that a line starts again and again."""
    names = ("mul", "tanh", "add")
    return [operator(name, calls * each_ms, calls, where=where, flops=10.0, bytes=100.0, **fields) for name in names]


def each_once(modules: int, **fields: Any) -> list[OperatorTime]:
    """Small operations that a line starts once for each of several modules."""
    given = dict(where="net.py:7", flops=10.0, bytes=100.0, line_runs=float(modules)) | fields
    return [operator("addmm", 0.04, module=f"net.{n}", **given) for n in range(modules)]


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
        seen({"data": 6.0}, loaders=[loader(workers=16)], threads=Threads(torch=2, cores=2, busy=2.0, others=0.0)),
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
            operators=[operator("embedding", 0.01, where="net.py:20", shapes=["10000x100", "64x8"])],
        ),
        "embedding of 10000 rows",
        "net.py:20",
    ),
    "anomaly detection": (
        seen(habits=[Habit(what="hook", where="train.py:2", per_step=1.0)]).model_copy(
            update={"operators": [product(2.0, module="net", calls=10)]}
        ),
        "anomaly detection",
        "train.py:2",
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
        seen({"batch": 5.0}, lines=[line("batch", 4.5, "aug.py:4", library="numpy")]),
        "moved back and forth",
        "aug.py:4",
    ),
    "plain Python, spread over lines": (
        seen({"python": 5.0}, lines=[line("python", 1.0, f"train.py:{n}", function="count") for n in (40, 41, 42)]),
        "plain Python in the loop, on numbers or lists: count",
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
            lines=[line("update", 4.0, "sgd.py:3", library="torch")],
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
        seen({"forward": 8.0}, operators=loop(64, 0.01), loaders=[loader()]),
        "64 samples",
        "net.py:7",
    ),
    "too many threads": (
        seen(threads=Threads(torch=16, cores=2, busy=1.9, others=0.0, slower=3.0)),
        "too many threads",
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
        seen(habits=[Habit(what="wasted forward", where="train.py:17", per_step=1.0, ms=3.0)]),
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
        seen(habits=[Habit(what="evaluation", where="train.py:18", per_step=4.0, ms=3.0)]),
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
    "operations started one by one": (
        seen(
            {"forward": 8.0},
            operators=[operator("mul", 0.02, 2, module=f"net.{n}", where=f"net.py:{n}") for n in range(200)],
        ),
        "one by one",
        "train.py:10",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_first_with_its_place(fault: str) -> None:
    profile, cause, where = FAULTS[fault]
    found = first(profile)
    assert (cause in found.cause, found.where) == (True, where), found
    assert 0.05 <= found.gain <= 1 and not found.note
    assert found.remedy and any(letter.isdigit() for letter in found.evidence)


FOR_A_RACE: dict[str, tuple[Profile, dict[str, str | int]]] = {
    "convolutions far from the limit": (
        seen({"forward": 8.0}, operators=[operator("convolution", 6.0, module="conv", flops=1e6, bytes=1e5)]),
        {"layout": "channels_last"},
    ),
    "idle cores": (seen(threads=Threads(torch=1, cores=8, busy=1.0, others=0.0)), {"threads": 8}),
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
    "as many threads as cores": seen(threads=Threads(torch=2, cores=2, busy=1.9, others=0.0)),
    "a batch of two that is much work": seen(samples_per_step=2),
    "float64 of a single number": seen(operators=[operator("add", 0.01, dtype="float64", where="train.py:15")]),
    "an embedding whose rows are mostly used": seen(
        {"update": 3.0},
        optimizers=[adam(3.0, "fused", numbers=100_000)],
        operators=[operator("embedding", 0.01, where="net.py:20", shapes=["1000x100", "64x16"])],
    ),
    "an embedding whose weights are those of the output layer": seen(
        {"update": 5.0},
        optimizers=[adam(5.0, "fused", numbers=1_000_000)],
        operators=[
            operator("embedding", 0.01, where="net.py:20", shapes=["10000x100", "64x8"]),
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
        limits=Limits(flop_per_s={"fp32": 100e9, "bf16": 200e9}, bytes_per_s=10e9, launch_us=3.0),
    ),
    "a small scatter": seen(operators=[operator("scatter_", 0.02, where="train.py:11")]),
    "an evaluation now and then": seen(habits=[Habit(what="evaluation", where="t.py:1", per_step=0.1, ms=3.0)]),
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
    habits = [Habit(what=habit, where="train.py:3", per_step=1.0)] if habit else []
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
    named = [[one for one in remedies(p) if "one by one from" in one.cause] for p in (profile, as_task(profile))]
    assert [len(found) for found in named] == [0, 1]


def as_task(profile: Profile) -> Profile:
    return profile.model_copy(update={"plan": "baseline"})


def test_a_fused_optimizer_asks_each_tensor_too() -> None:
    """As torch's fused SGD does, which is hardly faster than one call for each of many small tensors."""
    assert not remedies(seen({"update": 0.7}, optimizers=[adam(0.7, tensors=200)]))
    assert remedies(seen({"update": 0.7}, optimizers=[adam(0.7, tensors=10)]))


@pytest.mark.parametrize(("kind", "name"), [("Mine", "_foreach_add_"), ("LBFGS", "add_")])
def test_an_optimizer_that_takes_lists_or_has_no_other_way_is_no_loop(kind: str, name: str) -> None:
    ones = [
        operator(name, 0.1, phase="update", where="mine.py:7", line_runs=1.0),
        operator(
            "add_", 1.5, 100, phase="update", where="mine.py:7", line_runs=1.0
        ),  # torch goes through them on a CPU
    ]
    found = remedies(seen({"update": 5.0}, optimizers=[adam(5.0, "", kind=kind)], operators=ones))
    assert not [one for one in found if "for-loop" in one.cause]


NOTES: dict[str, tuple[Profile, str]] = {
    ".item() on a CPU": (seen(operators=[operator("item", 0.01, where="train.py:14")]), ".item()"),
    ".tolist() of a single number": (
        seen(operators=[operator("resolve_neg", 0.01, where="train.py:14", phase="synchronisation", shapes=[])]),
        ".item()",
    ),
    "a graph of a network that isn't trained": (
        seen(habits=[Habit(what="unused graph", where="t.py:1", per_step=1.0, ms=3.0)]),
        "a graph is built for a network that isn't trained",
    ),
    "a graph kept for nothing": (
        seen(habits=[Habit(what="retained graph", where="t.py:1", per_step=1.0)]),
        "retain_graph",
    ),
    "kept losses": (
        seen(habits=[Habit(what="kept graph", where="t.py:1", per_step=1.0, bytes=2**20)]),
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


def test_reading_in_the_optimizer_is_not_the_users() -> None:
    assert remedies(seen(operators=[operator("item", 0.01, phase="update", where="train.py:13")])) == []


def test_the_batch_itself_must_come_to_the_device() -> None:
    assert remedies(seen(operators=[operator("to", 0.001, where="train.py:6", phase="python")])) == []


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


def test_making_samples_one_by_one_is_said_of_the_loader_alone() -> None:
    found = remedies(seen({"data": 3.0}, loaders=[loader()], operators=loop(64, 0.015, phase="data")))
    assert found[0].cause.startswith(("slow samples", "per-sample loading"))
    assert not [one for one in found if "Python loop" in one.cause]


def test_a_loop_that_waits_is_told_from_one_that_works() -> None:
    lines = [line("python", 2.0)]
    assert first(seen({"python": 2.0}, lines=lines)).cause.startswith("plain Python")
    found = first(seen({"unattributed": 2.0}, lines=lines))
    assert found.cause.startswith("waiting in the loop") and found.where == "train.py:20"
    assert found.gain == pytest.approx(0.2)


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


def test_a_script_has_no_plan_and_gets_no_axes() -> None:
    fault = FAULTS["a for-loop optimizer"][0]
    assert first(fault).axes == {}
    assert first(fault.model_copy(update={"plan": "baseline"})).axes == {"optimizer": "fused"}


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
    unmeasured = seen().model_copy(update={"limits": Limits()})
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
