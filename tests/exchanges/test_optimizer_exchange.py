"""An optimizer's exchange is used only after a proof, and the optimizer object stays the script's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hotloop.exchanges import part as part_module
from hotloop.exchanges import update_proof

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda values: torch.optim.SGD(values, lr=0.1),
    "momentum": lambda values: torch.optim.SGD(values, lr=1e-2, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda values: torch.optim.SGD(values, lr=1e-4, momentum=0.9, nesterov=True, maximize=True),
    "Adam": lambda values: torch.optim.Adam(values, lr=1e-2),
    "amsgrad": lambda values: torch.optim.Adam(values, lr=1e-2, amsgrad=True, weight_decay=1e-2),
    "AdamW": lambda values: torch.optim.AdamW(values, lr=1e-2),
    "Adagrad": lambda values: torch.optim.Adagrad(values, lr=1e-2, lr_decay=1e-3),
}


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10), nn.Linear(10, 1)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(4, 1, 8, 8, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def use(part: Any, exchange: str = "fused") -> None:
    part.stage, part.exchange = "use", exchange


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_proven_and_differs_by_rounding_only(optimizers, kind: str) -> None:
    plain, model = network(), network()
    make = KINDS[kind]
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    part = optimizers.part
    assert (part.stage, part.exchange, part.proven) == ("race", "fused", 3)
    use(part)
    train(model, optimizer, 20)
    assert part.stage == "use" and part.notes == []
    own = make(plain.parameters())
    optimizers.is_enabled = False
    part.stage = "off"
    train(plain, own, 3)
    train(plain, own, 20)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert optimizer.state_dict()["param_groups"] == own.state_dict()["param_groups"]
    for mine, theirs in zip(optimizer.state.values(), own.state.values(), strict=True):
        assert [(k, v.dtype, v.device, v.shape) for k, v in mine.items()] == [
            (k, v.dtype, v.device, v.shape) for k, v in theirs.items()
        ]
        assert all(torch.equal(mine[name], theirs[name]) for name in mine if name == "step")


@pytest.mark.parametrize("kind", KINDS)
def test_the_proof_itself_changes_no_bit_of_the_run(optimizers, kind: str) -> None:
    plain, model = network(), network()
    optimizer = KINDS[kind](model.parameters())
    train(model, optimizer, 3)
    optimizers.part.stage = "off"
    train(plain, KINDS[kind](plain.parameters()), 3)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_exact_accepts_bitwise_updates_only(optimizers, kind: str) -> None:
    optimizers.exact = True
    plain, model = network(), network()
    optimizer = KINDS[kind](model.parameters())
    train(model, optimizer, 20)
    part = optimizers.part
    assert part.stage in ("race", "off")
    if part.stage == "race":
        use(part, part.exchange)
        train(model, optimizer, 20)
        part.stage = "off"
        own = KINDS[kind](plain.parameters())
        train(plain, own, 20)
        train(plain, own, 20)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_exact_allows_no_fused_update_that_has_equal_bits_by_chance(optimizers, monkeypatch) -> None:
    """With a learning rate of 0 a fused update of few numbers often has equal bits."""
    optimizers.exact = True
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    planted(monkeypatch, "_fused_adam_", lambda *args, **kwargs: pytest.fail("a fused update"))
    for lr in (0.1, 0.0, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        train(model, optimizer, 3)
        assert optimizers.part.exchange == "foreach" and optimizers.part.proven >= 3


def planted(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[..., Any]) -> None:
    real = getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *args, **kwargs: change(real, *args, **kwargs))


def test_a_wrong_update_is_refused(optimizers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is too long by one part in 1000."""
    planted(monkeypatch, "_fused_adam_", lambda real, *args, lr, **kwargs: real(*args, lr=lr * 1.001, **kwargs))
    model = network()
    train(model, torch.optim.Adam(model.parameters(), lr=1e-2), 2)
    assert optimizers.part.exchange == "foreach"
    assert "times the noise floor" in optimizers.part.reason


