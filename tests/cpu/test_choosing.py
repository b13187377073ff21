"""From a Task to its facts, from its facts to a plan, and down the list where one can't be lowered."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop import choosing, kept, probe, remembering, rules, settling, training, weighing
from hotloop.choosing import consider, known, lowered, placed
from hotloop.errors import DeviceError, DiskError, MemoryExhausted, PlanError, RoomError
from hotloop.feasible import violations
from hotloop.hardware import Device
from hotloop.lowering import order, residency
from hotloop.lowering.ingredients import Ingredients
from hotloop.measuring.racing import Measured
from hotloop.parity import needs, prove_programs
from hotloop.plan import BASELINE, Plan
from hotloop.records import TaskFacts
from hotloop.report.curves import draw_curves
from hotloop.state import differences
from hotloop.taskfile import Loaded
from hotloop.verdicts import TRUSTED, Timing, Verdict
from hotloop.wanted import Wanted
from tests.cpu.programs import a_task, labelled
from tests.cpu.test_tuning import Races, Rounds, proving
from tests.unit.machines import A_GPU, a_machine
from tests.unit.machines import facts as made_up

CPU = Plan(device="cpu")
AUTO = Wanted(CPU, auto=True)


def facts(**fields: Any) -> TaskFacts:
    return known(a_task(**fields), CPU)[0]


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
    monkeypatch.setattr(order, "here", lambda name: pytest.fail("it looked"))
    hotloop.lower(a_task(), Plan(device="cpu", threads=1))


def test_auto_gives_up_what_cannot_be_lowered_and_says_so_once(monkeypatch) -> None:
    def no_fused(parts: Ingredients) -> Ingredients:
        if parts.plan.optimizer != "default":
            raise PlanError(f"optimizer={parts.plan.optimizer} met a planted fault")
        return parts

    monkeypatch.setattr(order, "TRANSFORMS", (*order.TRANSFORMS, no_fused))
    said: list[str] = []
    assert lowered(a_task(), AUTO, said.append).parts.plan == BASELINE
    assert said == ["auto passes over optimizer=fused: optimizer=fused met a planted fault", "auto: baseline"]
    with pytest.raises(PlanError, match="planted fault"):
        lowered(a_task(), Wanted(Plan(device="cpu", optimizer="fused")))


def test_auto_gives_up_what_there_is_no_memory_for(monkeypatch) -> None:
    def no_room(parts: Ingredients) -> Ingredients:
        if parts.plan.optimizer != "default":
            raise torch.OutOfMemoryError("planted: no room")
        return parts

    monkeypatch.setattr(order, "TRANSFORMS", (*order.TRANSFORMS, no_room))
    said: list[str] = []
    assert lowered(a_task(), AUTO, said.append).parts.plan == BASELINE
    assert len(said) == 2 and said[0].startswith("auto passes over optimizer=fused: ") and "planted" in said[0]
    with pytest.raises(MemoryExhausted):
        lowered(a_task(), Wanted(Plan(device="cpu", optimizer="fused")))


class Samples(torch.utils.data.Dataset):
    """The samples of `labelled`, one by one; `asked` is told of each."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        x, y = labelled()
        return x[index], y[index]


def test_auto_goes_on_sample_by_sample_where_the_data_has_no_room(monkeypatch) -> None:
    tries: list[str] = []

    def no_room(samples: Any, how: Any) -> Any:
        tries.append(how.name)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    monkeypatch.setattr(residency, "materialise", no_room)
    said: list[str] = []
    task = a_task(data=Samples(), epochs=2)
    assert lowered(task, AUTO, said.append).parts.plan == Plan(optimizer="fused")
    assert tries == ["data"]  # what failed once isn't tried again
    assert [line for line in said if "residency=host" in line and "no memory left" in line] == said[:-1]
    with pytest.raises(PlanError, match="no memory left for it") as caught:
        hotloop.lower(a_task(data=Samples(), epochs=2), Plan(residency="host"))
    assert "\n" not in str(caught.value) and "residency='stream'" in str(caught.value)


def test_samples_of_one_epoch_are_not_read_first() -> None:
    assert consider(a_task(data=Samples(), epochs=2), CPU).choices[0].plan.residency == "host"
    assert consider(a_task(data=Samples(), epochs=1), CPU).choices[0].plan.residency == "stream"
    left = consider(a_task(data=Samples(), epochs=3), CPU, done=10)  # of 15 steps
    assert left.facts.steps == 5 and left.choices[0].plan.residency == "stream"


# --- whether compiling pays


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.fixture
def long(monkeypatch) -> None:
    """Any run has steps enough for the rules."""
    monkeypatch.setattr(rules, "COMPILED_FROM_STEPS", 1)


