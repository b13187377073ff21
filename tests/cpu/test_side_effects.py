"""What Python does beside a step's tensors is refused where a compiled step would do it once, and else trains as eagerly."""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hotloop
from hotloop.errors import PlanError, TaskError
from hotloop.lowering import graphs
from hotloop.lowering.constants import constants_of
from hotloop.lowering.packages import _key
from hotloop.plan import Plan
from tests.cpu import programs
from tests.cpu.programs import a_task, advance, last_state, state_after, trained
from tests.cpu.recording import FakeRecorder
from tests.cpu.test_hyper import uncompiled  # noqa: F401  a fixture

STEP = Plan(compile="step")


def refusal(plan: Plan = STEP, **fields: Any) -> str:
    with pytest.raises(PlanError, match="can't be captured as one graph") as caught:
        hotloop.lower(a_task(**fields), plan)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_trains_as_eagerly(steps: int = 4, **fields: Any) -> None:
    program = hotloop.lower(a_task(**fields), STEP)
    advance(program, steps)
    assert program.compiled_steps
    expected = state_after(a_task(**fields), steps)
    torch.testing.assert_close(program.state().parameters, expected.parameters)
    torch.testing.assert_close(program.state().buffers, expected.buffers)


class Layer(nn.Module):
    """A linear layer, with what each network here has beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)


# --- constants


class Listed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.scales = [self.one, self.other]

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for scale in self.scales:
            x = x * scale
        return x


class Bound(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.25))
        self.activation = partial(F.prelu, weight=self.alpha)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x))


PRIVATE = np.random.default_rng(3)


class Mixing(Layer):
    """Draws how much it mixes from a generator of its own."""

    def forward(self, x: Tensor) -> Tensor:
        share = torch.tensor(PRIVATE.beta(1.0, 1.0), dtype=torch.float32)
        return self.layer(x * share + x.flip(0) * (1 - share))


TEACHER = nn.Linear(6, 3)


def taught(model: nn.Module, batch: Any, moves: bool) -> Tensor:
    with torch.no_grad():
        aim = TEACHER(batch[0])
        if moves:
            for mean, value in zip(TEACHER.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).view(-1).add_(value.view(-1), alpha=0.1)
    return F.mse_loss(model(batch[0]), aim)


class Keeping(Layer):
    """A running centre in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        return x - self.centre


class Remembering(Layer):
    """Keeps its last output for who wants to see it, and computes it anew at each step."""

    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.last, self.seen = x.detach(), [x.detach()]
        return x


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": Listed}, "reaches a parameter or buffer, a tensor of shape (3,), by another way"),
        ({"model": Bound}, "reaches a parameter or buffer, a tensor of shape (1,), by another way"),
        ({"model": Mixing}, "'Mixing.forward().PRIVATE.state."),
        ({"step": partial(taught, moves=True)}, "writes to a tensor of shape"),
        ({"model": Keeping}, "can't be captured"),
    ],
)
def test_a_constant_that_training_changes_is_refused(fields: dict[str, Any], says: str) -> None:
    assert says in refusal(**fields)


@pytest.mark.parametrize("fields", [{"step": partial(taught, moves=False)}, {"model": Remembering}])
def test_a_constant_that_nothing_changes_trains_as_eagerly(fields: dict[str, Any]) -> None:
    assert_trains_as_eagerly(**fields)


def test_a_package_s_key_has_its_constants_bit_by_bit() -> None:
    program = hotloop.lower(a_task(step=partial(taught, moves=False)), STEP)
    advance(program, 1)
    captured = program._step._captured  # type: ignore[attr-defined]
    first = _key(captured, program.device, {})
    value = next(iter(constants_of(captured.graph).values()))
    assert _key(captured, program.device, {}) == first
    with torch.no_grad():
        value.view(-1)[0].neg_()
        assert _key(captured, program.device, {}) != first
        value.view(-1)[0].neg_()


# --- counts of Python's


