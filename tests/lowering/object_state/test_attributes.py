"""What training changes in attributes of the Task's own objects: saved and put back, or said in one line."""

from __future__ import annotations

import enum
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import hotloop
from hotloop.core.state import differing_paths
from hotloop.lowering.object_state import attributes
from hotloop.lowering.object_state.attributes import find_values
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.support.plain_loops import difference_of_resumed, fitted
from tests.support.programs import a_task, advance, labelled, through_file

Objective = Callable[[nn.Module, Any], Tensor]


class Base:
    """A step that scales its loss by what it has counted."""

    def scale(self) -> float:
        raise NotImplementedError

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        return loss * (1 + self.scale() / 100) if model.training else loss


class Attribute(Base):
    calls = 0

    def scale(self) -> float:
        self.calls += 1
        return self.calls


class OfClass(Base):
    calls = 0

    def scale(self) -> float:
        type(self).calls += 1
        return type(self).calls


class Born(Base):
    """Its attribute comes into being with the first call."""

    def scale(self) -> float:
        self.calls = getattr(self, "calls", 0) + 1
        return self.calls


class Slotted(Base):
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def scale(self) -> float:
        self.calls += 1
        return self.calls


@dataclass
class Inner:
    last: list[float] = field(default_factory=list)
    table: dict[str, dict[int, float]] = field(default_factory=dict)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=3))
    kinds: set[int] = field(default_factory=set)
    pair: tuple[int, str] = (0, "")


class Containers(Base):
    def __init__(self) -> None:
        self.inner = Inner()

    def scale(self) -> float:
        inner = self.inner
        number = len(inner.last)
        inner.last.append(number / 3)
        inner.table.setdefault("of", {})[number] = number * 2.5
        inner.recent.append(number)
        inner.kinds.add(number % 5)
        inner.pair = (inner.pair[0] + 1, f"after {number}")
        return inner.last[-1] + inner.table["of"][number] + sum(inner.recent) + len(inner.kinds) + inner.pair[0]


class Point(NamedTuple):
    x: int = 0


class Nested(Base):
    """Containers in containers, each of its own type."""

    def __init__(self) -> None:
        self.table: dict[str, Any] = {"seen": set(), "recent": deque(maxlen=3), "point": Point(), "rare": Counter()}
        self.points = [Point()]

    def scale(self) -> float:
        number = len(self.table["seen"])
        self.table["seen"].add(number)
        self.table["recent"].append(number)
        self.table["point"] = Point(self.table["point"].x + 1)
        self.table["rare"].update([number % 3])
        self.points[0] = Point(self.points[0].x + 2)
        return number + sum(self.table["recent"]) + self.table["point"].x + self.table["rare"][1] + self.points[0].x


class Tensors(Base):
    def __init__(self) -> None:
        self.mean, self.total, self.array = torch.zeros(3), torch.zeros(()), np.zeros(2)
        self.number = np.float32(0)

    def scale(self) -> float:
        self.mean = 0.9 * self.mean + 0.1
        self.total += 1
        self.array[0] += 0.5
        self.number = np.float32(self.number + 0.25)
        return float(self.mean.sum() + self.total) + self.array[0] + float(self.number)


class Generators(Base):
    def __init__(self) -> None:
        self.python, self.numpy = random.Random(3), np.random.default_rng(3)
        self.older, self.torch = np.random.RandomState(3), torch.Generator().manual_seed(3)

    def scale(self) -> float:
        drawn = self.python.random() + self.numpy.random() + self.older.normal()
        return 10 * (drawn + float(torch.rand((), generator=self.torch)))


class Phase(enum.Enum):
    EARLY = 1
    LATE = 30


class Phases(Base):
    def __init__(self) -> None:
        self.phase, self.left = Phase.EARLY, 7

    def scale(self) -> float:
        self.left -= 1
        if self.left < 0:
            self.phase = Phase.LATE
        return self.phase.value


class Teacher(Base):
    """A module of the step's own, which follows no State by name."""

    def __init__(self) -> None:
        self.teacher = nn.Linear(2, 1)
        nn.init.zeros_(self.teacher.weight)

    def scale(self) -> float:
        self.teacher.weight.data.add_(0.5)
        return float(self.teacher.weight.detach().sum())


