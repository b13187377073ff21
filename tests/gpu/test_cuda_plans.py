"""cudnn=benchmark, channels last and forms of the update in recorded steps on a CUDA device: each gives what the baseline gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import hotloop
from hotloop.lowering.transforms.cudnn import FreshAlgorithms, benchmark_algorithms
from hotloop.plan import Plan
from tests.lowering.steps.test_cuda_graph import Transposed, of_the_rate, optimizer
from tests.lowering.test_cpu_plans import STEPS, after, assert_equal_within_rounding, changed
from tests.support.programs import a_task
from tests.support.tasks.model_families import family

pytestmark = pytest.mark.gpu

ON = "cuda:0"
TIMED = Plan(device=ON, cudnn="benchmark")
PLANS = [
    TIMED,
    TIMED.with_axes(graphs="step"),
    TIMED.with_axes(graphs="step", layout="channels_last"),
    TIMED.with_axes(graphs=2, residency="device", compile="step", layout="channels_last"),
]


@pytest.fixture(autouse=True)
def in_fp32() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("plan", PLANS, ids=changed)
def test_timed_algorithms_give_what_the_baseline_gives(plan: Plan) -> None:
    state = after(hotloop.lower(family("residual"), plan), STEPS)
    assert_equal_within_rounding(state, after(hotloop.lower(family("residual"), Plan(device=ON)), STEPS))
    assert torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_each_form_of_the_update_is_recorded_however_weights_lie(name: str, how: str, layout: str) -> None:
    task = family("residual", optimizer=optimizer(name), schedule=of_the_rate)
    plan = Plan(device=ON, graphs="step", optimizer=how, layout=layout, cudnn="benchmark")
    assert_equal_within_rounding(after(hotloop.lower(task, plan), 9), after(hotloop.lower(task, Plan(device=ON)), 9))


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_a_fused_update_in_a_graph_reads_gradients_that_lie_otherwise(name: str) -> None:
    task = a_task(model=Transposed, optimizer=optimizer(name), schedule=of_the_rate)
    program = hotloop.lower(task, Plan(device=ON, graphs="step", optimizer="fused"))
    assert_equal_within_rounding(after(program, 4), after(hotloop.lower(task, Plan(device=ON)), 4))


def kernels(work: Callable[[], Tensor]) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return sum(event.device_type != torch.autograd.DeviceType.CPU for event in seen.events() or ())


def test_cudnn_times_its_algorithms_in_a_fresh_thread_and_not_where_it_has_chosen() -> None:
    """What `FreshAlgorithms` relies on: torch stores choices by thread, and reads the store before the switch."""
    image, weight = torch.randn(8, 16, 32, 32, device=ON), torch.randn(16, 16, 3, 3, device=ON)

    def convolve() -> Tensor:
        return torch.conv2d(image, weight)

    kernels(convolve)
    chosen, fresh = kernels(convolve), FreshAlgorithms()
    with benchmark_algorithms():
        assert kernels(convolve) == chosen
        assert kernels(lambda: fresh(convolve)) > chosen
        assert kernels(lambda: fresh(convolve)) <= chosen + 2  # the fastest may transform the layout first