class CountingInADict(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.counts = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        return self.layer(x) * (2 if self.counts["calls"] > 1000 else 1)


class CountingInAList(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.layer(x) * (2 if len(self.seen) > 1000 else 1)


class CountingInAnObject(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.course = SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.course.calls += 1
        return self.layer(x) * (2 if self.course.calls > 1000 else 1)


class DrawingItsOwn(Layer):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2 if self.generator.random() > 2 else 1)


CALLS = {"calls": 0}


def counting_step(model: nn.Module, batch: Any) -> Tensor:
    CALLS["calls"] += 1
    return F.cross_entropy(model(batch[0]), batch[1]) * (2 if CALLS["calls"] > 1000 else 1)


class Trainer:
    calls = 0

    def step(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return F.cross_entropy(model(batch[0]), batch[1]) * (2 if self.calls > 1000 else 1)


TOTAL = 0


class CountingInAGlobal(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor()

    def factor(self) -> int:
        global TOTAL
        TOTAL += 1
        return 2 if TOTAL > 1000 else 1


class CountingInItsClass(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.layer(x) * (2 if self.calls > 1000 else 1)


class CountingByAnIterator(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.turns = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2 if next(self.turns) > 1000 else 1)


class CountingLoss(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        CALLS["calls"] += 1
        return F.cross_entropy(output, target) * (2 if CALLS["calls"] > 1000 else 1)


def counting_hook(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    CALLS["calls"] += 1
    return output * (2 if CALLS["calls"] > 1000 else 1)


def hooked() -> nn.Module:
    model = nn.Linear(6, 3)
    model.register_forward_hook(counting_hook)
    return model


@dataclass(slots=True)
class Course:
    calls: int = 0


COURSE = Course()


def counting_in_a_slot(model: nn.Module, batch: Any) -> Tensor:
    COURSE.calls += 1
    return F.cross_entropy(model(batch[0]), batch[1]) * (2 if COURSE.calls > 1000 else 1)


def counting_in_a_file(model: nn.Module, batch: Any) -> Tensor:
    programs.calls = getattr(programs, "calls", 0) + 1  # type: ignore[attr-defined]
    return F.cross_entropy(model(batch[0]), batch[1]) * (2 if programs.calls > 1000 else 1)  # type: ignore[attr-defined]


def counting_further_in(model: nn.Module, batch: Any) -> Tensor:
    def factor() -> int:
        CALLS["calls"] += 1
        return 2 if CALLS["calls"] > 1000 else 1

    return F.cross_entropy(model(batch[0]), batch[1]) * factor()


def counting_in_a_default(model: nn.Module, batch: Any, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return F.cross_entropy(model(batch[0]), batch[1]) * (2 if len(seen) > 1000 else 1)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": CountingInADict}, "the attribute 'counts.calls' of the model"),
        ({"model": CountingInAList}, "the attribute 'seen."),
        ({"model": CountingInAnObject}, "the attribute 'course.calls' of the model"),
        ({"model": lambda: DrawingItsOwn(random.Random(1))}, "the attribute 'generator' of the model"),
        ({"model": lambda: DrawingItsOwn(np.random.default_rng(1))}, "the attribute 'generator.state."),
        ({"step": counting_step}, "'CALLS.calls', outside of the step"),
        ({"step": partial(counting_step)}, "'func.CALLS.calls', outside of the step"),
        ({"step": Trainer().step}, "'self.calls', outside of the step"),
        ({"model": CountingInAGlobal}, "'CountingInAGlobal.factor().TOTAL', outside of the model"),
        ({"model": CountingInItsClass}, "the attribute 'CountingInItsClass.calls' of the model"),
        ({"model": CountingByAnIterator}, "the attribute 'turns' of the model"),
        ({"loss": CountingLoss()}, "'CountingLoss.forward().CALLS.calls', outside of the loss"),
        ({"model": hooked}, ".CALLS.calls' of the model"),
        ({"step": counting_in_a_slot}, "'COURSE.calls', outside of the step"),
        ({"step": counting_in_a_file}, "'programs.calls', outside of the step"),
        ({"step": counting_further_in}, "'CALLS.calls', outside of the step"),
        ({"step": counting_in_a_default}, "'seen."),
    ],
)
def test_a_count_of_pythons_is_refused_wherever_it_stands(fields: dict[str, Any], says: str) -> None:
    assert says in refusal(**fields)


LIBRARY = """
import torch

CALLS = 0

class Counter:
    calls = 0

def tanh(x):
    global CALLS
    CALLS, Counter.calls = CALLS + 1, Counter.calls + 1
    return x.tanh()

def loss(output, target):
    return torch.nn.functional.cross_entropy(tanh(output), target)
"""


def test_what_an_installed_package_counts_by_itself_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_library_that_counts.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    library = importlib.import_module("a_library_that_counts")
    tanh, counter = library.tanh, library.Counter

    class Calling(Layer):
        def forward(self, x: Tensor) -> Tensor:
            assert counter.calls == library.CALLS
            return tanh(self.layer(x))

    assert "'tanh.CALLS', outside of the loss" in refusal(loss=library.loss)  # it is what the user trains
    assert_trains_as_eagerly(model=Calling)


class Yogi(torch.optim.Optimizer):
    """Adam as it is written by hand, which counts in a number of its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                state = self.state[value]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(value)
                state["step"] += 1
                state["mean"].lerp_(value.grad, 0.1)
                value.add_(state["mean"], alpha=-group["lr"] / (1 - 0.9 ** min(state["step"], 2)))


class Late(Yogi):
    """Makes its state only where it is asked for one."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        Late.calls += 1
        for value in self.param_groups[0]["params"]:
            value.sub_(value.grad, alpha=0.1)
            if Late.calls > 2:
                self.state[value]["mean"] = torch.zeros_like(value)


class Slow(torch.optim.SGD):
    """Looks at the clock of its own every so many steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.turn = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.turn += 1
        if self.turn % 5:
            super().step()


class Around(torch.optim.Optimizer):
    """An optimizer around another, whose state is elsewhere."""

    def __init__(self, parameters: Any) -> None:
        self.base = torch.optim.Adam(parameters, lr=0.1)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class OutOfPlace(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in group["params"]:
                value.data = value.data - group["lr"] * value.grad


@pytest.mark.parametrize(
    ("optimizer", "says", "instead"),
    [
        (Yogi, "the optimizer changes its own 'step' of ", "compile=forward"),
        (Late, "the optimizer changes its own 'state' of ", "compile=forward"),
        (Slow, "the optimizer changes its own 'turn'", "compile=none"),
        (Around, "the optimizer changes its own 'base'", "compile=none"),
        (OutOfPlace, "the optimizer gives a parameter other memory", "compile=forward"),
    ],
)
def test_what_an_optimizer_does_in_python_is_refused(optimizer: Any, says: str, instead: str) -> None:
    line = refusal(optimizer=optimizer)
    assert says in line and f"choose {instead}" in line.lower()


@pytest.mark.parametrize("optimizer", [Yogi, OutOfPlace])
def test_what_an_optimizer_does_outside_of_what_is_compiled_is_as_it_is_eagerly(optimizer: Any) -> None:
    program = hotloop.lower(a_task(optimizer=optimizer), Plan(compile="forward"))
    advance(program, 4)
    assert program.compiled_steps
    torch.testing.assert_close(program.state().parameters, state_after(a_task(optimizer=optimizer), 4).parameters)


# --- other memory, and other buffers


class Momentum(Layer):
    """A second layer that follows the first."""

    def __init__(self) -> None:
        super().__init__()
        self.follower = nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for slow, fast in zip(self.follower.parameters(), self.layer.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return self.layer(x) - self.follower(x)


class Follower(Momentum):
    """The same in place, which can be captured."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.follower.parameters(), self.layer.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return self.layer(x) - self.follower(x)


class Centred(nn.Module):
    """A loss with a running centre, which it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        return F.cross_entropy(output - self.centre, target)


def test_other_memory_for_a_parameter_is_refused() -> None:
    assert "'follower.weight' other memory" in refusal(model=Momentum)


def test_a_parameter_that_is_changed_in_place_follows() -> None:
    assert_trains_as_eagerly(model=Follower)


def test_a_loss_that_replaces_its_buffer_is_refused() -> None:
    assert "replaces the buffer 'centre'" in refusal(loss=Centred())


# --- generators that are set


class Recomputed(Layer):
    def __init__(self, block: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, self.layer(x), use_reentrant=False)
        return F.dropout(x, 0.1)


class Reseeding(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            x = x + 0.1 * torch.randn(6)
        return self.layer(x)


@pytest.mark.parametrize("model", [lambda: Recomputed(lambda x: F.dropout(x.sin(), 0.5)), Reseeding])
def test_a_step_that_sets_the_generator_and_draws_is_refused(model: Any) -> None:
    assert "sets torch's generator and draws" in refusal(model=model)


def attention(x: Tensor) -> Tensor:
    """Of a batch's samples to each other, without dropout."""
    return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0]


@pytest.mark.parametrize("block", [torch.sin, attention])
def test_what_is_recomputed_without_draws_trains_as_eagerly(block: Any) -> None:
    assert_trains_as_eagerly(model=lambda: Recomputed(block))


# --- callbacks


BETA, SHARE = {"share": 0.0}, torch.zeros(())


def warming(model: nn.Module, batch: Any) -> Tensor:
    output = model(batch[0])
    return F.cross_entropy(output, batch[1]) + (BETA["share"] + SHARE) * output.square().mean()


def warm_number(view: Any) -> None:
    BETA["share"] = min(1.0, view.epoch / 2)


def warm_tensor(view: Any) -> None:
    SHARE.fill_(min(1.0, view.epoch / 2))


def schedule_dropout(holder: list[nn.Module]) -> Callable[[Any], None]:
    def callback(view: Any) -> None:
        for model in holder:
            model.get_submodule("1").p = min(0.5, view.epoch / 4)  # type: ignore[assignment]

    return callback


def with_dropout(holder: list[nn.Module]) -> nn.Module:
    holder.append(nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.0)))
    return holder[-1]


HOLDER: list[nn.Module] = []
CHANGING = {
    "number": {"step": warming, "callbacks": [warm_number]},
    "tensor": {"step": warming, "callbacks": [warm_tensor]},
    "attribute": {"model": partial(with_dropout, HOLDER), "callbacks": [schedule_dropout(HOLDER)]},
}


@pytest.fixture
def at_first() -> Any:
    def put_back() -> None:
        BETA["share"] = 0.0
        SHARE.zero_()

    put_back()
    yield put_back
    put_back()


@pytest.mark.parametrize("plan", [STEP, Plan(compile="forward"), Plan(graphs="step")], ids=Plan.brief)
@pytest.mark.parametrize("name", CHANGING)
def test_what_a_callback_changes_is_seen_at_the_next_epoch_and_trained_eagerly(
    name: str, plan: Plan, tmp_path: Path, at_first: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("hotloop.lowering.order._check", lambda parts: None)
    monkeypatch.setattr(graphs, "Recorder", FakeRecorder)
    expected = last_state(trained(a_task(epochs=3, **CHANGING[name]), tmp_path / "eager"))
    at_first()
    run = trained(a_task(epochs=3, **CHANGING[name]), tmp_path / "compiled", plan=plan, progress=True)
    torch.testing.assert_close(last_state(run).parameters, expected.parameters)
    assert " ".join(capsys.readouterr().err.split()).count("a callback changes what the step does") == 1


class Normed(nn.Module):
    """A batch norm before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


class Replacing:
    """At the end of each epoch, puts other memory in the place of something that the step works on."""

    def __init__(self, what: Callable[[Any], None], of: str) -> None:
        self.what, self.of = what, of
        self.made: dict[str, list[Any]] = {"model": [], "optimizer": []}

    def model(self) -> nn.Module:
        self.made["model"].append(Normed())
        return self.made["model"][-1]

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        self.made["optimizer"].append(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        return self.made["optimizer"][-1]

    def __call__(self, view: Any) -> None:
        for one in self.made[self.of] if view.event == "epoch" else ():
            self.what(one)

    def task(self) -> hotloop.Task:
        fields = {"model": self.model, "optimizer": self.optimizer, "callbacks": [self]}
        return a_task(batch_size=6, epochs=3, **fields)  # all batches are full, so that no eager step stands between


def other_data(model: Normed) -> None:
    for value in model.parameters():
        value.data = value.data.clamp(-0.1, 0.1)


def another_buffer(model: Normed) -> None:
    model.norm.running_mean = model.norm.running_mean * 0.5  # type: ignore[operator]


def other_parameters(model: Normed) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def another_state(optimizer: torch.optim.Optimizer) -> None:
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["momentum_buffer"] = state["momentum_buffer"] * 0.5
    optimizer.load_state_dict(saved)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("plan", [STEP, Plan(compile="forward"), Plan(graphs="step")], ids=Plan.brief)
@pytest.mark.parametrize(
    ("what", "of"), [(other_data, "model"), (another_buffer, "model"), (another_state, "optimizer")]
)
def test_what_a_callback_replaces_is_what_trains_from_there_on(
    what: Any, of: str, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.lowering.order._check", lambda parts: None)
    monkeypatch.setattr(graphs, "Recorder", FakeRecorder)
    expected = last_state(trained(Replacing(what, of).task(), tmp_path / "eager"))
    found = last_state(trained(Replacing(what, of).task(), tmp_path / "compiled", plan=plan))
    torch.testing.assert_close(found.parameters, expected.parameters)
    torch.testing.assert_close(found.buffers, expected.buffers)
    torch.testing.assert_close(found.optimizer["state"], expected.optimizer["state"])


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("what", "plan", "says"),
    [
        (other_parameters, STEP, "a parameter that is not the model's"),
        (other_parameters, Plan(engine="arrays"), "a parameter that is not the model's"),
        (other_data, Plan(engine="arrays"), "a callback gives 'norm.weight' other memory"),
        (another_buffer, Plan(engine="arrays"), "a callback gives 'norm.running_mean' other memory"),
    ],
)
def test_what_can_t_be_trained_after_a_callback_is_told(what: Any, plan: Plan, says: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=says):
        trained(Replacing(what, "model").task(), tmp_path / "run", plan=plan)


def test_a_callback_that_changes_nothing_leaves_the_step_compiled(tmp_path: Path, capsys: Any) -> None:
    seen: list[Any] = []
    trained(a_task(epochs=3, callbacks=[seen.append]), tmp_path / "run", plan=STEP, progress=True)
    assert seen and "a callback changes" not in capsys.readouterr().err


def test_without_callbacks_of_the_user_s_nobody_looks_again() -> None:
    program = hotloop.lower(a_task(), STEP)
    assert program.looking_s == 0 < program._step.look_s
    program.look_again([])
    assert not program._step._again.due  # type: ignore[attr-defined]
    program.look_again([print])
    assert program._step._again.due  # type: ignore[attr-defined]
