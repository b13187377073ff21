"""Rewrites of a captured step: where they apply, that the step stays the same, and that a wrong one is seen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import hotloop
from bench.rewrites import NETWORKS, task_of
from hotloop.data.tree import tensors
from hotloop.errors import PlanError
from hotloop.lowering import compiled
from hotloop.lowering.capture import Captured, capture, step_tensors
from hotloop.lowering.hosted import host
from hotloop.lowering.rewrites import REWRITES, conv_as_gemm, mm_by_onednn, pool_as_max, rewrite
from hotloop.plan import Plan
from tests.cpu.families import family
from tests.cpu.programs import a_task

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "Adamax": torch.optim.Adamax,
}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """`all` is asked for what it does, not for where that is likely to be faster."""
    monkeypatch.setattr(conv_as_gemm, "CACHED_BYTES", float("inf"))


class Step:
    """The captured step of a Task, and the tensors that it runs on."""

    def __init__(self, task: hotloop.Task, double: bool = False) -> None:
        program = hotloop.lower(task)
        if double:
            program.model.double()
        batch, self.samples = next(program.feed.epoch(0))
        if double:
            batch = (batch[0].double(), batch[1])
        program._step(batch, self.samples, 0)
        hyper = {"0/lr": torch.full((), 1e-3, dtype=torch.float64)}
        with torch.random.fork_rng():
            self.captured = capture(program._step, batch, self.samples, hyper, whole=True)
        self.flat = [*pytree.tree_leaves(step_tensors(program._step, hyper, whole=True)), *tensors(batch)]

    def after(self, captured: Captured, extra: Callable[[list[Tensor]], Tensor] | None = None) -> list[Tensor]:
        """Loss, and all that the step changes, after it ran operation by operation."""
        flat = [value.detach().clone() for value in self.flat]
        with torch.no_grad():
            (loss, *_) = captured.graph(*flat, *([extra(flat)] if extra else []))
        return [loss, *flat]


def apart(ones: list[Tensor], others: list[Tensor]) -> float:
    """The largest distance of two tensors over their size."""
    pairs = [(one.double(), other.double()) for one, other in zip(ones, others, strict=True)]
    return max(float((one - other).norm() / max(float(other.norm()), 1e-12)) for one, other in pairs)


# ---------------------------------------------------------------- where they apply


TIMES = {
    "lenet": {"pool_first": 2, "pool_as_max": 2, "conv_as_gemm": 1},
    "small_vgg": {"pool_first": 2, "pool_as_max": 2, "conv_as_gemm": 1},
    "residual": {"pool_first": 1, "pool_as_max": 1, "conv_as_gemm": 1},
}


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("name", TIMES)
def test_all_of_them_leave_the_step_as_it_is(name: str, double: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mm_by_onednn, "slow_here", lambda: False)
    task = task_of(name, 16, 8)  # the update of plain SGD is no larger than its gradient's error
    step = Step(
        hotloop.Task(**{**vars_of(task), "data": task.data, "optimizer": partial(torch.optim.SGD, lr=0.1)}), double
    )
    plain = step.after(step.captured)
    assert rewrite(step.captured.graph, "all") == TIMES[name] | {"mm_by_onednn": 0}
    assert apart(step.after(step.captured), plain) < (1e-12 if double else 1e-4)


@pytest.mark.parametrize("which", REWRITES)
def test_the_bench_has_three_networks_for_each_and_names_them(which: str) -> None:
    fires = []
    for name in NETWORKS:
        with suppress(PlanError):
            assert rewrite(Step(task_of(name, 64)).captured.graph, which)[which] > 0
            fires.append(name)
    assert len(fires) >= 3
    assert fires == [name for name, network in NETWORKS.items() if which in network.rewrites]


@pytest.mark.parametrize("which", ["pool_first", "pool_as_max"])
def test_where_the_gradient_goes_is_the_same_to_the_bit(which: str) -> None:
    """With many equal numbers in a window, too: the first of them gets it."""
    task = task_of("lenet", 16, 8)
    images, labels = task.data
    step = Step(hotloop.Task(**{**vars_of(task), "data": (images.sign(), labels)}))
    plain = step.after(step.captured)
    rewrite(step.captured.graph, which)
    assert all(map(torch.equal, step.after(step.captured), plain))


def vars_of(task: hotloop.Task) -> dict[str, Any]:
    return {name: getattr(task, name) for name in ("model", "loss", "optimizer", "batch_size", "seed")}


def convolving(*layers: nn.Module, size: int = 8, channels: int = 2) -> hotloop.Task:
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))
    images = torch.randn(12, channels, size, size, generator=torch.Generator().manual_seed(2))
    return a_task(model=lambda: deepcopy(model), data=(images, images[:, 0, 0, :3].argmax(1)), batch_size=6)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(2, 3, 3, stride=2, padding=1)],
        [nn.Conv2d(2, 3, (1, 3), dilation=2, padding=(0, 2), bias=False)],
        [nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d((2, 4))],
        [nn.Conv2d(2, 3, 1), nn.MaxPool2d((4, 2)), nn.ReLU()],
    ],
    ids=["strided", "dilated", "tanh between", "pooled at once"],
)
def test_convolutions_of_all_shapes(layers: list[nn.Module]) -> None:
    step = Step(convolving(*layers), double=True)
    plain = step.after(step.captured)
    assert rewrite(step.captured.graph, "conv_as_gemm") == {"conv_as_gemm": 1}
    assert apart(step.after(step.captured), plain) < 1e-12


@pytest.mark.parametrize(
    ("which", "layers"),
    [
        ("pool_as_max", [nn.MaxPool2d(3, stride=2)]),  # windows that overlap
        ("pool_as_max", [nn.MaxPool2d(2, padding=1)]),
        ("pool_as_max", [nn.MaxPool2d(3)]),  # a remainder is left out
        ("pool_as_max", [nn.MaxPool2d(8)]),
        ("pool_first", [nn.MaxPool2d(2), nn.ReLU()]),  # it is so already
        ("pool_first", [nn.GELU(), nn.MaxPool2d(2)]),
        ("conv_as_gemm", [nn.Conv2d(2, 2, 3, groups=2)]),
        ("conv_as_gemm", [nn.Conv2d(2, 2, 5)]),  # 50 weights in a filter
        ("conv_as_gemm", [nn.ConvTranspose2d(2, 2, 3)]),
        ("all", [nn.AvgPool2d(2)]),
    ],
)
def test_what_a_rewrite_is_not_for_is_refused(which: str, layers: list[nn.Module]) -> None:
    step = Step(convolving(*layers))
    with pytest.raises(PlanError, match=f"rewrites={which} finds nothing") as error:
        rewrite(step.captured.graph, which)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("most_bytes", "found"), [(1, 0), (1 << 20, 1)])
def test_a_convolution_whose_columns_fit_no_cache_is_left_to_the_library_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, found: int
) -> None:
    monkeypatch.setattr(conv_as_gemm, "CACHED_BYTES", most_bytes)
    layers = nn.Conv2d(2, 2, 3), nn.ReLU(), nn.MaxPool2d(2)
    assert rewrite(Step(convolving(*layers)).captured.graph, "all")["conv_as_gemm"] == found
    assert rewrite(Step(convolving(*layers)).captured.graph, "conv_as_gemm") == {"conv_as_gemm": 1}


def test_a_convolution_of_one_channel_may_be_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_as_gemm, "CACHED_BYTES", 1)
    step = Step(convolving(nn.Conv2d(1, 2, 3), channels=1))
    assert rewrite(step.captured.graph, "all")["conv_as_gemm"] == 1
    monkeypatch.setattr(conv_as_gemm, "MOST_BYTES", 1)
    with pytest.raises(PlanError, match="finds nothing"):
        rewrite(Step(convolving(nn.Conv2d(1, 2, 3), channels=1)).captured.graph, "all")


def test_all_says_what_a_name_alone_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_as_gemm, "CACHED_BYTES", 1)
    with pytest.raises(
        PlanError, match=r"of one channel or with columns that fit 1 MiB \(name conv_as_gemm to have it anyway\)"
    ):
        rewrite(Step(convolving(nn.Conv2d(2, 2, 3))).captured.graph, "all")


def test_a_convolution_whose_input_learns_is_left_alone() -> None:
    step = Step(convolving(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)))
    assert rewrite(step.captured.graph, "conv_as_gemm") == {"conv_as_gemm": 1}


class Twice(nn.Module):
    """Convolves the same data with the same weight, each time in its own way."""

    def __init__(self, *hows: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, 3, 3, generator=torch.Generator().manual_seed(3)))
        self.hows = hows

    def forward(self, x: Tensor) -> Tensor:
        found = [nn.functional.conv2d(x, self.weight, **how).flatten(1) for how in self.hows]
        return torch.cat([one.mul(number).tanh() for number, one in enumerate(found, 1)], 1)


@pytest.mark.parametrize(
    "hows",
    [
        [dict(padding=1), dict(padding=2, dilation=2)],
        [dict(padding=1), dict(padding=0)],
        [dict(padding=1), dict(padding=1, stride=2)],
        [dict(padding=1), dict(padding=1)],
    ],
    ids=["other dilation", "other shape", "other stride", "the same"],
)
def test_one_weight_that_convolves_the_same_data_twice(hows: list[dict[str, Any]]) -> None:
    step = Step(convolving(Twice(*hows)), double=True)
    plain = step.after(step.captured)
    assert rewrite(step.captured.graph, "conv_as_gemm") == {"conv_as_gemm": 2}
    assert apart(step.after(step.captured), plain) < 1e-12


def test_the_same_convolution_twice_with_a_pooling_of_its_own_each_time() -> None:
    """A window's order is that of one gradient, and may come to the other's forward."""

    class Pooled(Twice):
        def forward(self, x: Tensor) -> Tensor:
            one, other = (nn.functional.conv2d(x, self.weight, padding=1) for _ in range(2))
            pooled = nn.functional.max_pool2d(one, 2), nn.functional.max_pool2d(other.mul(2), (2, 4)).tanh()
            return torch.cat([each.flatten(1) for each in pooled], 1)

    step = Step(convolving(Pooled()), double=True)
    plain = step.after(step.captured)
    assert rewrite(step.captured.graph, "all") == {
        "pool_first": 0,
        "pool_as_max": 2,
        "conv_as_gemm": 2,
        "mm_by_onednn": 0,
    }
    assert apart(step.after(step.captured), plain) < 1e-12


def test_a_relu_that_is_looked_at_elsewhere_stays() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.relu()
            return nn.functional.max_pool2d(x, 2).flatten(1) + x.mean()

    step = Step(convolving(nn.Conv2d(2, 2, 3, padding=1), Both()))
    with pytest.raises(PlanError):
        rewrite(step.captured.graph, "pool_first")


# ---------------------------------------------------------------- numbers of the host


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_numbers_are_computed_on_the_host(name: str) -> None:
    step = Step(family("mlp") if name == "Adam" else a_task(optimizer=OPTIMIZERS[name]))
    plain = step.after(step.captured)
    hosted, numbers = host(step.captured)
    assert numbers is not None
    assert not any("pow" in str(node.target) for node in hosted.graph.graph.nodes)
    assert apart(step.after(hosted, numbers), plain) < 1e-6


def test_a_count_that_is_stale_is_seen() -> None:
    """The count of steps is read anew at each step."""
    step = Step(a_task(optimizer=torch.optim.Adam))
    _, numbers = host(step.captured)
    assert numbers is not None
    first = numbers(step.flat).clone()
    counts = [value for value in step.flat if value.ndim == 0 and value.dtype == torch.float32]
    for count in counts:
        count += 1
    assert not torch.equal(numbers(step.flat), first)


def test_counts_that_come_apart_give_each_parameter_its_own_numbers() -> None:
    step = Step(a_task(optimizer=torch.optim.Adam))
    hosted, numbers = host(step.captured)
    assert numbers is not None
    together = numbers(step.flat).clone()
    next(value for value in step.flat if value.ndim == 0 and value.dtype == torch.float32).add_(5)
    assert len(set(numbers(step.flat).tolist())) > len(set(together.tolist()))
    assert apart(step.after(hosted, lambda flat: numbers(step.flat)), step.after(step.captured)) < 1e-6


@pytest.mark.parametrize("groups", [1, 2])
def test_groups_with_settings_of_their_own_have_numbers_of_their_own(groups: int) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            [{"params": [one], "betas": (0.9 - 0.1 * (at % groups), 0.99)} for at, one in enumerate(parameters)]
        )

    step = Step(a_task(optimizer=optimizer))
    plain = step.after(step.captured)
    hosted, numbers = host(step.captured)
    assert apart(step.after(hosted, numbers), plain) < 1e-6


def test_what_is_computed_does_not_grow_with_the_number_of_parameters() -> None:
    def formulas(layers: int) -> int:
        model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(layers)])
        _, numbers = host(Step(a_task(model=lambda: model, optimizer=torch.optim.Adam)).captured)
        assert numbers is not None
        return len(numbers._formulas)

    assert formulas(1) == formulas(5)


# ---------------------------------------------------------------- under a plan


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the captured step operation by operation: what is compiled of it is the compiler's affair."""

    def run(captured: Captured, *others: Any) -> Callable[[list[Tensor]], Any]:
        return lambda flat: captured.graph(*flat)

    monkeypatch.setattr(compiled, "_compiled", run)


