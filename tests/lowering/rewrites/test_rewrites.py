"""Rewrites of a captured step: where they apply, that the step stays the same, and that a wrong one is seen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from bench.rewrites import NETWORKS, task_of
from hotloop.errors import PlanError
from hotloop.lowering.compile.capture import CapturedStep
from hotloop.lowering.compile.host_scalars import split_host_scalars
from hotloop.lowering.rewrites import REWRITES, apply_rewrite, conv_in_pool, mm_by_onednn, pool_as_max
from hotloop.lowering.steps import compiled_step
from hotloop.plan import Plan
from tests.support.programs import a_task
from tests.support.rewritten_steps import Step, Twice, apart, assert_refused, assert_stays_the_same, convolving, vars_of
from tests.support.tasks.model_families import family

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "Adamax": torch.optim.Adamax,
}


# ---------------------------------------------------------------- where they apply


TIMES = {
    "lenet": {"pool_as_max": 2},
    "small_vgg": {"pool_as_max": 2},
    "residual": {"pool_as_max": 1},
    "colour": {"pool_as_max": 2},
    "spectrogram": {"conv_in_pool": 1},
}


@pytest.mark.few("lenet-True", "residual-True")
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("name", TIMES)
def test_all_of_them_leave_the_step_as_it_is(name: str, double: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mm_by_onednn, "is_mkl_slow_here", lambda: False)
    task = task_of(name, 16, 8)  # the update of plain SGD is no larger than its gradient's error
    given = {**vars_of(task), "data": task.data, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    assert_stays_the_same(Step(hotloop.Task(**given), double), "all", TIMES[name], 1e-12 if double else 1e-4)


@pytest.mark.more
@pytest.mark.parametrize("which", REWRITES)
def test_the_bench_has_three_networks_for_each_and_names_them(which: str) -> None:
    fires = []
    for name in NETWORKS:
        with suppress(PlanError):
            assert apply_rewrite(Step(task_of(name, 64)).captured.graph, which)[which] > 0
            fires.append(name)
    assert len(fires) >= 3
    assert fires == [name for name, network in NETWORKS.items() if which in network.rewrites]


def test_where_the_gradient_goes_is_the_same_to_the_bit() -> None:
    """With many equal numbers in a window, too: the first of them gets it."""
    task = task_of("lenet", 16, 8)
    images, labels = task.data
    step = Step(hotloop.Task(**{**vars_of(task), "data": (images.sign(), labels)}))
    plain = step.after(step.captured)
    apply_rewrite(step.captured.graph, "pool_as_max")
    assert all(map(torch.equal, step.after(step.captured), plain))


@pytest.mark.parametrize(
    ("which", "layers"),
    [
        ("pool_as_max", [nn.MaxPool2d(3, stride=2)]),  # windows that overlap
        ("pool_as_max", [nn.MaxPool2d(2, padding=1)]),
        ("pool_as_max", [nn.MaxPool2d(3)]),  # a remainder is left out
        ("pool_as_max", [nn.MaxPool2d(8)]),
        ("all", [nn.AvgPool2d(2)]),
    ],
)
def test_what_a_rewrite_is_not_for_is_refused(which: str, layers: list[nn.Module]) -> None:
    assert_refused(Step(convolving(*layers)), which)


def test_all_says_what_a_name_alone_brings() -> None:
    with pytest.raises(PlanError, match=r"conv_in_pool, .* or name a rewrite, which then applies wherever it can"):
        apply_rewrite(Step(convolving(nn.Conv2d(2, 2, 3))).captured.graph, "all")


@pytest.mark.more
def test_the_same_convolution_twice_with_a_pooling_of_its_own_each_time() -> None:
    """One is rewritten with its pooling, the other has something between."""

    class Pooled(Twice):
        def forward(self, x: Tensor) -> Tensor:
            one, other = (nn.functional.conv2d(x, self.weight, padding=1) for _ in range(2))
            pooled = nn.functional.max_pool2d(one, 2), nn.functional.max_pool2d(other.tanh(), (2, 4))
            return torch.cat([each.flatten(1) for each in pooled], 1)

    step = Step(convolving(Pooled(channels=1), channels=1), double=True)
    assert_stays_the_same(step, "all", {"conv_in_pool": 1, "pool_as_max": 1})


# ---------------------------------------------------------------- numbers of the host


@pytest.mark.few("Adam", "NAdam")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_numbers_are_computed_on_the_host(name: str) -> None:
    step = Step(family("mlp") if name == "Adam" else a_task(optimizer=OPTIMIZERS[name]))
    plain = step.after(step.captured)
    hosted, numbers = split_host_scalars(step.captured)
    assert numbers is not None
    assert not any("pow" in str(node.target) for node in hosted.graph.graph.nodes)
    assert apart(step.after(hosted, numbers), plain) < 1e-6


def test_a_count_that_is_stale_is_seen() -> None:
    """The count of steps is read anew at each step."""
    step = Step(a_task(optimizer=torch.optim.Adam))
    _, numbers = split_host_scalars(step.captured)
    assert numbers is not None
    first = numbers(step.flat).clone()
    counts = [value for value in step.flat if value.ndim == 0 and value.dtype == torch.float32]
    for count in counts:
        count += 1
    assert not torch.equal(numbers(step.flat), first)


@pytest.mark.more
def test_counts_that_come_apart_give_each_parameter_its_own_numbers() -> None:
    step = Step(a_task(optimizer=torch.optim.Adam))
    hosted, numbers = split_host_scalars(step.captured)
    assert numbers is not None
    together = numbers(step.flat).clone()
    next(value for value in step.flat if value.ndim == 0 and value.dtype == torch.float32).add_(5)
    assert len(set(numbers(step.flat).tolist())) > len(set(together.tolist()))
    assert apart(step.after(hosted, lambda flat: numbers(step.flat)), step.after(step.captured)) < 1e-6


@pytest.mark.more
@pytest.mark.parametrize("groups", [1, 2])
def test_groups_with_settings_of_their_own_have_numbers_of_their_own(groups: int) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            [{"params": [one], "betas": (0.9 - 0.1 * (at % groups), 0.99)} for at, one in enumerate(parameters)]
        )

    step = Step(a_task(optimizer=optimizer))
    plain = step.after(step.captured)
    hosted, numbers = split_host_scalars(step.captured)
    assert apart(step.after(hosted, numbers), plain) < 1e-6


@pytest.mark.more
def test_what_is_computed_does_not_grow_with_the_number_of_parameters() -> None:
    def formulas(layers: int) -> int:
        model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(layers)])
        _, numbers = split_host_scalars(Step(a_task(model=lambda: model, optimizer=torch.optim.Adam)).captured)
        assert numbers is not None
        return len(numbers._formulas)

    assert formulas(1) == formulas(5)


# ---------------------------------------------------------------- under a plan


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(captured: CapturedStep, *others: Any) -> Callable[[list[Tensor]], Any]:
        return lambda flat: captured.graph(*flat)

    monkeypatch.setattr(compiled_step, "_compile", run)


PLAN = Plan(compile="step", rewrites="all")


@pytest.mark.more
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", ["spectrogram", "residual"])
def test_rewritten_steps_are_trusted(name: str) -> None:
    said: list[str] = []
    found = hotloop.check(task_of(name, 64, 16), PLAN, say=said.append)
    assert found.parity == "fp32-equivalent"
    assert any(", ".join(f"{which} {times}" for which, times in TIMES[name].items()) in line for line in said)


def _moved(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The next number of each window of four."""
    return found[0], (found[1] + 1) % 4


