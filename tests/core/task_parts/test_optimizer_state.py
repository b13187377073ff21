"""Optimizers whose state is what their own `state_dict` says: wrappers, counters, schedule-free ones, with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import hotloop
from hotloop.core.state import differing_paths
from hotloop.core.task_parts import optimizers
from hotloop.errors import CheckpointError, PlanError, TaskError
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.support.plain_loops import assert_equal_weights, difference_of_resumed, fitted, plain_loop
from tests.support.programs import a_task, advance, assert_resumes, labelled, last_state


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Lookahead(Optimizer):
    """Slow weights around another optimizer, in whose state they are."""

    def __init__(self, base: Optimizer, every: int = 3) -> None:
        self.base, self.every = base, every
        super().__init__(base.param_groups, {"looks": 0})
        base.param_groups = self.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for group in self.param_groups:
            group["looks"] += 1
            for value in group["params"]:
                slow = self.base.state[value].setdefault("slow", value.clone())
                if group["looks"] % self.every == 0:
                    value.copy_(slow.lerp_(value, 0.5))


class Counting(Optimizer):
    """Counts its steps in an attribute, which its state_dict has."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.count = state.pop("count")
        super().load_state_dict(state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for value in group["params"]:
                value -= group["lr"] / self.count**0.5 * value.grad


class CountingAlone(Counting):
    """The same, but its state_dict knows nothing of the count."""

    state_dict, load_state_dict = Optimizer.state_dict, Optimizer.load_state_dict  # type: ignore[assignment]


class Sharpness(Optimizer):
    """The usual way to write SAM: the inner optimizer's state is in nobody's state_dict, and the groups are shared."""

    def __init__(self, parameters: Any, inner: Callable[..., Optimizer] = Adam, **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.inner = inner(self.param_groups, **options)
        self.param_groups = self.inner.param_groups

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.inner.param_groups = self.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:  # climbs by the gradient, and back: two passes without a second gradient
                value += group["rho"] * value.grad
                value -= group["rho"] * value.grad
        self.inner.step()


class Forwarding(Optimizer):
    """A wrapper that never calls Optimizer's constructor, and forwards what it doesn't have."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def state_dict(self) -> dict[str, Any]:
        return {"wrapped": [self.inner.state_dict()], 7: (1, 2.5, "x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state[7] == (1, 2.5, "x")
        self.inner.load_state_dict(state["wrapped"][0])

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Averaging(torch.optim.SGD):
    """Keeps an average of the weights in a dict of its own, by number, which the update reads."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr, momentum=0.9)
        self.average: dict[int, Tensor] = {}

    def _values(self) -> Iterator[tuple[int, Tensor]]:
        yield from enumerate(value for group in self.param_groups for value in group["params"])

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"average": dict(self.average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = {number: value.clone() for number, value in state["average"].items()}
        super().load_state_dict({key: value for key, value in state.items() if key != "average"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for number, value in self._values():
            average = self.average.setdefault(number, value.clone()).lerp_(value, 0.1)
            value.lerp_(average, 0.01)


class WideState(Optimizer):
    """Keeps float64 and integers beside float32 parameters, which torch's own load_state_dict would cast."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "table": {1: [0.5, 2], "a": None}})
        self.register_state_dict_post_hook(lambda optimizer, state: None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                state = self.state[value]
                total = state.setdefault("total", torch.zeros_like(value, dtype=torch.float64))
                state["seen"] = state.get("seen", torch.zeros((), dtype=torch.int16)) + 1
                total += value.grad.double() / 3
                value -= (group["lr"] * total / float(state["seen"])).float()


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "lookahead": lambda p: Lookahead(Adam(p, lr=0.02)),
    "lookahead of lookahead": lambda p: Lookahead(Lookahead(Adam(p, lr=0.02), every=2), every=4),
    "counting": Counting,
    "counting in a group of two": lambda p: Counting([{"params": p[:1], "lr": 0.2}, {"params": p[1:]}]),
    "counting, which no state_dict has": CountingAlone,
    "sharpness": lambda p: Sharpness(p, lr=0.02),
    "sharpness with momentum": lambda p: Sharpness(p, torch.optim.SGD, lr=0.02, momentum=0.9),
    "forwarding": lambda p: Forwarding(Adam(p, lr=0.02)),
    "averaging": Averaging,
    "wide": WideState,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stopped_and_resumed_training_ends_as_one_that_never_stopped(name: str) -> None:
    assert_resumes(a_task(model=network, optimizer=OPTIMIZERS[name]))


@pytest.mark.more
@pytest.mark.parametrize(
    "name", ["lookahead", "counting, which no state_dict has", "sharpness with momentum", "averaging"]
)
def test_a_run_that_is_interrupted_and_resumed_is_the_plain_loops(tmp_path: Path, name: str) -> None:
    def make() -> hotloop.Task:
        return a_task(model=network, optimizer=OPTIMIZERS[name], epochs=4)

    assert difference_of_resumed(make, tmp_path) == []
    model = hotloop.load_model(Run.open(tmp_path / "parts"), task=make(), weights="last")
    assert_equal_weights(model, plain_loop(make()))


def test_a_schedule_over_a_wrapper_goes_on_where_it_was() -> None:
    def schedule(optimizer: Optimizer, total: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total, cycle_momentum=False)

    assert_resumes(a_task(model=network, optimizer=OPTIMIZERS["lookahead"], schedule=schedule, epochs=3))


def test_going_back_to_the_first_state_forgets_what_an_inner_optimizer_has_kept() -> None:
    program = hotloop.lower(a_task(model=network, optimizer=OPTIMIZERS["sharpness with momentum"]))
    start = program.state()
    advance(program, 4)
    first = program.state()
    program.restore(start)
    assert differing_paths(program.state(), start) == []
    advance(program, 4)
    assert differing_paths(program.state(), first) == []


def test_without_the_inner_optimizers_state_the_result_would_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that saving inner optimizers guards against."""
    monkeypatch.setattr(optimizers, "inner_optimizers", lambda optimizer: {})
    with pytest.raises(AssertionError):
        assert_resumes(a_task(model=network, optimizer=OPTIMIZERS["sharpness with momentum"]))


def test_without_the_repair_load_state_dict_would_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that comparing after load_state_dict guards against; what it leaves is reported."""
    monkeypatch.setattr(optimizers, "_repair_state", lambda live, saved: None)
    program = hotloop.lower(a_task(model=network, optimizer=WideState))
    advance(program, 3)
    program.restore(program.state())
    assert any("total" in line for line in program.inexact)


class Forgetful(Counting):
    """Its load_state_dict leaves the count out."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        Optimizer.load_state_dict(self, {key: value for key, value in state.items() if key != "count"})


def test_what_load_state_dict_leaves_out_is_put_back_as_an_attribute_and_said() -> None:
    task = a_task(model=network, optimizer=Forgetful)
    program = hotloop.lower(task)
    advance(program, 3)
    other = hotloop.lower(task)
    other.restore(program.state())
    assert other.optimizer.count == 3  # type: ignore[attr-defined]
    assert other.inexact == ["load_state_dict of Forgetful doesn't restore count bit by bit"]


class Masters(torch.optim.SGD):
    """Large tensors in an attribute, of which its state_dict knows nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not hasattr(self, "masters"):
            self.masters = [torch.zeros(600, 600)]
        self.masters[0] += 1
        super().step()


def test_a_large_tensor_that_no_state_dict_has_is_one_line_and_no_exact_run(tmp_path: Path) -> None:
    lines: list[str] = []
    run = fitted(a_task(model=network, optimizer=lambda p: Masters(p, lr=0.1), epochs=2), tmp_path / "run")
    lines = run.record.facts.inexact
    assert lines == ["training changes optimizer.masters, which no checkpoint stores"] and not run.record.facts.exact


class Unstorable(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"device": torch.device("cpu")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state.items() if key != "device"})


def test_a_state_dict_that_no_checkpoint_can_hold_is_one_line_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="optimizer/state_dict/device is a device") as caught:
        fitted(a_task(model=network, optimizer=lambda p: Unstorable(p, lr=0.1)), tmp_path / "run")
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


class Misfit(Counting):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("momentum")


def test_a_load_state_dict_that_fails_is_one_line() -> None:
    program = hotloop.lower(a_task(model=network, optimizer=Misfit))
    with pytest.raises(CheckpointError, match="load_state_dict of Misfit rejects the result of its own state_dict"):
        program.restore(program.state())


def test_another_class_or_other_groups_are_another_optimizer() -> None:
    saved = hotloop.lower(a_task(model=network, optimizer=Counting)).state()
    for other in (Averaging, OPTIMIZERS["counting in a group of two"]):
        with pytest.raises(CheckpointError, match="another optimizer"):
            hotloop.lower(a_task(model=network, optimizer=other)).restore(saved)


@pytest.mark.parametrize("axes", [{"accumulation": 2}, {"compile": "forward"}, {"residency": "host"}], ids=str)
def test_plans_train_wrappers_as_the_baseline_does(axes: dict[str, Any]) -> None:
    task = a_task(model=network, optimizer=OPTIMIZERS["lookahead"])
    expected, found = hotloop.lower(task), hotloop.lower(task, Plan(**axes))
    for program in (expected, found):
        advance(program, 6)
    for name, value in expected.state().parameters.items():
        torch.testing.assert_close(found.state().parameters[name], value)
    assert differing_paths(found.state(), found.state()) == []
    found.close()


@pytest.mark.parametrize("axes", [{"compile": "step"}, {"optimizer": "fused"}], ids=str)
def test_plans_that_can_not_take_a_wrapper_say_so_in_one_line(axes: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        hotloop.lower(a_task(model=network, optimizer=OPTIMIZERS["lookahead"]), Plan(**axes))
    assert "\n" not in str(caught.value)


class ScheduleFree(Optimizer):
    """Schedule-free SGD (Defazio et al. 2024), with the weights of `eval()` between those of the gradient and of z."""

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "training": False})

    @torch.no_grad()
    def _switch(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
                for value in group["params"]:
                    if "z" in self.state[value]:
                        value.lerp_(self.state[value]["z"], weight)
            group["training"] = training

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    def direction(self, value: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert value.grad is not None
        return value.grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["training"], "the optimizer is not in training mode"
            group["k"] += 1
            for value in group["params"]:
                state, beta = self.state[value], group["beta"]
                z = state.setdefault("z", value.clone())
                x = value.lerp(z, 1 - 1 / beta)
                z -= group["lr"] * self.direction(value, state, group)
                value.copy_(x.lerp_(z, 1 / group["k"]).lerp(z, 1 - beta))


class ScheduleFreeAdam(ScheduleFree):
    """The same with the direction of Adam."""

    def direction(self, value: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        assert value.grad is not None
        second = state.setdefault("second", torch.zeros_like(value))
        second.lerp_(value.grad.square(), 0.01)
        return value.grad / (second / (1 - 0.99 ** group["k"])).sqrt().add(1e-8)


class Swapping(torch.optim.SGD):
    """Puts an average of the weights in their place in `eval()`, and the weights back in `train()`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for value in self.param_groups[0]["params"]:
            self.state[value].setdefault("average", value.clone()).lerp_(value, 0.1)

    @torch.no_grad()
    def eval(self) -> None:
        for value in self.param_groups[0]["params"]:
            if "average" in self.state[value]:
                self.state[value]["weights"] = value.clone()
                value.copy_(self.state[value]["average"])

    @torch.no_grad()
    def train(self) -> None:
        for value in self.param_groups[0]["params"]:
            if "weights" in self.state[value]:
                value.copy_(self.state[value].pop("weights"))


class Outer(Optimizer):
    """A wrapper without modes of its own around one that has them."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


SWITCHING: dict[str, Callable[[Any], Optimizer]] = {
    "schedule-free SGD": ScheduleFree,
    "schedule-free Adam": lambda p: ScheduleFreeAdam(p, lr=0.02),
    "average in its place": lambda p: Swapping(p, lr=0.1),
    "wrapped": lambda p: Outer(ScheduleFree(p)),
}


def switching_task(name: str, **fields: Any) -> hotloop.Task:
    return a_task(model=network, optimizer=SWITCHING[name], validation=labelled(), epochs=4, **fields)


def evaluated(model: nn.Module, optimizer: Any) -> float:
    """The loss with the weights of `eval()`, which leaves the model as it was."""
    one = getattr(optimizer, "inner", optimizer)
    before = [value.detach().clone() for value in model.parameters()]
    one.eval()
    with torch.no_grad():
        x, y = labelled()
        loss = float(nn.CrossEntropyLoss()(model(x), y))
    one.train()
    for value, kept in zip(model.parameters(), before, strict=True):
        value.data.copy_(kept)
    return loss


@pytest.mark.more
@pytest.mark.few("average in its place")
@pytest.mark.parametrize("name", SWITCHING)
def test_every_path_evaluates_the_weights_of_eval_and_training_goes_on_with_its_own(tmp_path: Path, name: str) -> None:
    losses: list[float] = []
    task = switching_task(name)
    reference = plain_loop(task, each_epoch=lambda model, optimizer, _: losses.append(evaluated(model, optimizer)))
    run = fitted(switching_task(name), tmp_path / "run", checkpoint_every="2")
    assert [row["validation_loss"] for row in run.epochs] == pytest.approx(losses, abs=1e-6)
    for value, expected in zip(last_state(run).parameters.values(), reference.parameters(), strict=True):
        assert torch.equal(value, expected), "a switch has changed what was trained on"
    x, y = labelled()
    best = min(range(4), key=losses.__getitem__)
    for weights, loss in (("last", losses[-1]), ("best", losses[best])):
        chosen: Any = {"task": task, "weights": weights}
        assert hotloop.evaluate(run, on="validation", **chosen).loss == pytest.approx(loss, abs=1e-6)
        scores = torch.as_tensor(hotloop.predict(run, x, **chosen))
        assert float(nn.CrossEntropyLoss()(scores, y)) == pytest.approx(loss, abs=1e-6)
        hotloop.export(run, tmp_path / f"{weights}.pt", **chosen)
        loaded = network()
        loaded.load_state_dict(torch.load(tmp_path / f"{weights}.pt", weights_only=True))
        with torch.no_grad():
            assert float(nn.CrossEntropyLoss()(loaded(x), y)) == pytest.approx(loss, abs=1e-6)


@pytest.mark.more
@pytest.mark.parametrize("name", SWITCHING)
def test_one_with_two_modes_resumes_to_the_last_bit(tmp_path: Path, name: str) -> None:
    assert difference_of_resumed(lambda: switching_task(name), tmp_path) == []
    whole, parts = (Run.open(tmp_path / which).epochs[-1]["validation_loss"] for which in ("whole", "parts"))
    assert whole == parts


def test_a_checkpoint_within_an_epoch_never_switches(tmp_path: Path) -> None:
    calls: list[str] = []

    class Noting(ScheduleFree):
        def eval(self) -> None:
            calls.append("eval")
            super().eval()

    fitted(a_task(model=network, optimizer=Noting, epochs=2), tmp_path / "run", checkpoint_every="1")
    assert not calls


def test_two_averages_are_refused_before_training() -> None:
    with pytest.raises(TaskError, match=r"average=0.9 with ScheduleFree, whose eval\(\) averages weights itself"):
        hotloop.lower(switching_task("schedule-free SGD", average=0.9))


def test_an_optimizer_without_a_learning_rate_trains(tmp_path: Path) -> None:
    class Plain(Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for value in self.param_groups[0]["params"]:
                value -= self.param_groups[0]["rate"] * value.grad

    run = fitted(a_task(model=network, optimizer=lambda p: Plain(p, {"rate": 0.1}), epochs=1), tmp_path / "run")
    assert run.epochs[-1]["learning_rate"] is None