PLAN = Plan(compile="step", rewrites="all")


@pytest.mark.usefixtures("uncompiled")
def test_rewritten_steps_are_trusted() -> None:
    said: list[str] = []
    found = hotloop.check(task_of("lenet", 64, 16), PLAN, say=said.append)
    assert found.parity == "fp32-equivalent"
    assert any("pool_first 2, pool_as_max 2, conv_as_gemm 1" in line for line in said)


def _last_of_equals(gradient: Tensor, place: Tensor, size: tuple[int, int]) -> Tensor:
    return pool_as_max._spread(gradient, (place + 1) % (size[0] * size[1]), size)


def _half_the_windows(gradient: Tensor, place: Tensor, size: tuple[int, int]) -> Tensor:
    placed = pool_as_max.spread_by_place(gradient, place, size)
    return torch.where(torch.arange(placed.shape[1]) % 2 == 0, placed, 0.0)


FAULTS = {
    "another number of the window": (conv_as_gemm, "spread_by_place", _half_the_windows),
    "rows for columns": (conv_as_gemm._Convolution, "gradients", None),
}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_rewrite_is_seen_by_check(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong = FAULTS[fault]
    if wrong is None:
        honest = conv_as_gemm._Convolution.gradients

        def wrong(self: Any, placed: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
            weight, bias = honest(self, placed, columns)
            return weight.transpose(2, 3), bias

    monkeypatch.setattr(where, name, wrong)
    found = hotloop.check(task_of("lenet", 64, 16), PLAN)
    assert found.parity == "broken"


@pytest.mark.usefixtures("uncompiled")
def test_numbers_that_are_one_step_late_are_seen_by_check(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = compiled.host

    def late(captured: Captured) -> Any:
        hosted, numbers = honest(captured)
        assert numbers is not None
        return hosted, lambda flat: numbers([value - 1 if value.ndim == 0 else value for value in flat])

    monkeypatch.setattr(compiled, "host", late)
    found = hotloop.check(a_task(optimizer=torch.optim.Adam), Plan(compile="step"))
    assert found.parity == "broken"


def test_every_rewrite_is_a_value_of_the_axis() -> None:
    for name in REWRITES:
        assert Plan(compile="step", rewrites=name).brief() == f"compile=step rewrites={name}"
