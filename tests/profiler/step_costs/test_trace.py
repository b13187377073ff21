"""The trace of a step on fake tensors: its operators, and its memory against real steps and torch's MemTracker."""

from __future__ import annotations

import resource
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from bench.foresight.memory import measured_peak
from bench.foresight.memory_networks import NETWORKS, Network, image_batch
from bench.speed.models import mlp
from hotloop import Plan, Task
from hotloop.errors import TaskError
from hotloop.profiler.step_costs.trace import trace_step

LOSS = nn.CrossEntropyLoss()
WIDE = partial(mlp, 100, 200, 10)
QUICK = ("MLP, SGD", "small CNN, dropout", "LSTM of two layers", "VAE", "checkpointed blocks", "MLP, Adagrad, wide")
BY_NAME = {network.name: network for network in NETWORKS}


def traced(network: Network, **options):
    return trace_step(network.model, network.batch(), loss=network.loss, optimizer=network.optimizer, **options)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.more) for name in BY_NAME]
)
def test_peak_memory_is_that_of_a_real_step(name: str) -> None:
    if name == "convolutional autoencoder" and torch.backends.cpu.get_cpu_capability() == "AVX512":
        pytest.skip(
            "oneDNN's copies for transposed convolutions are known with AVX2 alone; with AVX-512 it copies less"
        )
    assert traced(BY_NAME[name]).peak_bytes == pytest.approx(measured_peak(BY_NAME[name]), rel=0.05)


def test_peak_memory_is_that_of_torchs_tracker() -> None:
    network = BY_NAME["MLP, SGD"]
    model, batch = network.model(), network.batch()
    optimizer = network.optimizer(model.parameters())
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *batch)
    with tracker:
        network.loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert traced(network).peak_bytes == pytest.approx(peak, rel=0.02)


def test_operators_of_a_small_network_are_counted() -> None:
    costs = trace_step(WIDE, (torch.randn(3, 100), torch.zeros(3, dtype=torch.int64)), loss=LOSS, batch_size=32)
    forward = [one for one in costs.in_phase("forward") if one.kind == "linear"]
    assert [one.shape for one in forward] == [(1, 32, 200, 100), (1, 32, 10, 200)]
    assert [one.flops for one in forward] == [2 * 32 * 200 * 100, 2 * 32 * 10 * 200]
    backward = sum(one.count for one in costs.in_phase("backward") if one.kind == "linear")
    assert backward == 3  # the input takes no gradient
    assert costs.parameters == 100 * 200 + 200 + 200 * 10 + 10
    assert costs.gradient_bytes == costs.parameter_bytes == 4 * costs.parameters
    assert 2 * costs.parameter_bytes <= costs.optimizer_bytes <= 2 * costs.parameter_bytes + 64
    assert (costs.batch_size, costs.input_bytes) == (32, 32 * (400 + 8))
    assert costs.notes == ()


def test_a_gpu_updates_lists_and_drops_in_one_kernel() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 4))
    batch = (torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))
    names = {
        device: {one.name for one in trace_step(net, batch, loss=LOSS, device=device).operators}
        for device in ("cpu", "cuda")
    }
    assert "aten._foreach_addcmul_" in names["cuda"] - names["cpu"]
    assert "aten.native_dropout" in names["cuda"] - names["cpu"]


def test_accumulation_saves_activations_and_repeats_operators() -> None:
    batch = image_batch(1024, 100)()
    whole, pieces = (trace_step(WIDE, batch, loss=LOSS, plan=Plan(accumulation=number)) for number in (1, 4))
    assert pieces.flops == pytest.approx(whole.flops, rel=0.01)
    assert pieces.activation_peak_bytes < 0.5 * whole.activation_peak_bytes
    assert pieces.input_bytes == whole.input_bytes


def test_reduced_precision_has_products_of_its_dtype() -> None:
    batch = image_batch(64, 100)()
    products = [
        one for one in trace_step(WIDE, batch, loss=LOSS, plan=Plan(precision="bf16")).operators if one.kind == "linear"
    ]
    assert {one.dtype for one in products} == {"bfloat16"}


def test_a_task_and_its_model_have_equal_costs() -> None:
    x, y = torch.randn(40, 100), torch.randint(10, (40,))
    task = Task(model=WIDE, loss=LOSS, optimizer=torch.optim.Adam, data=(x, y), batch_size=8)
    assert trace_step(task).operators == trace_step(WIDE, (x[:8], y[:8]), loss=LOSS).operators


def test_several_optimizers_are_updated_in_turn() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def step(model, batch):
        yield "first", model.first(batch[0]).square().mean()
        yield "second", model.second(batch[0]).square().mean()

    def optimizers(parameters):
        model = parameters.model
        return {name: torch.optim.SGD(getattr(model, name).parameters(), lr=0.1) for name in ("first", "second")}

    task = Task(model=Pair, step=step, optimizer=optimizers, data=(torch.randn(8, 4), torch.zeros(8)), batch_size=4)
    costs = trace_step(task)
    assert sum(one.count for one in costs.in_phase("update")) == 4  # parameters
    assert costs.gradient_bytes == costs.parameter_bytes


def test_a_step_that_reads_values_is_traced_with_a_note() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x):
            scale = x.abs().max().item()
            return self.layer(x[x[:, 0] > 0] / scale)

    costs = trace_step(Reading, torch.randn(16, 8))
    assert next(one for one in costs.operators if one.kind == "linear").shape == (1, 16, 4, 8)
    assert len(costs.notes) == 2


def test_a_factory_that_reads_values_is_built_in_memory() -> None:
    def build() -> nn.Module:
        return nn.Linear(8, int(torch.linspace(1, 4, 4).numpy()[-1]))

    costs = trace_step(build, torch.randn(16, 8))
    assert costs.parameters == 36
    assert any("built in memory" in note for note in costs.notes)


def test_a_failing_model_is_one_clear_line() -> None:
    with pytest.raises(TaskError, match="the step fails"):
        trace_step(nn.Linear(8, 4), torch.randn(16, 7))


def test_the_model_and_the_generators_stay_unchanged() -> None:
    net = nn.Linear(4, 2)
    before, state = net.weight.detach().clone(), torch.get_rng_state()
    trace_step(net, torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(net.weight, before)
    assert net.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.more
def test_seven_billion_parameters_take_no_memory() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokens = torch.zeros(1, 512, dtype=torch.int64)
    costs = trace_step(lambda: LlamaForCausalLM(LlamaConfig()), {"input_ids": tokens, "labels": tokens}, device="cuda")
    assert costs.parameters == pytest.approx(6.74e9, rel=0.01)
    assert costs.peak_bytes > 16 * costs.parameters
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2e6  # KiB