def test_an_update_that_leaves_a_tensor_out_is_refused(optimizers, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_but_the_last(real: Any, params: Any, grads: Any, momenta: Any, **kwargs: Any) -> None:
        real(params[:-1], grads[:-1], momenta[:-1], **kwargs)

    planted(monkeypatch, "_fused_sgd_", all_but_the_last)
    model = network()
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), 1)
    assert optimizers.part.exchange == "foreach" and "times the noise floor" in optimizers.part.reason


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["all", "the second half"])
def test_a_sample_of_a_large_update_shows_a_part_that_is_left_out(
    optimizers, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(update_proof, "_SAMPLED_NUMBERS", 64)
    monkeypatch.setattr(update_proof, "_WHOLE_NUMBERS", 4)
    model = network()
    train(model, torch.optim.Adam(model.parameters()), 3)
    assert optimizers.part.exchange == "fused" and optimizers.part.proven == 3

    def first_part_of_the_largest(real: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        largest = max(params, key=torch.numel)
        before = largest.clone()
        real(params, *args, **kwargs)
        count = int(largest.numel() * share)
        largest.view(-1)[count:] = before.view(-1)[count:]

    planted(monkeypatch, "_fused_adam_", first_part_of_the_largest)
    other = network()
    train(other, torch.optim.Adam(other.parameters()), 1)
    assert optimizers.parts[-1].exchange == "foreach" and "times the noise floor" in optimizers.parts[-1].reason


def test_an_exchange_that_leaves_a_group_out_is_refused(optimizers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused form does nothing for the second group; the first group's exchange is proven."""
    model = network()
    first, *others = model.parameters()

    def only_the_first_group(real: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        if params[0].shape == first.shape:
            real(params, *args, **kwargs)

    planted(monkeypatch, "_fused_adam_", only_the_first_group)
    train(model, torch.optim.Adam([{"params": [first]}, {"params": others, "lr": 1e-2}]), 3)
    proven, refused = optimizers.parts
    assert proven.exchange == "fused" and proven.proven == 3
    assert refused.exchange == "foreach" and refused.proven == 2


def test_an_exchange_that_becomes_wrong_is_taken_back(optimizers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_module, "RECHECK_CALLS", 5)
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 3)
    part = optimizers.part
    use(part)
    planted(monkeypatch, "_fused_adam_", lambda real, *args, lr, **kwargs: real(*args, lr=lr * 1.1, **kwargs))
    train(model, optimizer, 6)
    assert part.stage == "off" and "was taken back" in part.notes[0]


def test_an_exchange_that_fails_is_taken_back_and_the_step_is_made(optimizers, monkeypatch) -> None:
    plain, model = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 3)
    part = optimizers.part
    use(part)

    def failing(real: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("planted")

    planted(monkeypatch, "_fused_sgd_", failing)
    train(model, optimizer, 3)
    assert part.stage == "off" and "planted" in part.notes[0]
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    train(plain, own, 3)
    train(plain, own, 3)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_an_error_of_a_signals_handler_reaches_the_script(optimizers, monkeypatch, end_by_signal) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 3)
    use(optimizers.part)
    planted(monkeypatch, "_fused_sgd_", end_by_signal)
    with pytest.raises(TimeoutError):
        train(model, optimizer, 1)
    assert optimizers.part.stage == "use" and not optimizers.part.notes


def test_groups_and_optimizers_are_parts_of_their_own(optimizers) -> None:
    model, other = network(), network(1)
    layers = list(model)
    groups = [{"params": layers[0].parameters()}, {"params": layers[2].parameters(), "lr": 1e-3}]
    train(model, torch.optim.Adam(groups), 3)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), 3)
    assert [part.name for part in optimizers.parts] == [
        "Adam, 40 numbers in 2 tensors",
        "Adam, 1,450 numbers in 2 tensors",
        "SGD, 1,501 numbers in 6 tensors",
    ]
    assert all(part.stage == "race" for part in optimizers.parts)


def test_a_search_tries_no_exchange_that_equal_optimizers_did_not_need(optimizers) -> None:
    def try_rate(lr: float, momentum: float = 0.0) -> None:
        model = network()
        train(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum), 1)
        if optimizers.parts[-1].stage == "proof":
            optimizers.parts[-1].refuse("not faster")

    for trial in range(4):
        try_rate(0.1 * (trial + 1))
    try_rate(0.1, momentum=0.9)
    assert [part.proven for part in optimizers.parts] == [1, 1, 0, 0, 1]
    assert all(part.reason == "not faster" for part in optimizers.parts)


