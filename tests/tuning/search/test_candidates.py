"""The search for a plan: what is tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hotloop.core.records.race import Timing
from hotloop.core.torch_private import ReadOnlyDispatchMode
from hotloop.plan import Plan
from hotloop.tuning import step_profile
from hotloop.tuning.candidates import (
    AxisChange,
    combine_changes,
    compiled_changes,
    eager_changes,
    eager_variants,
    layout_changes,
    likely,
    not_fixed,
)
from hotloop.tuning.economics import Budget, estimate_compile_gain
from hotloop.tuning.search import BASELINE
from hotloop.tuning.step_profile import StepProfile, profile_step
from tests.support.programs import a_task
from tests.support.tasks.model_families import family
from tests.support.tuning.fake_machines import A_GPU, a_machine
from tests.support.tuning.fake_machines import facts as made_up
from tests.support.tuning.fake_races import Doubtful, searching, told


def test_only_what_can_be_run_is_tried() -> None:
    facts, hardware = told(family("mlp"))
    assert facts.images and not facts.convolutions  # nothing in it is the faster for another order of dimensions
    changes = eager_changes(facts, hardware, Plan(), threads=1)
    assert {"layout": "channels_last"} not in changes
    assert {"optimizer": "fused"} in changes
    assert {"threads": 1} not in changes  # as it is anyway
    assert compiled_changes(facts, replace(hardware, compiler=None), Plan()) == []


def test_on_cuda_several_steps_are_recorded_at_once_where_the_data_lies_there() -> None:
    """With a compiler first; whether they win and come to the same, race and proof tell."""
    cases = (
        ("stream", 1000, ["step"]),
        ("device", 64, [32, "step"]),
        ("device", 63, [8, "step"]),
        ("device", 15, ["step"]),
    )
    for residency, batches, recorded in cases:
        facts = made_up().model_copy(update={"batches": batches})
        ways = compiled_changes(facts, a_machine(A_GPU), Plan(device="cuda:0", residency=residency))
        graphs = [(way.get("compile", "none"), way["graphs"]) for way in ways if "graphs" in way]
        assert graphs == [(how, one) for how in ("step", "none") for one in recorded]
        assert ways[: len(recorded)] == [{"compile": "step", "graphs": one} for one in recorded]
        assert {"compile": "step"} in ways


def test_channels_last_is_tried_eagerly_for_normalised_images_alone() -> None:
    facts, hardware = told(family("cnn"))
    assert facts.convolutions
    eager = Plan(device="cpu", optimizer="fused")
    normed, plain = (facts.model_copy(update={"normed": value}) for value in (True, False))
    assert eager_variants(normed, hardware, eager, ()) == [eager.with_axes(layout="channels_last")]
    assert eager_variants(plain, hardware, eager, ()) == []
    assert eager_variants(normed, hardware, eager, {"layout"}) == []
    assert eager_variants(normed, hardware, eager.with_axes(layout="channels_last"), ()) == []


def test_samples_of_one_epoch_are_not_read_first() -> None:
    facts, hardware = told(family("cnn"))
    for steps, residencies in ((100, []), (101, ["host"])):
        read = facts.model_copy(update={"data": "Samples", "batches": 100, "steps": steps})
        changes = eager_changes(read, hardware, Plan(device="cpu"), threads=1)
        assert [change["residency"] for change in changes if "residency" in change] == residencies


def test_axes_that_the_user_set_stay() -> None:
    facts, hardware = told(family("cnn"))
    changes = not_fixed(eager_changes(facts, hardware, Plan(), threads=64), {"threads", "optimizer"})
    assert {"layout": "channels_last"} in changes
    assert not any(change.keys() & {"threads", "optimizer"} for change in changes)


def test_the_best_value_of_each_axis_is_put_together() -> None:
    changes = [{"threads": 1}, {"threads": 2}, {"optimizer": "fused"}, {"layout": "channels_last"}]
    speeds = [(1.2, "faster"), (1.5, "faster"), (1.01, "no difference"), (1.3, "faster")]
    timings = [Timing(name="x", ratio=ratio, verdict=verdict) for ratio, verdict in speeds]  # type: ignore[arg-type]
    assert combine_changes(changes, timings) == {"threads": 2, "layout": "channels_last"}


def test_a_step_is_looked_at_and_nothing_has_happened() -> None:
    from hotloop.core.state import differing_paths
    from hotloop.lowering.build import lower

    program = lower(family("mlp"))
    before = program.state()
    made = profile_step(program)
    assert made.operations > 30  # forward, backward, clipping and update of four parameters
    assert made.library_s and made.other_s
    assert differing_paths(program.state(), before) == []


@pytest.mark.more
def test_a_step_that_torch_does_not_show_is_hoped_little_of() -> None:
    from hotloop.core.state import differing_paths
    from hotloop.lowering.build import lower

    class Branching(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return torch.cond(x.sum() > 0, lambda value: 2 * value, lambda value: 3 * value, (y,))

    task = a_task()
    width = task.roles.train.columns[0].flatten(1).shape[1]
    model = torch.nn.Sequential(torch.nn.Flatten(), Branching(width, 10))
    program = lower(replace(task, model=lambda: model))
    before = program.state()
    assert profile_step(program) is None and differing_paths(program.state(), before) == []
    program.advance(1)  # torch's compiler, which runs the branches, was left as it had been
    assert estimate_compile_gain(None, 1e-3) == estimate_compile_gain(StepProfile(0), 1e-3)


def test_products_stay_with_the_library_and_a_convolution_that_is_rewritten_need_not() -> None:
    from torch.ops import aten

    image = torch.zeros(1, 3, 8, 8)
    assert step_profile._is_library_call(aten.addmm.default, (image, image, image), True)
    assert step_profile._is_library_call(aten.scaled_dot_product_attention.default, (image, image, image), True)
    assert not any(
        step_profile._is_library_call(one, (image,), True) for one in (aten.relu.default, aten._foreach_add_.Scalar)
    )


class Stays(ReadOnlyDispatchMode):
    """Which convolutions of a step, or others, forward and backward, are reckoned to stay with the library."""

    def __init__(self, rewrites: bool, kind: str = "convolution") -> None:
        super().__init__()
        self.rewrites, self.kind, self.found = rewrites, kind, list[bool]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__.startswith(self.kind):
            self.found.append(step_profile._is_library_call(function, args, self.rewrites))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("layers", "rewrites", "stay"),
    [
        ([torch.nn.Conv2d(2, 4, 3)], True, [False, False]),
        ([torch.nn.Conv2d(2, 4, 3)], False, [True, True]),  # nothing is compiled that rewrites it
        ([torch.nn.Conv2d(2, 4, 5)], True, [True, True]),  # 50 weights in a filter
        ([torch.nn.Conv2d(2, 2, 3, groups=2)], True, [True, True]),
        # The second one's input learns, as MobileNet's 3 x 3 ones do.
        ([torch.nn.Conv2d(2, 2, 3), torch.nn.Conv2d(2, 2, 3)], True, [False, True, True, False]),
    ],
    ids=["small", "without rewrites", "large", "grouped", "behind another"],
)
def test_a_convolution_counts_as_rewritten_only_where_the_rewrite_takes_it(
    layers: list[torch.nn.Module], rewrites: bool, stay: list[bool]
) -> None:
    with Stays(rewrites) as seen:
        torch.nn.Sequential(*layers)(torch.zeros(2, 2, 8, 8)).sum().backward()
    assert seen.found == stay


def test_a_step_of_many_small_operations_gains_most_by_compiling() -> None:
    gains = [estimate_compile_gain(StepProfile(200), step_s) for step_s in (1.5e-3, 1e-2, 1.0)]  # on an accelerator
    assert gains[0] > gains[1] > gains[2] > 1
    assert estimate_compile_gain(StepProfile(10_000), 1e-3) < 10
    few, many = (
        StepProfile(30, 1e-3, library_s=0.8e-3, other_s=0.1e-3),
        StepProfile(100, 1e-3, library_s=0.1e-3, other_s=0.4e-3),
    )
    assert 1 < estimate_compile_gain(few, 1.0) < 1.5 < estimate_compile_gain(many, 1.0) < 10  # its own time counts


@pytest.mark.parametrize(("speed", "chosen"), [(1.06, "optimizer=fused"), (1.02, BASELINE)])
def test_what_seemed_faster_races_once_more_if_that_can_pay(
    monkeypatch: pytest.MonkeyPatch, speed: float, chosen: str
) -> None:
    races = Doubtful(optimizer__fused=speed, layout__channels_last=1.01)
    assert searching(monkeypatch, races, steps=10_000).run() == chosen  # 100 s
    assert races.raced.count("optimizer=fused") == (2 if chosen != BASELINE else 1)
    assert races.raced.count("layout=channels_last") == 1


def test_where_time_is_tight_what_is_seldom_ahead_of_another_stays_out() -> None:
    changes: list[AxisChange] = [
        {"optimizer": "fused"},
        {"optimizer": "foreach"},
        {"allocator": "keep"},
        {"threads": 1},
    ]
    rules = Plan(optimizer="fused", allocator="keep")
    assert likely(changes, rules) == [{"optimizer": "fused"}, {"threads": 1}]
    assert likely(changes, Plan()) == [{"optimizer": "fused"}, {"allocator": "keep"}, {"threads": 1}]
    assert likely(changes[1:], None) == changes[1:]
    assert Budget.of(0.003, 40_000, None).is_tight
    assert not Budget.of(0.003, 200_000, None).is_tight and not Budget.of(0.003, 40_000, 30.0).is_tight


def test_volumes_lie_as_usual() -> None:
    """Nobody has measured anything else."""
    told = made_up(images=True, convolutions=True, inputs=[[1, 6, 6]])
    volumes = told.model_copy(update={"inputs": [[1, 6, 6, 6]]})
    assert layout_changes(volumes, a_machine(), Plan(device="cpu")) == []
    assert layout_changes(told, a_machine(), Plan(device="cpu")) == [{"layout": "channels_last"}]
    assert layout_changes(told, a_machine(), Plan(device="cpu", layout="channels_last")) == []
