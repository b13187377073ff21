"""From a Task to its facts, from its facts to a plan, and down the list where one can't be lowered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.hardware import probe
from hotloop.core.hardware.devices import resolve_device
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.hardware import Device
from hotloop.core.records.training import TaskFacts
from hotloop.errors import DeviceError, MemoryExhausted, PlanError
from hotloop.lowering import build
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.transforms import residency
from hotloop.plan import BASELINE, Plan
from hotloop.tuning.auto import feasibility_facts, list_options
from tests.support.programs import a_task, labelled
from tests.support.runs import lower_requested
from tests.support.tuning.choices import AUTO, CPU, Samples


def facts(**fields: Any) -> TaskFacts:
    return feasibility_facts(a_task(**fields), CPU)[0]


OPTIMIZERS: dict[str, tuple[Callable[..., Any], list[str], bool]] = {
    "Adam": (torch.optim.Adam, ["forloop", "foreach", "fused"], False),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), ["forloop", "foreach", "fused"], False),
    "RMSprop": (torch.optim.RMSprop, ["forloop", "foreach"], False),
    "SparseAdam": (torch.optim.SparseAdam, [], False),
    "LBFGS": (torch.optim.LBFGS, [], True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_facts_of_the_optimizer(name: str) -> None:
    factory, implementations, closure = OPTIMIZERS[name]
    found = facts(optimizer=factory)
    assert (found.optimizer, found.implementations, found.closure) == (name, implementations, closure)


def test_facts_of_images_data_and_length() -> None:
    images = torch.randn(12, 3, 8, 8)
    network = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    found = facts(model=network, data=(images, torch.arange(12) % 3), batch_size=5, epochs=4)
    assert found.images and found.data_bytes == images.nbytes + 12 * 8 and found.steps == 12
    flat = facts(model=nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), data=(images, torch.arange(12) % 3))
    assert flat.images  # the input alone
    assert not facts(data=(images[:, 0, 0], torch.arange(12) % 3), model=nn.Linear(8, 3)).images


def test_facts_of_a_stream_leave_open_what_only_running_it_tells() -> None:
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter([(torch.ones(4), 1)] * 6)

    found = facts(data=Endless(), model=nn.Linear(4, 3), batch_size=2)
    assert (found.data, found.data_bytes, found.steps) == ("Stream", None, None)


def test_facts_of_before_still_load() -> None:
    new = facts().model_dump()
    for name in ("optimizer", "implementations", "closure", "images", "data_bytes", "steps"):
        del new[name]
    assert TaskFacts(**new).implementations == []


def test_looking_at_the_optimizer_touches_no_parameter() -> None:
    """A factory that updates in hooks would otherwise do so twice."""
    hooked: list[nn.Parameter] = []

    def factory(parameters: Any) -> torch.optim.Optimizer:
        hooked.extend(parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    program = hotloop.lower(a_task(optimizer=factory), Plan(device="cpu", optimizer="foreach"))
    own = [p for p in program.model.parameters() if p.requires_grad]
    assert len(hooked) == 2 * len(own)  # once for the facts, once for the step
    assert sum(any(p is value for value in own) for p in hooked) == len(own)


def test_a_factory_that_picks_parameters_by_identity_has_its_facts_too() -> None:
    def factory(parameters: hotloop.Parameters) -> torch.optim.Optimizer:
        own = {id(value) for value in parameters.model.parameters()}
        return torch.optim.RMSprop([value for value in parameters if id(value) in own])

    assert facts(optimizer=factory).implementations == ["forloop", "foreach"]


def test_lower_refuses_what_cannot_be_run() -> None:
    with pytest.raises(PlanError, match="graphs=step with device=cpu can't be run here"):
        hotloop.lower(a_task(), Plan(graphs="step"))
    with pytest.raises(PlanError, match="LBFGS has no such implementation"):
        hotloop.lower(a_task(optimizer=torch.optim.LBFGS), Plan(optimizer="fused"))


def test_the_baseline_is_lowered_without_a_look_at_the_machine(monkeypatch) -> None:
    monkeypatch.setattr(build, "probe_hardware", lambda name: pytest.fail("it looked"))
    hotloop.lower(a_task(), Plan(device="cpu", workers=0))


def test_auto_gives_up_what_cannot_be_lowered_and_says_so_once(monkeypatch) -> None:
    def no_fused(parts: LoweringContext) -> LoweringContext:
        if parts.plan.optimizer != "default":
            raise PlanError(f"optimizer={parts.plan.optimizer} met a planted fault")
        return parts

    monkeypatch.setattr(build, "TRANSFORMS", (*build.TRANSFORMS, no_fused))
    said: list[str] = []
    assert lower_requested(a_task(), AUTO, said.append).parts.plan == BASELINE
    assert said == ["auto leaves out optimizer=fused: optimizer=fused met a planted fault", "auto: baseline"]
    with pytest.raises(PlanError, match="planted fault"):
        lower_requested(a_task(), PlanRequest(Plan(device="cpu", optimizer="fused")))


def test_auto_gives_up_what_there_is_no_memory_for(monkeypatch) -> None:
    def no_room(parts: LoweringContext) -> LoweringContext:
        if parts.plan.optimizer != "default":
            raise torch.OutOfMemoryError("planted: no room")
        return parts

    monkeypatch.setattr(build, "TRANSFORMS", (*build.TRANSFORMS, no_room))
    said: list[str] = []
    assert lower_requested(a_task(), AUTO, said.append).parts.plan == BASELINE
    assert len(said) == 2 and said[0].startswith("auto leaves out optimizer=fused: ") and "planted" in said[0]
    with pytest.raises(MemoryExhausted):
        lower_requested(a_task(), PlanRequest(Plan(device="cpu", optimizer="fused")))


def test_auto_goes_on_sample_by_sample_where_the_data_has_no_room(monkeypatch) -> None:
    tries: list[str] = []

    def no_room(samples: Any, how: Any) -> Any:
        tries.append(how.name)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    monkeypatch.setattr(residency, "read_into_memory", no_room)
    said: list[str] = []
    task = a_task(data=Samples(), epochs=2)
    assert lower_requested(task, AUTO, said.append).parts.plan == Plan(optimizer="fused")
    assert tries == ["data"]  # what failed once isn't tried again
    assert [line for line in said if "residency=host" in line and "no memory left" in line] == said[:-1]
    with pytest.raises(PlanError, match="no memory left for the data") as caught:
        hotloop.lower(a_task(data=Samples(), epochs=2), Plan(residency="host"))
    assert "\n" not in str(caught.value) and "residency='stream'" in str(caught.value)


def test_samples_of_one_epoch_are_not_read_first() -> None:
    assert list_options(a_task(data=Samples(), epochs=2), CPU).choices[0].plan.residency == "host"
    assert list_options(a_task(data=Samples(), epochs=1), CPU).choices[0].plan.residency == "stream"
    left = list_options(a_task(data=Samples(), epochs=3), CPU, done=10)  # of 15 steps
    assert left.facts.steps == 5 and left.choices[0].plan.residency == "stream"


def test_auto_passes_on_what_the_baseline_cannot_do_either(monkeypatch) -> None:
    def nothing(parts: LoweringContext) -> LoweringContext:
        raise PlanError(f"planted under {parts.plan.brief()}")

    monkeypatch.setattr(build, "TRANSFORMS", (nothing,))
    with pytest.raises(PlanError, match="planted under baseline"):
        lower_requested(a_task(), AUTO)


def test_auto_does_not_hide_a_fault_of_the_task(monkeypatch) -> None:
    with pytest.raises(hotloop.HotloopError, match="the optimizer factory raised"):
        lower_requested(a_task(optimizer=lambda p: torch.optim.SGD(p, lr=-1.0)), AUTO)


def test_what_is_considered_leaves_the_callers_generators_alone() -> None:
    torch.manual_seed(3)
    first = torch.rand(2)
    torch.manual_seed(3)
    list_options(a_task(), CPU)
    assert torch.equal(torch.rand(2), first)


def test_a_plan_without_a_device_goes_to_the_accelerator(monkeypatch) -> None:
    monkeypatch.setattr("hotloop.core.hardware.devices.device_names", lambda: ["cpu", "cuda:0"])
    monkeypatch.setattr("hotloop.core.hardware.devices.check_device", lambda name: name)
    assert resolve_device(Plan(threads=2)) == Plan(device="cuda:0", threads=2)
    assert resolve_device(Plan().with_axes(threads=2)) == resolve_device(Plan(threads=2))
    assert resolve_device(Plan(device="cpu", threads=2)) == Plan(device="cpu", threads=2)
    assert resolve_device(Plan(), "cpu") == Plan()


@pytest.mark.parametrize("given", ["auto", "baseline", "mine.toml", Plan(optimizer="foreach"), None])
def test_fit_takes_a_plan_by_name_file_and_value(given: Any, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('optimizer = "forloop"\n')
    run = hotloop.fit(a_task(epochs=1), run="run", plan=given, device="cpu", progress=False)
    expected = (
        {"auto": "fused", None: "fused", "mine.toml": "forloop"}.get(given) if not isinstance(given, Plan) else None
    )
    assert run.plan.optimizer == (expected or getattr(given, "optimizer", "default"))


# --- here()


def test_here_measures_nothing_and_asks_no_accelerator_but_the_one_meant(monkeypatch) -> None:
    looked: list[str] = []
    describe = probe.machine.describe_device

    def noting(name: str, vectors: tuple[str, ...]) -> Device:
        looked.append(name)
        return describe("cpu", vectors) if name == "cpu" else Device(name, "cuda", "made up", precisions=("fp32",))

    monkeypatch.setattr(probe, "device_names", lambda: ["cpu", "cuda:0", "cuda:1"])
    monkeypatch.setattr(probe.machine, "describe_device", noting)
    monkeypatch.setattr(probe.machine, "nvidia_gpus", lambda: pytest.fail("nvidia-smi takes its time"))
    monkeypatch.setattr(probe.benchmarks, "measure_speed", lambda *args: pytest.fail("measured"))
    found = probe.probe_hardware("cuda:1")
    assert looked == ["cpu", "cuda:1"] and [one.name for one in found.devices] == ["cpu", "cuda:0", "cuda:1"]
    assert found.devices[1].precisions == () and found.devices[2].model == "made up"


def test_here_and_probe_tell_the_same() -> None:
    found = probe.probe_hardware()
    assert found.device("cpu") is not None and found.processor.threads >= 1
    with pytest.raises(DeviceError):
        resolve_device(Plan(device="xpu:9"))


class Words(nn.Module):
    """Sparse gradients, which torch's fused kernels can't take."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).mean(1))  # type: ignore[no-any-return]


class Turning(nn.Module):
    """Complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.head = nn.Parameter(torch.ones(6, dtype=torch.complex64)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x * self.turn).real)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("settings", "taken"), [({}, "default"), ({"momentum": 0.9}, "fused")])
def test_an_update_of_one_operation_for_each_parameter_stays_as_it_is(settings: dict[str, Any], taken: str) -> None:
    """Torch's fused kernel takes longer than these on a CPU, and less long than two or more."""
    task = a_task(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, **settings))
    assert list_options(task, CPU).choices[0].plan.optimizer == taken


@pytest.mark.parametrize("model", [Words, Turning])
def test_what_a_fused_update_can_t_take_is_trained_all_the_same(model: type[nn.Module], tmp_path) -> None:
    inputs = torch.randint(0, 9, (24, 6)) if model is Words else labelled()[0]
    task = a_task(model=model, data=(inputs, labelled()[1]), optimizer=torch.optim.Adagrad, epochs=1)
    run = hotloop.fit(task, run=tmp_path / "run", device="cpu", progress=False)
    assert run.plan.optimizer != "fused"
    with pytest.raises(PlanError, match="no such implementation"):
        hotloop.lower(task, Plan(optimizer="fused"))