def _half_the_windows(views: Tensor) -> Tensor:
    """Of those side by side."""
    return views * (torch.arange(views.shape[-1]) % 2)


def _last_column(spread: Tensor) -> Tensor:
    """The gradient of a window goes to its next column."""
    return spread.roll(1, -1)


FAULTS: dict[str, tuple[str, Any, str, Callable[[Any], Any]]] = {
    "pooled, columns for rows of a filter": ("lenet", conv_in_pool._Convolution, "gradient", lambda x: x.mT),
    "pooled, another number of the window": ("lenet", conv_in_pool._Convolution, "largest", _moved),
    "pooled, half the windows": ("lenet", conv_in_pool._Convolution, "views", _half_the_windows),
    "pooled, columns for rows of a window": ("lenet", conv_in_pool._Convolution, "views", lambda x: x.transpose(0, 1)),
    "a maximum, another number of the window": ("lenet", pool_as_max, "_scatter_gradient", _last_column),
    "a maximum, another window's gradient": ("lenet", pool_as_max, "to_layout_of", lambda x: x.flip(-1)),
}


_LIKE_ANOTHER = (
    *("pooled, columns for rows of a window", "pooled, half the windows", "pooled, another number of the window"),
    "a maximum, another number of the window",
)


@pytest.mark.few("a maximum, another window's gradient")
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=pytest.mark.more) if one in _LIKE_ANOTHER else one for one in FAULTS]
)
def test_a_wrong_rewrite_is_seen_by_check(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, where, name, wrong = FAULTS[fault]
    honest = getattr(where, name)
    module = where.__module__ if isinstance(where, type) else where.__name__
    plan = PLAN.with_axes(rewrites=module.rpartition(".")[2])
    monkeypatch.setattr(where, name, lambda *given: wrong(honest(*given)))
    assert hotloop.check(task_of(network, 64, 16), plan).parity == "broken"


@pytest.mark.more
@pytest.mark.usefixtures("uncompiled")
def test_numbers_that_are_one_step_late_are_seen_by_check(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = compiled_step.split_host_scalars

    def late(captured: CapturedStep) -> Any:
        hosted, numbers = honest(captured)
        assert numbers is not None
        return hosted, lambda flat: numbers([value - 1 if value.ndim == 0 else value for value in flat])

    monkeypatch.setattr(compiled_step, "split_host_scalars", late)
    found = hotloop.check(a_task(optimizer=torch.optim.Adam), Plan(compile="step"))
    assert found.parity == "broken"


def test_every_rewrite_is_a_value_of_the_axis() -> None:
    for name in REWRITES:
        assert Plan(compile="step", rewrites=name).brief() == f"compile=step rewrites={name}"