def closure() -> Objective:
    calls = 0

    def step(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += model.training
        return F.cross_entropy(model(batch[0]), batch[1]) * (1 + calls / 100)

    return step


COUNT = 0


def of_module(model: nn.Module, batch: Any) -> Tensor:
    global COUNT
    COUNT += model.training
    return F.cross_entropy(model(batch[0]), batch[1]) * (1 + COUNT / 100)


def from_the_beginning() -> Objective:
    """As another process finds the module."""
    global COUNT
    COUNT = 0
    return of_module


def of_class() -> Objective:
    OfClass.calls = 0
    return OfClass()


STEPS: dict[str, Callable[[], Objective]] = {
    "attribute": Attribute,
    "attribute of the class": of_class,
    "attribute that comes with the first call": Born,
    "slot": Slotted,
    "containers": Containers,
    "containers in containers": Nested,
    "tensors": Tensors,
    "generators": Generators,
    "phases": Phases,
    "teacher": Teacher,
    "closure": closure,
    "module": from_the_beginning,
}


@pytest.mark.few("attribute", "closure", "containers", "containers in containers", "generators")
@pytest.mark.parametrize("name", STEPS)
def test_what_a_step_counts_goes_on_after_a_resume(tmp_path: Path, name: str) -> None:
    def make() -> hotloop.Task:
        return a_task(step=STEPS[name](), epochs=4)

    assert difference_of_resumed(make, tmp_path) == []
    for run in ("whole", "parts"):
        assert Run.open(tmp_path / run).record.facts.inexact == []


def test_counts_that_are_not_put_back_would_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that saving attributes guards against."""
    monkeypatch.setattr(attributes.TaskAttributes, "restore", lambda self, contents, below=(): None)
    assert difference_of_resumed(lambda: a_task(step=Attribute(), epochs=4), tmp_path) != []


class CountingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) * (1 + self.calls / 100)


class CountingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.layer(x) * (1 + self.calls / 100)


class CountingData(Dataset):
    """Scales its samples by how many it has given; a curriculum by count."""

    def __init__(self) -> None:
        self.asked, (self.x, self.y) = 0, labelled()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.asked += 1
        return self.x[index] * (1 + self.asked / 1000), self.y[index]


def collating() -> Callable[[list[Any]], Any]:
    seen = {"calls": 0}

    def collated(samples: list[Any]) -> Any:
        seen["calls"] += 1
        x, y = zip(*samples, strict=True)
        return torch.stack(x) * (1 + seen["calls"] / 100), torch.stack(y)

    return collated


def scheduled() -> Callable[..., Any]:
    calls = 0

    def factor(step: int) -> float:
        nonlocal calls
        calls += 1
        return 1 / (1 + calls / 10)

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Augment:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, inputs: Tensor, draws: Any) -> Tensor:
        self.calls += 1
        return inputs * (1 + self.calls / 100)


def samples() -> list[Any]:
    return list(zip(*labelled(), strict=True))


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "loss": lambda: {"loss": CountingLoss()},
    "model": lambda: {"model": CountingModel},
    "data": lambda: {"data": CountingData()},
    "data in a subset": lambda: {"data": Subset(CountingData(), range(20))},
    "collate": lambda: {"data": samples(), "collate": collating()},
    "schedule": lambda: {"schedule": scheduled()},
    "augment": lambda: {"augment": Augment()},
}


@pytest.mark.few("model")
@pytest.mark.parametrize("name", PARTS)
def test_counts_of_all_parts_of_a_task_go_on_after_a_resume(tmp_path: Path, name: str) -> None:
    assert difference_of_resumed(lambda: a_task(**PARTS[name](), epochs=4), tmp_path) == []
    assert Run.open(tmp_path / "parts").record.facts.inexact == []


def test_a_count_of_the_model_is_that_of_the_weights_wherever_they_are_used(tmp_path: Path) -> None:
    class Annealed(CountingModel):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += self.training
            return self.layer(x) * (1 + self.calls / 10)

    task = a_task(model=Annealed, validation=labelled(), epochs=3)
    run = fitted(task, tmp_path / "run")
    chosen: Any = {"task": task, "weights": "last"}
    said = run.epochs[-1]["validation_loss"]
    assert hotloop.evaluate(run, on="validation", **chosen).loss == pytest.approx(said, abs=1e-6)
    x, y = labelled()
    with torch.no_grad():
        assert float(F.cross_entropy(hotloop.load_model(run, **chosen)(x), y)) == pytest.approx(said, abs=1e-6)


class Caching(CountingData):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.cache.setdefault(index, (self.x[index], self.y[index]))


class Iterating(Base):
    def __init__(self) -> None:
        self.numbers = itertools.count(1)

    def scale(self) -> float:
        return next(self.numbers)


class Yielding(Base):
    def __init__(self) -> None:
        self.numbers = (number for number in range(1000) if number or number == 0)

    def scale(self) -> float:
        return next(self.numbers)


class Walking(Iterating):
    def __init__(self) -> None:
        self.numbers = iter(list(range(1000)))  # type: ignore[assignment]


class LargeTeacher(Base):
    def __init__(self) -> None:
        self.teacher = nn.Linear(600, 600)

    def scale(self) -> float:
        with torch.no_grad():
            self.teacher.weight.mul_(0.99)
        return float(self.teacher.weight.detach()[0, 0])


class Keeping(Base):
    """Keeps whole objects."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def scale(self) -> float:
        self.seen.append(Inner())
        return len(self.seen)


LOST: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "cache": (lambda: {"data": Caching()}, "data.cache"),
    "large teacher": (lambda: {"step": LargeTeacher()}, "step.teacher.weight"),
    "objects": (lambda: {"step": Keeping()}, "step.seen"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_can_not_be_saved_is_one_line_and_no_exact_run(tmp_path: Path, name: str) -> None:
    fields, place = LOST[name]
    run = fitted(a_task(**fields(), epochs=2), tmp_path / "run")
    assert run.record.facts.inexact == [f"training changes {place}, which no checkpoint stores"]
    assert not run.record.facts.exact and not Run.open(tmp_path / "run").record.facts.exact


@pytest.mark.parametrize("step", [Iterating, Yielding, Walking])
def test_an_iterator_is_one_line_before_training(tmp_path: Path, step: type) -> None:
    run = fitted(a_task(step=step(), epochs=2), tmp_path / "run")
    (line,) = run.record.facts.inexact
    assert line.startswith("step.numbers is an iterator (") and "a resumed run may differ" in line


@pytest.mark.more
def test_a_data_set_that_counts_in_workers_is_one_line_before_training(tmp_path: Path) -> None:
    task = a_task(data=CountingData(), epochs=1)
    run = fitted(task, tmp_path / "run", plan=Plan(workers=2))
    (line,) = run.record.facts.inexact
    assert (
        line == "loading samples changes data.asked in each worker's copy of the data set, which no checkpoint stores"
    )
    assert next(event for event in run.journal() if event["event"] == "inexact")["reason"] == line
    assert fitted(a_task(data=CountingData(), epochs=1), tmp_path / "here").record.facts.inexact == []


class Plain(CountingData):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


@pytest.mark.few("here-*")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"data": Plain()},
        {"data": samples()},
        {"model": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))},
        {"schedule": lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)},
        {"optimizer": lambda p: torch.optim.LBFGS(p, max_iter=2)},
        {"optimizer": lambda p: torch.optim.Adam(p, amsgrad=True)},
        {"augment": hotloop.data.compose(lambda inputs, draws: inputs * 1.5)},
        {"average": 0.9, "clip_norm": 1.0, "validation": 4},
    ],
    ids=["plain", "data set", "samples", "dropout", "schedule", "closure", "adam", "augment", "average"],
)
@pytest.mark.parametrize("plan", [Plan(), Plan(workers=1)], ids=["here", "workers"])
def test_ordinary_tasks_are_exact(tmp_path: Path, fields: dict[str, Any], plan: Plan) -> None:
    run = fitted(a_task(**fields, epochs=2), tmp_path / "run", plan=plan)
    assert run.record.facts.exact and run.record.facts.inexact == []


