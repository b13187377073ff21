"""What tells one Task from another, so that what was found for one is not taken for the other; and what doesn't."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from hotloop.core.hardware.machine import machine_name
from hotloop.core.records.training import SourceRecord
from hotloop.task import Task
from hotloop.task_file import LoadedTask, load_task
from hotloop.tuning.auto import facts_with_fingerprint
from tests.support.programs import a_task, labelled


def loaded(task: Task, source: str = "import torch", digest: str = "d") -> LoadedTask:
    record = SourceRecord(file="t.py", module="t", attribute="task", digest=digest, reference="t.py", origin=".")
    return LoadedTask(task, record, {"t.py": source.encode()})


def of(**fields: Any) -> str:
    return facts_with_fingerprint(loaded(a_task(**fields))).fingerprint


class Wide(nn.Linear):
    """Takes its settings from a file that no source shows."""

    def __init__(self, power: int = 1) -> None:
        super().__init__(6, 3)
        self.power = power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x**self.power)


class Set(Wide):
    """Keeps its settings to itself, as they came."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._settings = settings


class Halved(Wide):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3, dtype=dtype))


def sgd(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.1} | options)


X, Y = labelled()
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the optimizer's class": ({}, dict(optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=0.1))),
    "its settings": ({}, dict(optimizer=sgd(momentum=0.9))),
    "its groups": ({}, dict(optimizer=lambda p: torch.optim.SGD([{"params": [one], "lr": 0.1} for one in p], lr=0.1))),
    "a module's class": ({}, dict(model=Wide)),
    "a module's attribute": (dict(model=Wide), dict(model=lambda: Wide(2))),
    "a module's settings": (dict(model=lambda: Set(rate=0.1)), dict(model=lambda: Set(rate=0.2))),
    "labels that don't count": (
        dict(loss=nn.CrossEntropyLoss()),
        dict(loss=nn.CrossEntropyLoss(), data=(X, Y.index_fill(0, torch.tensor([0]), -100))),
    ),
    "what a module says of itself": (
        dict(model=lambda: nn.Sequential(nn.Linear(6, 3), nn.LeakyReLU(0.1))),
        dict(model=lambda: nn.Sequential(nn.Linear(6, 3), nn.LeakyReLU(0.2))),
    ),
    "a buffer's dtype": (dict(model=Halved), dict(model=lambda: Halved(torch.float16))),
    "the input's dtype": (dict(model=Wide), dict(model=Wide, data=(X.half(), Y), prepare=torch.Tensor.float)),
    "the loss": ({}, dict(loss=nn.CrossEntropyLoss(label_smoothing=0.1))),
    "clipping": ({}, dict(clip_norm=1.0)),
    "an average": ({}, dict(average=0.9)),
    "the order": ({}, dict(shuffle=False)),
    "what is held out": (dict(validation=4), dict(validation=labelled())),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_built_task_shows_tells_it_from_others(name: str) -> None:
    one, other = OTHERS[name]
    assert of(**one) == of(**one)
    assert of(**one) != of(**other)


def test_the_seed_makes_no_other_task_of_it() -> None:
    assert of(seed=1) == of(seed=2)
    assert of(validation=4, seed=1) == of(validation=4, seed=2)
    first, second = (facts_with_fingerprint(loaded(a_task(seed=seed))) for seed in (1, 2))
    assert first.order != second.order  # a run is not gone on with under another one


def test_addresses_and_errors_in_what_a_module_says_do_not_count() -> None:
    class Odd(Wide):
        def extra_repr(self) -> str:
            return repr(object())

    class Broken(Wide):
        def extra_repr(self) -> str:
            raise RuntimeError("planted")

    assert of(model=Odd) == of(model=Odd)
    assert of(model=Broken) == of(model=Broken)


def versioned(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    library = ModuleType("layers_of_others")
    vars(library)["__version__"] = version
    monkeypatch.setitem(sys.modules, "layers_of_others", library)


@pytest.mark.parametrize("where", ["imported", "of a layer"])
def test_versions_of_the_libraries_that_define_it_count(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(Wide):
        pass

    if where == "of a layer":
        Theirs.__module__ = "layers_of_others.blocks"
    source = "def task():\n    from layers_of_others.blocks import Theirs" if where == "imported" else ""
    found = []
    for version in ("1.0", "1.0", "1.1"):
        versioned(monkeypatch, version)
        found.append(facts_with_fingerprint(loaded(a_task(model=Theirs), source)).fingerprint)
    assert found[0] == found[1] != found[2]


def test_a_configuration_that_only_the_task_reads_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configured.py").write_text(
        """
import json, os, pathlib, torch, hotloop
read = json.loads(pathlib.Path(__file__).with_name("model.json").read_text())
task = hotloop.Task(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(read["dropout"])),
    loss=torch.nn.CrossEntropyLoss(),
    optimizer=lambda p: getattr(torch.optim, os.environ.get("OPTIMIZER", "SGD"))(p, lr=0.1),
    data=(torch.randn(8, 4), torch.arange(8) % 3),
)
"""
    )
    monkeypatch.setattr(sys, "path", list(sys.path))

    def now(dropout: float) -> str:
        (tmp_path / "model.json").write_text(json.dumps({"dropout": dropout}))
        return facts_with_fingerprint(load_task(str(tmp_path / "configured.py"))).fingerprint

    try:
        assert now(0.1) == now(0.1) != now(0.2)
        before = now(0.1)
        monkeypatch.setenv("OPTIMIZER", "Adam")
        assert now(0.1) != before
    finally:
        sys.modules.pop("configured", None)


def test_the_number_of_threads_is_part_of_the_machine() -> None:
    before, threads = machine_name(), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert machine_name() != before
    finally:
        torch.set_num_threads(threads)
    assert machine_name() == before
