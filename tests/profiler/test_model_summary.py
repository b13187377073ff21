"""A model's summary: counts against numbers derived by hand and against torch's own counter, and what is marked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hotloop
from hotloop.core.records.model_summary import ModelSummary, ModuleRow
from hotloop.data.feeds.feed import first_batch

F32 = 4
"""Bytes of a float32."""


def task_of(model: Any, x: Tensor, y: Tensor | None = None, **fields: Any) -> hotloop.Task:
    given: dict[str, Any] = dict(
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters),
        data=(x, torch.arange(len(x)) % 3 if y is None else y),
        batch_size=8,
    )
    return hotloop.Task(model=model, **(given | fields))


def rows(summary: ModelSummary) -> dict[str, ModuleRow]:
    return {row.name: row for row in summary.rows}


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def test_a_perceptron_by_hand() -> None:
    summary = hotloop.summary(task_of(perceptron, torch.randn(20, 4)))
    parameters = (4 * 16 + 16) + (16 * 3 + 3)
    assert summary.batch == ["8x4", "8"]
    assert (summary.parameters, summary.trainable, summary.frozen, summary.buffers) == (parameters, parameters, 0, 0)
    by_name = rows(summary)
    assert [row.depth for row in summary.rows] == [0, 1, 1, 1]
    assert [row.output for row in summary.rows] == [[[8, 3]], [[8, 16]], [[8, 16]], [[8, 3]]]
    assert [row.parameters for row in summary.rows] == [0, 80, 0, 51]
    assert (by_name["0"].flops, by_name["2"].flops) == (2 * 8 * 4 * 16, 2 * 8 * 16 * 3)
    assert summary.forward_flops == 2 * 8 * (4 * 16 + 16 * 3)
    assert summary.backward_flops == 2 * 8 * (4 * 16 + 2 * 16 * 3)  # the first layer's input needs no gradient
    memory = summary.memory
    assert (memory.parameters, memory.gradients) == (F32 * parameters, F32 * parameters)
    assert memory.optimizer_state == 2 * F32 * parameters + 4 * F32  # two averages, and a count for each of 4 tensors
    assert memory.batch == F32 * 8 * 4 + 8 * 8
    assert by_name["1"].activations == F32 * 8 * 16  # the output of ReLU, also the second layer's input
    assert F32 * 8 * 16 <= memory.activations <= F32 * 8 * (16 + 3 + 3 + 1)  # and what the loss stores


def test_the_batch_size_and_the_optimizer_change_the_memory() -> None:
    plain = task_of(perceptron, torch.randn(20, 4), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    small, large = hotloop.summary(plain, batch_size=1), hotloop.summary(plain, batch_size=16)
    assert small.batch[0] == "1x4" and large.batch[0] == "16x4"
    assert large.forward_flops == 16 * small.forward_flops
    assert rows(large)["1"].activations == 16 * rows(small)["1"].activations
    assert small.memory.optimizer_state == 0 and small.memory.average == 0
    averaged = hotloop.summary(task_of(perceptron, torch.randn(20, 4), average=0.9))
    assert averaged.memory.average == averaged.memory.parameters


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(),
        nn.Linear(8 * 16, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "x", "attention"),
    [
        (perceptron, torch.randn(20, 4), 0),
        (images, torch.randn(20, 3, 6, 6), 0),
        (Attention, torch.randn(20, 5, 8), 2 * 8 * 2 * 5 * 5 * 4),
    ],
)
def test_flops_equal_those_of_torchs_counter(model: Any, x: Tensor, attention: int) -> None:
    """torch's counter (2.13) leaves out attention on a CPU: 2 products forward, and 5 backward.

    Args:
        attention: FLOPs of one product: batch 8, 2 heads, 5 queries, 5 keys, width 4.
    """
    task = task_of(model, x)
    summary = hotloop.summary(task)
    batch, network = first_batch(task.roles, 8), model()
    forward, both = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with both:
        with forward:
            loss = task.compute(network, batch).loss
        loss.backward()
    assert summary.forward_flops == forward.get_total_flops() + 2 * attention > 0
    assert summary.forward_flops + summary.backward_flops == both.get_total_flops() + 7 * attention
    assert sum(row.flops for row in summary.rows) == summary.forward_flops
    assert sum(row.parameters for row in summary.rows) == sum(value.numel() for value in network.parameters())


def test_a_convolution_in_groups_by_hand() -> None:
    """torch's counter (2.13) counts the gradient of such a weight twice."""
    network = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(6 * 16, 3))
    summary = hotloop.summary(task_of(lambda: network, torch.randn(20, 4, 6, 6)))
    convolution, linear = 2 * 8 * 16 * 6 * (2 * 9), 2 * 8 * 96 * 3
    assert summary.forward_flops == convolution + linear
    assert summary.backward_flops == convolution + 2 * linear  # the convolution's input is data


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def test_a_recurrent_layer_by_hand() -> None:
    """torch's own counter has no formula for the fused layer on a CPU."""
    summary = hotloop.summary(task_of(Recurrent, torch.randn(20, 5, 4)))
    cell = rows(summary)["cell"]
    assert cell.parameters == 4 * 6 * (4 + 6 + 2)
    assert cell.flops == 2 * 8 * 5 * (4 * 6) * (4 + 6)
    assert cell.output == [[8, 5, 6], [1, 8, 6], [1, 8, 6]]


