"""Each packed trial computes what the trial computes alone; the proof finds planted faults; trials don't affect each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.state import State, differing_paths
from hotloop.hyperparameters.packs import shape_keys
from hotloop.hyperparameters.packs.model_stack import ModelStack
from hotloop.hyperparameters.packs.pack_members import build_pack, prove_pack
from hotloop.hyperparameters.packs.packed_step import Pack, PackedStep
from hotloop.lowering.build import lower
from hotloop.plan import Plan

X = torch.randn(60, 1, 6, 6, generator=torch.Generator().manual_seed(1))
Y = (X.mean((1, 2, 3)) > 0).long()

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "nesterov": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "lbfgs": torch.optim.LBFGS,
}
SETTINGS = {"sgd": {"momentum": 0.9}, "nesterov": {"momentum": 0.8, "nesterov": True}}


def network(kind: str) -> nn.Module:
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 2))
    if kind == "dropout":
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    if kind == "lstm":
        return nn.Sequential(nn.Flatten(1, 2), nn.LSTM(6, 3), nn.Flatten(), nn.Linear(18, 2))
    convolution = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)]
    return nn.Sequential(*convolution, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2))


def task(kind: str = "mlp", lr: float = 0.1, optimizer: str = "sgd", smoothing: float = 0.0, **fields: Any) -> Any:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[optimizer](parameters, lr=lr, **SETTINGS.get(optimizer, {}))

    loss = nn.CrossEntropyLoss(label_smoothing=smoothing)
    given = dict(loss=loss, optimizer=make, data=(X, Y), batch_size=12, epochs=4, clip_norm=1.0) | fields
    return hotloop.Task(model=lambda: network(kind), **given)


def packed(tasks: Sequence[Any]) -> Pack:
    plan = Plan(threads=1, optimizer="fused")
    return build_pack([lower(one, plan, make_step=PackedStep) for one in tasks])


def proof(tasks: Sequence[Any], pack: Pack | None = None) -> list[tuple[bool, str]]:
    return prove_pack(pack or packed(tasks), tasks)


SOUND = {
    "learning rates": [task(lr=0.1), task(lr=0.01)],
    "seeds and losses": [task(seed=1), task(seed=2, smoothing=0.1, optimizer="nesterov")],
    "batch norm": [task("cnn", 0.1), task("cnn", 0.02)],
    "batch norm, seeds": [task("cnn", 0.01, "adam", seed=1), task("cnn", 0.02, "adam", seed=2)],
    "dropout of one seed": [task("dropout", 0.01, "adamw"), task("dropout", 0.02, "adamw")],
    "step": [task(loss=None, step=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), lr=lr) for lr in (0.1, 0.2)],
}  # fmt: skip


@pytest.mark.parametrize("case", SOUND)
def test_each_trial_is_proven(case: str) -> None:
    assert [found for found in proof(SOUND[case]) if not (found[0] and found[1].startswith("fp32-equivalent"))] == []


def test_a_shared_stop_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trial's mask decides for all."""
    tasks = SOUND["batch norm"]
    advance = Pack.advance
    monkeypatch.setattr(
        Pack, "advance", lambda self, active, steps: advance(self, range(2) if 0 in active else active, steps)
    )
    is_proven, reason = proof(tasks)[0]
    assert not is_proven
    assert reason.startswith("a step of this trial changes ")
    monkeypatch.undo()
    compute = ModelStack.compute
    monkeypatch.setattr(
        ModelStack, "compute", lambda self, batches, active: compute(self, batches, range(2) if 0 in active else [])
    )
    assert [is_proven for is_proven, _ in proof(tasks)] == [False, False]