@pytest.fixture
def pretended(monkeypatch) -> list[Plan]:
    """Every compilation pays, and is only pretended; the plans that were lowered."""
    plans: list[Plan] = []

    def pretend(task: Any, plan: Plan, *told: Any) -> Any:
        plans.append(plan)
        return hotloop.lower(task, plan.with_axes(compile="none", rewrites="none"))

    monkeypatch.setattr(choosing, "lower", pretend)
    monkeypatch.setattr(settling, "lower", pretend)
    monkeypatch.setattr(weighing, "_DOUBT", 0.0)  # what a compilation takes doesn't count
    monkeypatch.setattr(weighing, "PROVING_STEPS", 0)
    monkeypatch.setattr(weighing, "_RACING_STEPS", 0)
    monkeypatch.setattr(settling, "PROVING_STEPS", 0)
    return plans


@pytest.fixture
def found(monkeypatch) -> Callable[..., None]:
    """Makes up what races and proofs find."""

    def find(parity: str = "bitwise", **speeds: float) -> None:
        monkeypatch.setattr(settling, "measure", Races(**speeds))
        monkeypatch.setattr(settling, "prove_programs", lambda task, programs: proving(parity)(programs))

    return find


def test_a_run_that_is_over_before_a_compiler_would_be_is_not_compiled(long) -> None:
    said: list[str] = []
    program = lowered(a_task(), AUTO, said.append)
    assert program.parts.plan == Plan(optimizer="fused")
    assert [line.partition(": a step takes")[0] for line in said] == ["auto goes on eagerly", "auto: optimizer=fused"]
    assert "steps left" in said[0]
    left_open = consider(a_task(), CPU).left_open[0]
    assert "whether the step can be captured as one graph, compiling it pays, and what comes out" in left_open


def test_what_was_timed_is_not_what_trains(long) -> None:
    """Modules may count their calls, and data sets what they were asked for."""
    data = Samples()
    program = lowered(a_task(data=data, epochs=1), AUTO)
    fresh = hotloop.lower(a_task(data=Samples(), epochs=1), program.parts.plan)
    assert differences(program.state(), fresh.state()) == []
    assert len(data.asked) <= 2 + 2 + 5 + 2  # looks at the first two, and one batch to time