def test_a_callbacks_own_count_is_saved_and_what_it_keeps_is_its_own(tmp_path: Path) -> None:
    class Callback:
        read_only = True

        def __init__(self) -> None:
            self.epochs, self.views = 0, []

        def __call__(self, view: hotloop.View) -> None:
            self.epochs += view.event == "epoch"
            self.views.append(view)

    callback = Callback()
    fitted(a_task(callbacks=[Callback()], epochs=2), tmp_path / "run")
    run = fitted(a_task(callbacks=[callback], epochs=4), tmp_path / "run", resume=True)
    assert callback.epochs == 4 and run.record.facts.inexact == []


def test_going_back_within_a_process_puts_counts_back() -> None:
    step = Attribute()
    program = hotloop.lower(a_task(step=step))
    start = program.state()
    advance(program, 3)
    later = through_file(program.state())
    assert later.attributes == {"step/calls": 3}
    program.restore(start)
    assert step.calls == 0 and differing_paths(program.state(), start) == []
    program.restore(later)
    assert step.calls == 3


def test_objects_that_are_exchanged_are_not_written_into() -> None:
    class Choosing(Base):
        def __init__(self) -> None:
            self.options = [Inner(pair=(number, "")) for number in (1, 2)]
            self.now = self.options[0]

        def scale(self) -> float:
            self.now = self.options[1]
            return self.now.pair[0]

    step = Choosing()
    program = hotloop.lower(a_task(step=step))
    start = program.state()
    advance(program, 2)
    program.state()
    assert program.inexact and all("step.now" in line or "step.options" in line for line in program.inexact)
    program.restore(start)
    assert [option.pair[0] for option in step.options] == [1, 2]


def test_the_users_model_in_a_variable_of_its_own_is_no_attribute() -> None:
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made.append(nn.Linear(6, 3))
        return made[-1]

    def step(module: nn.Module, batch: Any) -> Tensor:
        assert made
        return F.cross_entropy(module(batch[0]), batch[1])

    program = hotloop.lower(a_task(model=model, step=step))
    advance(program, 3)
    state = program.state()
    assert state.attributes == {} and program.inexact == []
    program.restore(state)
    assert "weight" not in vars(made[-1])


def test_a_walk_ends_and_knows_each_object_once() -> None:
    inner = Inner()
    inner.table = {"self": inner, "other": [inner, {1: inner}]}  # type: ignore[dict-item]
    found = find_values({"one": inner, "two": inner}, ())
    assert found["two"].is_alias and found["one/table/self"].is_alias and found["one/table/other/1/1"].is_alias