def test_swapped_learning_rates_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = SOUND["learning rates"]
    pack, update = packed(tasks), PackedStep._update

    def swapped(self: PackedStep) -> None:
        (group,) = self.optimizer.param_groups
        own, group["lr"] = group["lr"], 0.01 if group["lr"] == 0.1 else 0.1
        update(self)
        group["lr"] = own

    monkeypatch.setattr(PackedStep, "_update", swapped)
    found = proof(tasks, pack)
    assert [is_proven for is_proven, _ in found] == [False, False]
    assert all("update" in reason for _, reason in found)


def test_leaked_statistics_of_a_batch_norm_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ModelStack._store_buffers

    def leaking(self: ModelStack, changed: dict[str, Tensor], active: Sequence[int]) -> None:
        shared = {
            name: value.double().mean(0, keepdim=True).expand_as(value).to(value) for name, value in changed.items()
        }
        store(self, shared, active)

    monkeypatch.setattr(ModelStack, "_store_buffers", leaking)
    found = proof(SOUND["batch norm"])
    assert [is_proven for is_proven, _ in found] == [False, False]
    assert all("buffer" in reason or "1.running" in reason or "another trial" in reason for _, reason in found)


def advance(pack: Pack, active: Sequence[int], steps: int) -> None:
    pack.advance(active, steps)
    for slot in active:
        assert pack.programs[slot].advance(steps).steps == steps


def states(pack: Pack) -> list[State]:
    return [program.state() for program in pack.programs]


@pytest.mark.parametrize("case", ["batch norm", "seeds and losses"])
def test_a_trial_that_stops_leaves_the_others_bits(case: str) -> None:
    tasks = [*SOUND[case], SOUND[case][0]]
    whole, stopped = packed(tasks), packed(tasks)
    advance(whole, [0, 1, 2], 4)
    advance(stopped, [0, 1, 2], 2)
    middle = states(stopped)[0]
    advance(stopped, [1, 2], 2)
    assert [differing_paths(*pair) for pair in zip(states(whole)[1:], states(stopped)[1:], strict=True)] == [[], []]
    assert differing_paths(states(stopped)[0], middle) == []


@pytest.mark.parametrize("case", ["batch norm", "seeds and losses"])
def test_a_step_of_all_trials_is_one_computation_in_each_epoch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pack, computations, compute = packed(SOUND[case]), [], ModelStack.compute
    monkeypatch.setattr(
        ModelStack, "compute", lambda self, batches, active: computations.append(1) or compute(self, batches, active)
    )
    for _epoch in range(3):
        advance(pack, [0, 1], 5)
        for program in pack.programs:
            program.end_epoch()
    assert len(computations) == 15


REASONS = {
    "lstm": (task("lstm"), "vmap can't vectorize the fused kernel of '1' (LSTM)"),
    "callbacks": (task(callbacks=[lambda view: None]), "the Task has callbacks, which may change the model"),
    "loggers": (task(loggers=["csv"]), "the Task has loggers, which record one run at a time"),
    "closure": (task(optimizer="lbfgs"), "LBFGS evaluates the loss several times in a step"),
}


@pytest.mark.parametrize("case", REASONS)
def test_a_task_that_cannot_be_packed_has_a_reason(case: str) -> None:
    given, reason = REASONS[case]
    assert shape_keys.reason_against_pack(given) == reason


def test_draws_of_different_seeds_are_refused() -> None:
    tasks = [task("dropout", seed=1), task("dropout", seed=2)]
    assert shape_keys.pack_shape(tasks[0]) != shape_keys.pack_shape(tasks[1])
    found = proof(tasks)
    assert [is_proven for is_proven, _ in found] == [False, False]
    assert all("random" in reason for _, reason in found)


def test_only_numbers_of_the_optimizer_share_a_shape() -> None:
    shape = shape_keys.pack_shape(task(lr=0.1, seed=1))
    assert shape == shape_keys.pack_shape(task(lr=0.2, seed=2, smoothing=0.1))
    others = [task("cnn"), task(optimizer="adam"), task(batch_size=6)]
    assert shape not in {shape_keys.pack_shape(other) for other in others}