def test_a_schedule_that_returns_to_zero_needs_one_proof(optimizers) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    for lr in (0.0, 0.1, 0.0, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        train(model, optimizer, 2)
    assert optimizers.part.stage == "race" and optimizers.part.proven == 3


def test_other_settings_need_another_proof_and_another_learning_rate_does_not(optimizers) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 3)
    part = optimizers.part
    use(part)
    optimizer.param_groups[0].update(lr=1e-4, betas=(0.85, 0.99))  # as OneCycleLR does at each step
    train(model, optimizer, 1)
    assert part.stage == "use"
    optimizer.param_groups[0]["weight_decay"] = 0.1
    train(model, optimizer, 1)
    assert (part.stage, part.proven) == ("proof", 1)


def test_states_of_other_optimizers_load(optimizers) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train(model, optimizer, 3)
    use(optimizers.part)
    train(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    train(model, optimizer, 2)
    assert optimizers.part.stage == "use"
    clone = copy.deepcopy(optimizer)
    assert clone.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


class Half(nn.Module):
    """The second half gets its first gradient late."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(3, 3), nn.Linear(3, 3), False

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs)) if self.both else self.first(inputs)


def test_gradients_that_come_late(optimizers) -> None:
    plain, model = Half(), Half()
    plain.load_state_dict(model.state_dict())
    for one in (model, plain):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for step in range(12):
            one.both = step > 4
            optimizer.zero_grad()
            one(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            for part in optimizers.parts if one is model else ():
                part.stage = "use" if part.stage == "race" else part.stage
        for part in optimizers.parts:
            part.stage = "off"
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4)


UNFIT: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "foreach": (lambda model: torch.optim.SGD(model.parameters(), foreach=True), "the script sets foreach=True"),
    "fused": (lambda model: torch.optim.Adam(model.parameters(), fused=True), "the script sets fused=True"),
    "forloop": (lambda model: torch.optim.Adam(model.parameters(), foreach=False), "the script sets foreach=False"),
    "tensor": (
        lambda model: torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)),
        "tensor",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_setting_that_the_kernel_does_not_support_is_left_alone(optimizers, case: str) -> None:
    make, reason = UNFIT[case]
    model = network()
    train(model, make(model), 3)
    assert optimizers.part.stage == "proof" and optimizers.part.proven == 0
    assert reason in optimizers.part.as_record(used=True)["reason"]


def test_sparse_gradients_are_left_alone(optimizers) -> None:
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert optimizers.part.proven == 0 and "has_sparse_grad" in optimizers.part.reason


def test_half_precision_and_torch_modes_are_left_alone(optimizers) -> None:
    model = network(dtype=torch.bfloat16)
    train(model, torch.optim.SGD(model.parameters()), 3)
    assert optimizers.part.proven == 0 and "bfloat16" in optimizers.part.reason
    other = network()
    with FlopCounterMode(display=False):
        train(other, torch.optim.SGD(other.parameters()), 3)
    assert optimizers.parts[1].proven == 0 and "mode" in optimizers.parts[1].reason


def test_a_compiled_step_is_traced_without_the_exchange(optimizers) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    count = optimizers.part.proven
    step = torch.compile(optimizer.step, backend="eager", fullgraph=False)
    for _ in range(2):
        model(torch.ones(1, 1, 8, 8)).sum().backward()
        step()
    assert optimizers.part.proven == count


def test_a_gradient_scaler_and_clipping_see_the_optimizer_of_the_script(optimizers) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 1, 8, 8)).square().mean()).backward()
        if step == 5:
            next(model.parameters()).grad.fill_(torch.inf)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = [value.clone() for value in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            use(optimizers.part)
    assert all(map(torch.equal, before, model.parameters()))  # the last step is skipped
    assert scaler.get_scale() == 512.0 and optimizers.part.stage == "use"


def test_a_closure_that_fails_leaves_nothing_behind(optimizers) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Any:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["fused"] is None and optimizers.parts == []


def test_ranks_that_share_an_update_make_it_themselves(optimizers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that choose by their own race would make different updates."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = network()
    train(model, torch.optim.SGD(model.parameters()), 3)
    assert optimizers.part.proven == 0 and "several ranks" in optimizers.part.reason