FOUND: dict[str, tuple[dict[str, float], str, bool, str]] = {
    "faster and proven": (
        {"compile__package": 2.0},
        "bitwise",
        True,
        "is 2.00 times as fast as the baseline, and bitwise",
    ),
    "faster and unproven": ({"compile__package": 2.0}, "unproven", False, "it's unproven: said so"),
    "faster and broken": ({"compile__package": 2.0}, "broken", False, "it's broken: said so"),
    "no faster": ({"compile__package": 1.01}, "bitwise", False, "it's 1.01 times as fast as the baseline"),
    "slower than the eager plan": (
        {"compile__package": 1.3, "optimizer__fused": 1.5},
        "bitwise",
        False,
        "it's 1.30 times as fast as the baseline, and optimizer=fused 1.50",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_compiled_step_stays_if_it_is_faster_and_proven(name: str, long, pretended, found) -> None:
    speeds, parity, stays, why = FOUND[name]
    found(parity, **speeds)
    said: list[str] = []
    lowered(a_task(), AUTO, said.append)
    # A compiler writes the update its own way, so the eager plan's form of it isn't asked for.
    chosen = Plan(compile="package") if stays else Plan(optimizer="fused")
    assert Plan(compile="package") in pretended and pretended[-1] == chosen
    assert said[0].startswith("auto compiles: a step takes ")
    assert why in said[-2] and said[-1] == f"auto: {chosen.brief()}"


@pytest.mark.parametrize(("parity", "speed"), [("bitwise", 0.8), ("broken", 2.0)], ids=["slower", "broken"])
def test_an_eager_plan_that_its_own_race_finds_slower_than_the_baseline_is_not_trained_with(
    parity: str, speed: float, long, pretended, found
) -> None:
    found(parity, compile__package=speed, optimizer__fused=0.9)
    said, verdicts = list[str](), list[Verdict]()
    assert lowered(a_task(), AUTO, said.append, memory=weighing.Memory(keep=verdicts.append)).parts.plan == BASELINE
    assert said[-2:] == [
        "auto passes over optimizer=fused: it's 0.90 times as fast as the baseline",
        "auto: baseline",
    ]
    assert verdicts[0].winner == "baseline" and verdicts[0].plan("optimizer=fused").behind


def test_an_eager_plan_with_what_the_user_set_stays_beside_a_baseline_without_it(long, pretended, found) -> None:
    found(threads__1=0.9)
    wanted = Wanted(Plan(device="cpu", threads=1), auto=True)
    assert lowered(a_task(), wanted).parts.plan == Plan(threads=1, optimizer="fused")


def test_a_compiled_step_that_fails_when_it_is_run_is_passed_over(long, pretended, monkeypatch) -> None:
    """The race is real, so there is one eager plan alone: of two it might find either the faster."""
    plain = settling.lower

    def failing(task: Any, plan: Plan, *told: Any) -> Any:
        program = plain(task, plan, *told)
        if plan.compile != "none":
            monkeypatch.setattr(program, "advance", lambda steps: 1 / 0)
        return program

    monkeypatch.setattr(settling, "lower", failing)
    said: list[str] = []
    wanted = Wanted(Plan(device="cpu", optimizer="default"), auto=True)
    assert lowered(a_task(epochs=1000), wanted, said.append).parts.plan == BASELINE
    assert said[-2].startswith("auto passes over compile=package: ") and "ZeroDivisionError" in said[-2]


def test_a_compiler_that_fails_is_passed_over(long, pretended, found, monkeypatch) -> None:
    found()
    plain = settling.lower

    def failing(task: Any, plan: Plan, *told: Any) -> Any:
        if plan.compile != "none":
            raise AssertionError("of the compiler's own")
        return plain(task, plan, *told)

    monkeypatch.setattr(settling, "lower", failing)
    said: list[str] = []
    assert lowered(a_task(), AUTO, said.append).parts.plan == Plan(optimizer="fused")
    assert "auto passes over compile=package: AssertionError: of the compiler's own" in said[-2]


LASTING: dict[str, tuple[Exception, bool]] = {
    "of the plan": (PlanError("no such kernel"), True),
    "of the room there is": (RoomError("the data can't be read into memory"), False),
    "of memory, as the compiler's": (chained(PlanError("can't be compiled"), MemoryError()), False),
    "of the disk": (DiskError("the disk is full"), False),
    "of the disk, as the compiler's": (
        chained(PlanError("can't be compiled"), OSError(28, "No space left on device")),
        False,
    ),
    "of a compiler that was killed": (
        chained(PlanError("can't be compiled"), RuntimeError("fatal error: Killed signal terminated program cc1plus")),
        False,
    ),
    "of anything else": (RuntimeError("some kernel"), False),
}


@pytest.mark.parametrize("name", LASTING)
def test_a_failure_to_compile_that_may_pass_is_not_remembered(
    name: str, long, pretended, tmp_path, monkeypatch
) -> None:
    (error, lasting), plain, verdicts = LASTING[name], settling.lower, list[Verdict]()

    def failing(task: Any, plan: Plan, *told: Any) -> Any:
        if plan.rewrites != "none":
            raise error
        return plain(task, plan, *told)

    monkeypatch.setattr(settling, "lower", failing)
    monkeypatch.setattr(settling, "measure", Races(compile__package=2.0))
    monkeypatch.setattr(settling, "prove_programs", lambda task, programs: proving()(programs))
    monkeypatch.setattr(kept, "folder", lambda: tmp_path)
    lowered(images(), AUTO, memory=weighing.Memory(keep=verdicts.append))
    [verdict] = verdicts
    kept.remember(verdict)
    found = kept.recall(verdict.fingerprint, verdict.machine, verdict.versions)[0]
    failed = [one.timing.plan for one in found if one.timing.failure]
    assert failed == ([REWRITTEN.model_dump()] if lasting else []) and len(found) - len(failed) == 3


def test_where_nothing_can_be_compiled_that_is_remembered(long, tmp_path, monkeypatch) -> None:
    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    task, said, verdicts = a_task(model=lambda: Branching(6, 3)), list[str](), list[Verdict]()
    monkeypatch.setattr(weighing.Hope, "compilations", 2)
    monkeypatch.setattr(kept, "folder", lambda: tmp_path)
    assert lowered(task, AUTO, said.append, memory=weighing.Memory(keep=verdicts.append)).parts.plan.compile == "none"
    (passed_over,) = (line for line in said if line.startswith("auto passes over compile=package: the step can't"))
    [verdict] = verdicts
    kept.remember(verdict)
    before = [one.timing for one in kept.recall(verdict.fingerprint, verdict.machine, verdict.versions)[0]]
    assert {one.name for one in before} == {"compile=package", "compile=forward optimizer=fused"}
    said.clear()
    lowered(task, AUTO, said.append, memory=weighing.Memory(before))
    failure = passed_over.partition(": ")[2]
    assert said == [
        f"auto passes over compile=package: it failed before ({failure})",
        f"auto passes over compile=forward optimizer=fused: it failed before ({failure})",
        "auto: optimizer=fused",
    ]


@pytest.mark.parametrize("gain", [0.0, 2.0], ids=["pays not", "pays"])
def test_a_step_whose_update_can_t_be_captured_is_compiled_without_it_where_that_pays(
    gain: float, long, pretended, found, monkeypatch
) -> None:
    """RAdam branches on its count; the capture that refuses it is real."""
    found(compile__forward=2.0)
    pretend, by, verdicts, said = settling.lower, weighing.Hope.by, list[Verdict](), list[str]()
    real = lambda task, plan, *told: (hotloop.lower if plan.compile == "package" else pretend)(task, plan, *told)  # noqa: E731
    monkeypatch.setattr(settling, "lower", real)
    gains = {"package": 2.0, "forward": gain or None}
    monkeypatch.setattr(weighing.Hope, "by", lambda hope, way: replace(by(hope, way), gain=gains[way]))
    task = a_task(optimizer=lambda parameters: torch.optim.RAdam(parameters))
    lowered(task, AUTO, said.append, memory=weighing.Memory(keep=verdicts.append))
    assert any(line.startswith("auto passes over compile=package: the step can't be captured") for line in said)
    assert pretended[-1] == (Plan(compile="forward") if gain else BASELINE)

    # It is known the next time that the whole step can't be, also where nothing is known of the rest.
    failed = [one for one in verdicts[0].plans if one.failure]
    lowered(task, AUTO, said.append, memory=weighing.Memory(failed))
    assert pretended[-1] == (Plan(compile="forward") if gain else BASELINE)
    assert any(line.startswith("auto passes over compile=package: it failed before") for line in said)


def test_without_memory_for_plans_side_by_side_nothing_is_compiled(long, pretended, monkeypatch) -> None:
    monkeypatch.setattr(settling, "plans_at_once", lambda facts, device: 2)
    said: list[str] = []
    assert lowered(a_task(), AUTO, said.append).parts.plan == Plan(optimizer="fused")
    assert {plan.compile for plan in pretended} == {"none"}
    assert said[-2] == "auto goes on eagerly: there is no memory for a compiled plan beside the eager one"


def test_without_memory_for_a_proof_nothing_is_compiled(long, pretended, monkeypatch) -> None:
    monkeypatch.setattr(needs, "room_bytes", lambda device: 1 << 10)
    said: list[str] = []
    assert lowered(a_task(), AUTO, said.append).parts.plan == Plan(optimizer="fused")
    assert {plan.compile for plan in pretended} == {"none"}
    assert said[-2].startswith("auto goes on eagerly: nothing compiled could be proven, since a proof takes about")


def test_no_plan_is_left_out_for_one_that_is_not_proven(long, pretended, monkeypatch) -> None:
    """Nor is the eager plan found slower than the baseline for being slower than a compiled one."""
    monkeypatch.setattr(settling, "measure", Rounds(compile__package=1.3, rewrites__all=1.4, optimizer__fused=0.99))
    classes, verdicts = iter(["broken", "bitwise"]), list[Verdict]()
    monkeypatch.setattr(settling, "prove_programs", lambda task, programs: proving(next(classes))(programs))
    lowered(images(), AUTO, memory=weighing.Memory(keep=verdicts.append))
    assert pretended[-1] == Plan(compile="package")
    assert not verdicts[0].plan("optimizer=fused").left_out


def test_a_plan_that_loses_at_once_is_said_to_be_left_out(long, pretended, monkeypatch) -> None:
    monkeypatch.setattr(settling, "measure", Rounds(compile__package=0.8))
    said: list[str] = []
    lowered(a_task(), AUTO, said.append)
    why = "it was left out after 4 pairs, since it's 0.80 times as fast as the baseline"
    assert f"auto passes over compile=package: {why}" in said


def images() -> hotloop.Task:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    return a_task(model=network, data=(torch.randn(12, 1, 6, 6), torch.arange(12) % 3))


REWRITTEN = Plan(compile="package", rewrites="all")


def test_a_step_of_images_is_compiled_with_rewrites_too(long, pretended, found) -> None:
    found(compile__package=2.0, rewrites__all=1.5)
    program = lowered(images(), AUTO)
    assert pretended[-1] == REWRITTEN and Plan(compile="package") in pretended
    program.close()
    lowered(images(), Wanted(Plan(device="cpu", rewrites="none"), auto=True))
    assert pretended[-1] == Plan(compile="package")  # as it was set


@pytest.mark.parametrize(
    ("fixed", "recorded"),
    [({}, [8, "step", "none"]), ({"residency": "stream"}, ["step", "none"]), ({"graphs": "none"}, ["none"])],
    ids=["data on the device", "data elsewhere", "set"],
)
def test_on_cuda_a_compiled_step_is_recorded_too(fixed: dict[str, Any], recorded: list[Any], monkeypatch) -> None:
    """The likeliest way to win first; the step as it is stays, for where none can be recorded."""
    told, machine = made_up(steps=rules.COMPILED_FROM_STEPS), a_machine(A_GPU)
    monkeypatch.setattr(choosing, "here", lambda device: machine)
    compiled = [one.plan for one in rules.ranked(told, machine, Plan(**fixed)) if one.plan.compile == "step"]
    ways = choosing._ways(compiled, told, Wanted(Plan(**fixed), auto=True))
    assert [way.graphs for way in ways] == recorded
    assert {way.with_axes(graphs="none") for way in ways} == {compiled[0].with_axes(optimizer="default")}
    assert [way for way in ways if violations(way, told, machine)] == []


@pytest.mark.parametrize("nothing", [False, True])
def test_where_one_compilation_pays_it_is_the_rewritten_step_if_there_is_one(
    nothing: bool, long, pretended, found, monkeypatch
) -> None:
    found(compile__package=2.0)
    monkeypatch.setattr(weighing.Hope, "compilations", 1)
    plain = settling.lower

    def finding(task: Any, plan: Plan, *told: Any) -> Any:
        if nothing and plan.rewrites != "none":
            raise PlanError("rewrites=all finds nothing")
        return plain(task, plan, *told)

    monkeypatch.setattr(settling, "lower", finding)
    lowered(images(), AUTO)
    compiled = {plan for plan in pretended if plan.compile != "none"}
    assert compiled == {Plan(compile="package") if nothing else REWRITTEN}


def test_a_compilation_must_save_twice_what_it_takes_with_its_proof() -> None:
    """A race may be lost, and a proof fail."""
    hopes = [weighing.Hope(steps, 1e-3, 2.0, compile_s=20.0) for steps in (50_000, 100_000, 200_000, 300_000)]
    assert [hope.compilations for hope in hopes] == [0, 0, 1, 2]
    assert [str(hope).endswith("it may take 30 s, which a lost race would waste") for hope in hopes] == [
        *(False, True, False, False)
    ]
    assert weighing.Hope(300, 100.0, 2.0).compilations == 0  # 250 of 300 steps, each of which may be halved
    assert weighing.Hope(15_000, 3.0, 1.1).compilations == 2  # half a day


def test_a_compilation_takes_no_more_than_a_third_of_the_time_until_the_run_is_to_stop() -> None:
    hopes = [weighing.Hope(400_000, 1e-3, 2.0, compile_s=20.0, limit_s=limit_s) for limit_s in (90.0, 100.0, 200.0)]
    assert [hope.compilations for hope in hopes] == [0, 1, 2]
    assert str(hopes[0]).endswith("it may take 30 s, more than a third of the 90 s until stop-after")
    assert "stop-after" not in str(hopes[1])


def test_a_run_that_is_to_stop_before_a_compiler_would_be_done_trains_eagerly(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(settling.Settling, "run", lambda *given: pytest.fail("it compiles"))
    task, said = a_task(epochs=10_000_000), list[str]()
    given: dict[str, Any] = dict(plan="auto", axes={"device": "cpu"}, stop_after="0.5s", say=said.append)
    run, _ = training.start(Loaded(task, None, {}), run=tmp_path / "run", **given)
    training.go_on(run.path, task=task, **given)
    assert run.plan == Plan(optimizer="fused")
    assert len([line for line in said if line.endswith(" s until stop-after")]) == 2


def test_a_look_at_each_epoch_for_what_callbacks_change_takes_from_what_compiling_saves() -> None:
    hopes = [weighing.Hope(300_000, 1e-3, 2.0, compile_s=20.0, looks=epochs, look_s=1.0) for epochs in (0, 50, 99)]
    assert [hope.compilations for hope in hopes] == [2, 1, 0]  # of 150 s
    assert "should save about 51 s of the 300,000 steps left with 99 looks for what callbacks change" in str(hopes[-1])


@pytest.mark.parametrize(
    ("given", "epochs"), [({}, 0), ({"callbacks": [draw_curves]}, 0), ({"callbacks": [print]}, 100)]
)  # fmt: skip
def test_it_is_reckoned_with_where_there_are_callbacks_of_the_users(given: Any, epochs: int, monkeypatch) -> None:
    monkeypatch.setattr(weighing.Hope, "pays", lambda hope, compilations=1: True)
    hope = weighing.hoped(hotloop.lower(a_task(**given), CPU), 500, way="package", rewrites=False)  # 5 in an epoch
    assert isinstance(hope, weighing.Hope) and hope.looks == epochs and hope.look_s > 0


def test_callbacks_of_the_run_count_as_those_of_the_task(long, pretended, found, monkeypatch) -> None:
    found()
    said, made, plain = list[str](), list[Any](), settling.lower

    def noted(*given: Any) -> Any:
        made.append(plain(*given))
        return made[-1]

    monkeypatch.setattr(settling, "lower", noted)
    monkeypatch.setattr(weighing.Hope, "compilations", 1)
    lowered(a_task(epochs=100), AUTO, said.append, callbacks=[print])
    assert made and all(program.watched for program in made)
    assert "with 100 looks for what callbacks change" in said[0]


def test_a_run_hands_its_callbacks_on_to_what_chooses(tmp_path, monkeypatch) -> None:
    heard, plain = list[Any](), remembering.lowered

    def noted(*given: Any, **named: Any) -> Any:
        heard.append(list(named["callbacks"]))
        return plain(*given, **named)

    monkeypatch.setattr(remembering, "lowered", noted)
    task, seen = a_task(epochs=1), list[Any]()
    given: dict[str, Any] = dict(plan="auto", axes={"device": "cpu"}, callbacks=[seen.append])
    run, _ = training.start(Loaded(task, None, {}), run=tmp_path / "run", **given)
    training.go_on(run.path, task=task, overrides={"epochs": 2}, **given)
    assert heard == [[seen.append], [seen.append]]


def test_a_compiled_step_that_loses_what_it_saves_by_looking_is_not_proven(long, pretended, monkeypatch) -> None:
    races = Races(compile__package=2.0)

    def looking(*given: Any, **named: Any) -> Any:
        plans = races(*given, **named).plans
        taken = [one.model_copy(update={"looking_ms": 100.0 if "compile" in one.name else 0.0}) for one in plans]
        return Measured(taken, [])

    monkeypatch.setattr(settling, "measure", looking)
    monkeypatch.setattr(settling, "prove_programs", lambda task, programs: pytest.fail("it was proven"))
    said = list[str]()
    assert lowered(a_task(), AUTO, said.append).parts.plan == Plan(optimizer="fused")
    assert said[-2].startswith(
        "auto passes over compile=package: it saves 0 s with a look at each epoch whether callbacks change the step"
    )


def test_race_and_proof_wait_for_their_batches_too() -> None:
    loading = [weighing.Hope(400_000, 1e-3, 2.0, load_s, 20.0) for load_s in (0.0, 0.2, 0.3)]  # saves 200 s
    assert [hope.compilations for hope in loading] == [2, 1, 0]
    assert "a step takes 1 ms, its batch 300 ms, so compiling" in str(loading[-1])


def test_batches_are_made_as_the_baseline_makes_them(pretended) -> None:
    """Whatever the eager plan has read into memory."""

    class Slow(Samples):
        def __getitem__(self, index: int) -> Any:
            time.sleep(2e-3)
            return super().__getitem__(index)

    task = a_task(data=Slow(), batch_size=5, epochs=1000)
    program = hotloop.lower(task, Plan(device="cpu", residency="host"))
    hope = weighing.hoped(program, 100_000, way="package", rewrites=False)
    assert isinstance(hope, weighing.Hope) and hope.load_s >= 5 * 2e-3


def test_batches_of_several_shapes_are_not_compiled_for(long, pretended) -> None:
    """Padded to the longest of each batch."""

    def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        x = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)
        return x, torch.tensor([label for _, label in samples])

    lines = [(torch.ones(3 + number, 4), number % 3) for number in range(24)]

    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mean(1))

    loader = torch.utils.data.DataLoader(lines, batch_size=5, collate_fn=padded)
    said: list[str] = []
    lowered(a_task(data=loader, batch_size=None, model=lambda: Reads(4, 3), epochs=1000), AUTO, said.append)
    assert {plan.compile for plan in pretended} == {"none"}
    assert said[1] == (
        "auto goes on eagerly: its batches differ in keys or shapes, and a compiled step is for batches that are alike"
    )


def test_an_incomplete_last_batch_speaks_not_against_compiling(long, pretended, found) -> None:
    found(compile__package=2.0)
    lowered(a_task(batch_size=10), AUTO)  # 10, 10 and 4
    assert pretended[-1] == Plan(compile="package")


@pytest.mark.parametrize("axes", [{"accumulation": 2}, {"precision": "bf16"}], ids=["accumulation", "precision"])
def test_where_memory_may_be_too_small_for_the_baseline_nothing_runs_beside_it(
    axes: dict[str, Any], long, pretended
) -> None:
    said: list[str] = []
    lowered(a_task(), Wanted(Plan(device="cpu", **axes), auto=True), said.append)
    assert {(plan.compile, *(getattr(plan, axis) for axis in axes)) for plan in pretended} == {("none", *axes.values())}
    assert said[-2].startswith("auto goes on eagerly: compiled plans race beside whole batches in fp32")


def test_a_baseline_that_fails_shows_before_anything_is_compiled(long, pretended, monkeypatch) -> None:
    plain = settling.lower

    def failing(task: Any, plan: Plan, *told: Any) -> Any:
        program = plain(task, plan, *told)
        if plan == BASELINE:
            monkeypatch.setattr(program, "advance", lambda steps: torch.empty(1 << 50))
        return program

    monkeypatch.setattr(settling, "lower", failing)
    said: list[str] = []
    assert lowered(a_task(), AUTO, said.append).parts.plan == Plan(optimizer="fused")
    assert {plan.compile for plan in pretended} == {"none"}
    assert said[-2].startswith("auto goes on eagerly: its plans couldn't be raced (")


def test_a_proof_has_the_memory_of_all_plans_but_one(long, pretended, found, monkeypatch) -> None:
    found(compile__package=2.0, rewrites__all=1.5)
    made, held, plain = list[weakref.ref[Any]](), list[int](), settling.lower
    classes = iter(["broken", "bitwise"])

    def noted(task: Any, plan: Plan, *told: Any) -> Any:
        program = plain(task, plan, *told)
        made.append(weakref.ref(program))
        return program

    def proves(task: Any, programs: Any) -> Any:
        held.append(sum(one() is not None for one in made))
        return proving(next(classes))(programs)

    monkeypatch.setattr(settling, "lower", noted)
    monkeypatch.setattr(settling, "prove_programs", proves)
    lowered(images(), AUTO)
    assert held == [1, 1] and pretended[-1] == Plan(compile="package")


def test_choosing_leaves_the_callers_generators_alone(long, pretended, found) -> None:
    found(compile__package=2.0)
    torch.manual_seed(3)
    first = torch.rand(2)
    torch.manual_seed(3)
    lowered(a_task(model=lambda: nn.Sequential(nn.Dropout(), nn.Linear(6, 3))), AUTO).close()
    assert pretended[-1] == Plan(compile="package") and torch.equal(torch.rand(2), first)


def test_data_in_an_order_of_its_own_is_not_compiled_for(long, pretended) -> None:
    x, y = labelled()
    data = torch.utils.data.TensorDataset(x, y)
    weighted = torch.utils.data.WeightedRandomSampler(torch.ones(24), 24)
    loader = torch.utils.data.DataLoader(data, batch_size=5, sampler=weighted)
    said: list[str] = []
    lowered(a_task(data=loader, batch_size=None), AUTO, said.append)
    assert {plan.compile for plan in pretended} == {"none"}
    assert "auto goes on eagerly: its data has an order of its own" in said[0]


def raced_before(**figures: Any) -> Timing:
    given: dict[str, Any] = dict(ratio=2.0, ratio_low=1.9, ratio_high=2.1, verdict="faster", parity="bitwise")
    return Timing(name="compile=package", plan=Plan(compile="package").model_dump(), **given | figures)


LEFT_OUT: dict[str, Any] = dict(ratio_low=None, ratio_high=None, windows=4, verdict=None, parity=None, left_out=True)
UNDECIDED: dict[str, Any] = dict(ratio=1.07, ratio_low=0.9, ratio_high=1.2, verdict="no difference", parity=None)
BEFORE = {
    "too short then": (raced_before(), ""),
    "failed": (Timing(name="", plan=Plan(compile="package").model_dump(), failure="no luck"), "it failed before (no luck)"),
    "broken": (raced_before(parity="broken", parity_reason="NaN"), "it was found broken: NaN"),
    "slower": (raced_before(ratio=0.8, verdict="slower", parity=None), "it was raced before, and isn't faster"),
    "left out early": (raced_before(ratio=0.8, **LEFT_OUT), "it was raced before, and isn't faster"),
    "left out beside a faster one": (raced_before(ratio=1.5, **LEFT_OUT), ""),
    "faster, and not proven": (raced_before(parity=None), ""),
    "undecided": (raced_before(**UNDECIDED), ""),
    "undecided for long": (
        raced_before(windows=12, **UNDECIDED),
        "it was raced before for as long as a search races, and isn't clearly faster",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BEFORE)
def test_what_was_found_before_is_not_tried_again(name: str, long, pretended, found) -> None:
    found(compile__package=2.0)
    before, why = BEFORE[name]
    said: list[str] = []
    lowered(a_task(), AUTO, said.append, memory=weighing.Memory([before]))
    assert (Plan(compile="package") in pretended) is not bool(why)
    assert (f"auto passes over compile=package: {why}" in said) is bool(why)


def test_what_was_raced_before_is_compiled_where_the_run_pays_for_its_proof() -> None:
    memory = weighing.Memory([raced_before(parity=None)])
    why = {steps: memory.against(Plan(compile="package"), Plan(), TRUSTED, steps) for steps in (500, 501, None)}
    assert why == {500: "it was raced before, and its proof takes longer than it saves", 501: "", None: ""}
    looking = weighing.Memory([raced_before(parity=None, step_ms=5.0, looking_ms=4.0)])  # of the baseline's 10 ms
    assert [bool(looking.against(Plan(compile="package"), Plan(), TRUSTED, steps)) for steps in (501, 2600)] == [
        True,
        False,
    ]


def test_a_compiled_step_is_proven_and_remembered_and_begins_with_what_has_run_no_step(found, monkeypatch) -> None:
    """All but the times of the race is real: the compiler, the proof, and what is kept of them."""
    found(compile__package=2.0)
    monkeypatch.setattr(settling, "prove_programs", prove_programs)
    monkeypatch.setattr(weighing, "_DOUBT", 0.0)  # what a compilation takes doesn't count
    task, verdicts = a_task(epochs=10_000), list[Verdict]()
    program = lowered(task, AUTO, memory=weighing.Memory(keep=verdicts.append))
    assert program.parts.plan == Plan(compile="package")
    assert differences(program.state(), hotloop.lower(task, Plan()).state()) == []
    [verdict] = verdicts
    timing = verdict.plan("compile=package")
    assert timing.parity in TRUSTED and timing.compile_s and timing.compile_warm_s is not None
    assert verdict.winner == "compile=package" and verdict.plan(verdict.baseline).plan == Plan().model_dump()


def test_what_can_t_be_timed_goes_on_eagerly_to_fail_in_training(long, pretended, monkeypatch) -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise ValueError("planted")
            return super().forward(x)

    said: list[str] = []
    lowered(a_task(model=lambda: Fails(6, 3)), AUTO, said.append)
    assert said[0].startswith("auto goes on eagerly: its steps couldn't be timed (ValueError: planted")


class Reader(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[:, None])[0][:, -1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_not_compiled(kind: type[nn.Module], long) -> None:
    task, said = a_task(model=lambda: Reader(kind(6, 4, batch_first=True))), list[str]()
    choices = consider(task, CPU).choices
    assert {choice.plan.compile for choice in choices} == {"none"}
    assert any("compile=none: captured, recurrent layers" in why for why in choices[0].why)
    assert lowered(task, AUTO, said.append).parts.plan.compile == "none"
    assert len([line for line in said if "recurrent layers" in line]) == 1
    assert consider(task, Plan(device="cpu", compile="step")).choices[0].plan.compile == "step"  # asked for


def test_auto_passes_on_what_the_baseline_cannot_do_either(monkeypatch) -> None:
    def nothing(parts: Ingredients) -> Ingredients:
        raise PlanError(f"planted under {parts.plan.brief()}")

    monkeypatch.setattr(order, "TRANSFORMS", (nothing,))
    with pytest.raises(PlanError, match="planted under baseline"):
        lowered(a_task(), AUTO)


def test_auto_does_not_hide_a_fault_of_the_task(monkeypatch) -> None:
    with pytest.raises(hotloop.HotloopError, match="the optimizer factory raised"):
        lowered(a_task(optimizer=lambda p: torch.optim.SGD(p, lr=-1.0)), AUTO)


def test_what_is_considered_leaves_the_callers_generators_alone() -> None:
    torch.manual_seed(3)
    first = torch.rand(2)
    torch.manual_seed(3)
    consider(a_task(), CPU)
    assert torch.equal(torch.rand(2), first)


def test_a_plan_without_a_device_goes_to_the_accelerator(monkeypatch) -> None:
    monkeypatch.setattr("hotloop.choosing.devices", lambda: ["cpu", "cuda:0"])
    monkeypatch.setattr("hotloop.choosing.check_device", lambda name: name)
    assert placed(Plan(threads=2)) == Plan(device="cuda:0", threads=2)
    assert placed(Plan().with_axes(threads=2)) == placed(Plan(threads=2))
    assert placed(Plan(device="cpu", threads=2)) == Plan(device="cpu", threads=2)
    assert placed(Plan(), "cpu") == Plan()


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
    describe = probe.machine.describe

    def noting(name: str, vectors: tuple[str, ...]) -> Device:
        looked.append(name)
        return describe("cpu", vectors) if name == "cpu" else Device(name, "cuda", "made up", precisions=("fp32",))

    monkeypatch.setattr(probe, "devices", lambda: ["cpu", "cuda:0", "cuda:1"])
    monkeypatch.setattr(probe.machine, "describe", noting)
    monkeypatch.setattr(probe.machine, "nvidia", lambda: pytest.fail("nvidia-smi takes its time"))
    monkeypatch.setattr(probe.speed, "measure", lambda *args: pytest.fail("measured"))
    found = probe.here("cuda:1")
    assert looked == ["cpu", "cuda:1"] and [one.name for one in found.devices] == ["cpu", "cuda:0", "cuda:1"]
    assert found.devices[1].precisions == () and found.devices[2].model == "made up"


def test_here_and_probe_tell_the_same() -> None:
    found = probe.here()
    assert found.device("cpu") is not None and found.processor.threads >= 1
    with pytest.raises(DeviceError):
        placed(Plan(device="xpu:9"))


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


@pytest.mark.parametrize("model", [Words, Turning])
def test_what_a_fused_update_can_t_take_is_trained_all_the_same(model: type[nn.Module], tmp_path) -> None:
    inputs = torch.randint(0, 9, (24, 6)) if model is Words else labelled()[0]
    task = a_task(model=model, data=(inputs, labelled()[1]), epochs=1)
    run = hotloop.fit(task, run=tmp_path / "run", device="cpu", progress=False)
    assert run.plan.optimizer != "fused"
    with pytest.raises(PlanError, match="no such implementation"):
        hotloop.lower(task, Plan(optimizer="fused"))