class Odd(nn.Module):
    """A layer under two names, a tied weight, a layer in a loop, a frozen layer, and layers that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.spare = nn.Sequential(nn.Linear(4, 7))
        self.blocks = nn.ModuleList([nn.Linear(4, 4, bias=False)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.tied(self.again(self.first(x))))
        for _ in range(3):
            x = self.blocks[0](x)
        return self.head(x)


def test_shared_repeated_frozen_and_unused_layers_are_marked() -> None:
    summary = hotloop.summary(task_of(Odd, torch.randn(20, 4)))
    by_name = rows(summary)
    assert by_name["again"].shared_with == "first" and by_name["again"].parameters == 0
    assert (by_name["first"].calls, by_name["first"].parameters) == (2, 20)
    assert (by_name["tied"].parameters, by_name["tied"].notes) == (4, ["weight is first.weight"])
    assert (by_name["frozen"].parameters, by_name["frozen"].trainable) == (20, 0)
    assert by_name["spare"].notes == by_name["spare.0"].notes == ["not called"]
    assert by_name["blocks"].notes == []  # a list of layers is never called itself
    assert (by_name["blocks.0"].calls, by_name["blocks.0"].flops) == (3, 3 * 2 * 8 * 4 * 4)
    model = Odd()
    assert (
        summary.parameters == sum(row.parameters for row in summary.rows) == sum(p.numel() for p in model.parameters())
    )
    assert summary.frozen == 20
    unused = 4 * 7 + 7
    assert summary.memory.gradients == F32 * (summary.trainable - unused)
    text = str(summary)
    for words in ("first (Linear), 2 calls", "again (Linear), shared: the same as first", "frozen (Linear), frozen"):
        assert words in text
    assert "0 (Linear), not called" in text


def test_a_packed_sequence_shows_no_indices() -> None:
    class Packed(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), 5), batch_first=True)
            return self.head(self.cell(packed)[1][0][0])

    assert rows(hotloop.summary(task_of(Packed, torch.randn(20, 5, 4))))["cell"].output == [
        [40, 6],
        [1, 8, 6],
        [1, 8, 6],
    ]


def test_a_layer_whose_parameters_another_module_uses() -> None:
    row = rows(hotloop.summary(task_of(Attention, torch.randn(20, 5, 8))))["attention.out_proj"]
    assert row.calls == 0 and row.notes == ["not called, but its parameters are used"]


def test_folding_adds_deeper_layers_to_the_layer_above() -> None:
    summary = hotloop.summary(task_of(lambda: nn.Sequential(perceptron(), nn.Linear(3, 3)), torch.randn(20, 4)))
    folded = summary.folded(1)
    assert [row.name for row in folded] == ["", "0", "1"]
    assert (folded[1].parameters, folded[1].flops) == (131, 2 * 8 * (4 * 16 + 16 * 3))
    assert sum(row.parameters for row in summary.folded(0)) == summary.parameters


def test_several_optimizers_in_one_step() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        x, _ = batch
        yield "first", model[0](x).square().mean()
        yield "second", model[1](x).square().mean()

    task = hotloop.Task(
        model=lambda: nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]),
        step=step,
        optimizer=lambda parameters: {
            "first": torch.optim.SGD(parameters.where(lambda name, value: name.startswith("0.")), lr=0.1),
            "second": torch.optim.SGD(parameters.where(lambda name, value: name.startswith("1.")), lr=0.1),
        },
        data=(torch.randn(20, 4), torch.zeros(20)),
        batch_size=8,
    )
    summary = hotloop.summary(task)
    assert summary.forward_flops == 2 * (2 * 8 * 4 * 2)


def test_a_step_computes_the_layers_again_with_checkpointing() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False))

    assert rows(hotloop.summary(task_of(Checkpointed, torch.randn(20, 4))))["inner"].calls == 1


def test_the_callers_generator_stays() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    hotloop.summary(task_of(perceptron, torch.ones(20, 4)))
    assert torch.equal(torch.rand(3), expected)


def test_what_is_no_task_is_an_error() -> None:
    with pytest.raises(hotloop.HotloopError, match=r"summary got a Linear; expected a hotloop\.Task, or a run"):
        hotloop.summary(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(hotloop.HotloopError, match="batch_size is 0; expected 1 or more"):
        hotloop.summary(task_of(perceptron, torch.randn(20, 4)), batch_size=0)
