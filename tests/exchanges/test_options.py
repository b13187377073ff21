"""Options of the process are raced on the steps, used if they are faster, and switched with all other exchanges."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hotloop.exchanges import options
from hotloop.exchanges.options import OptionPart, OptionRaces, ProcessOption
from hotloop.exchanges.races import Seconds, TimedStep
from hotloop.tuning.races.statistics import Ratio
from tests.exchanges.conftest import set_clocks


class MachineOption(ProcessOption):
    exchange, proof = "on", "bitwise"

    def __init__(self, on: dict[str, bool], name: str, conflict: Callable[[], str]) -> None:
        self.on, self.name, self.found = on, name, conflict

    def switch(self, on: bool) -> None:
        self.on[self.name] = on

    def conflict(self) -> str:
        return self.found()


class Machine:
    """Steps take 10 ms, times the factor of each option that is on."""

    def __init__(self, factors: dict[str, float]) -> None:
        self.factors, self.on = factors, dict.fromkeys(factors, False)

    def option(self, name: str, conflict: Callable[[], str] = lambda: "") -> ProcessOption:
        return MachineOption(self.on, name, conflict)

    def step_s(self) -> float:
        seconds = 0.010
        for name, is_on in self.on.items():
            seconds *= self.factors[name] if is_on else 1.0
        return seconds


def part_of(option: ProcessOption, earlier: tuple[str, Ratio] | None = None) -> OptionPart:
    return OptionPart(option, exact=False, changed=lambda: None, earlier=earlier)


NOW_S = [0.0]


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_clocks(monkeypatch, lambda: NOW_S[0])


def step_of(step_s: float) -> TimedStep:
    NOW_S[0] += step_s
    return TimedStep(Seconds(step_s, step_s))


def train(races: OptionRaces, machine: Machine, steps: int = 2000) -> int:
    """Returns the number of steps that races needed."""
    return sum(races.step_ended(step_of(machine.step_s())) for _ in range(steps))


def test_faster_options_are_used_and_others_are_switched_off() -> None:
    machine = Machine({"first": 0.8, "slower": 1.05, "equal": 1.0, "last": 0.9})
    parts = [part_of(machine.option(name)) for name in machine.factors]
    races = OptionRaces(parts)
    raced = train(races, machine)
    assert machine.on == {"first": True, "slower": False, "equal": False, "last": True}
    assert [part.stage for part in parts] == ["use", "off", "off", "use"]
    assert parts[0].ratio is not None and parts[0].ratio.median == pytest.approx(1.25)
    assert raced < 1000 and "not faster: 0.95 times" in parts[1].reason
    races.switch(False)
    assert not any(machine.on.values())
    races.switch(True)
    assert machine.on["first"] and machine.on["last"] and not machine.on["slower"]


def test_a_clearly_slower_option_costs_few_steps() -> None:
    machine = Machine({"slow": 3.0})
    races = OptionRaces([part_of(machine.option("slow"))])
    assert train(races, machine) <= 32 and not machine.on["slow"]


def test_long_steps_need_all_threads() -> None:
    machine = Machine({"threads": 0.5})
    part = part_of(machine.option("threads"))
    part.option.longest_step_s = 0.005
    assert train(OptionRaces([part]), machine) == 0 and not machine.on["threads"]
    assert part.reason == "a step takes 0.01 s, so its race would cost more than its gain"


def test_one_long_step_refuses_no_race() -> None:
    machine = Machine({"threads": 0.5})
    part = part_of(machine.option("threads"))
    part.option.longest_step_s = 0.05
    races = OptionRaces([part])
    for _ in range(5):
        races.step_ended(step_of(0.01))
    assert races.step_ended(step_of(0.3)) and part.stage == "race"


def test_an_option_of_an_earlier_run_needs_no_race() -> None:
    machine = Machine({"first": 0.8})
    part = part_of(machine.option("first"), ("on", Ratio(1.25, 1.2, 1.3, 12)))
    assert train(OptionRaces([part]), machine, 10) == 0 and machine.on["first"] and part.stage == "use"


def test_a_setting_of_the_script_excludes_an_option() -> None:
    machine, found = Machine({"first": 0.8, "second": 0.8}), {"first": "the script sets it", "second": ""}
    parts = [part_of(machine.option(name, lambda name=name: found[name])) for name in found]
    races = OptionRaces(parts)
    train(races, machine, 20)
    found["second"] = "the script sets it later"
    train(races, machine)
    assert [part.reason for part in parts] == list(found.values()) and not any(machine.on.values())


def test_an_option_ends_when_the_script_changes_the_setting() -> None:
    machine, found = Machine({"first": 0.8}), [""]
    part = part_of(machine.option("first", lambda: found[0]))
    races = OptionRaces([part])
    train(races, machine)
    found[0] = "the script sets it"
    races.switch(False)
    races.switch(True)
    assert (
        part.stage == "off"
        and not machine.on["first"]
        and part.notes == ["process: first: the exchange on was taken back: the script sets it"]
    )


def test_freed_memory_returns_if_little_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({"allocator": 0.8})
    part = part_of(machine.option("allocator"))
    races = OptionRaces([part])
    train(races, machine)
    monkeypatch.setattr(options.psutil, "virtual_memory", lambda: SimpleNamespace(available=5, total=100))
    races.check_memory()
    assert not machine.on["allocator"] and part.stage == "off" and "less than a tenth" in part.notes[0]


def test_the_end_switches_everything_off() -> None:
    machine = Machine({"first": 0.8, "second": 0.8})
    races = OptionRaces([part_of(machine.option(name)) for name in machine.factors])
    train(races, machine, 250)
    assert machine.on["first"]
    races.end()
    assert not any(machine.on.values())


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def named(monkeypatch: pytest.MonkeyPatch, **how: bool) -> dict[str, ProcessOption]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return {option.name: option for option in options.process_options(**{"exact": False, **how})}


def test_threads_are_the_scripts_own_choice(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    torch.set_num_threads(2)
    option = named(monkeypatch, accepts_reduced=False)["threads"]
    assert option.exchange == "1 instead of 2" and option.conflict() == ""
    option.switch(True)
    assert torch.get_num_threads() == 1
    option.switch(False)
    assert torch.get_num_threads() == 2
    option.switch(True)
    torch.set_num_threads(5)
    option.switch(False)
    assert torch.get_num_threads() == 5 and "the script sets" in option.conflict()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "threads" not in {one.name for one in options.process_options(exact=False, accepts_reduced=False)}


def test_exact_allows_bitwise_options_only(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    torch.set_num_threads(2)
    options = named(monkeypatch, exact=True, accepts_reduced=False).values()
    assert {option.proof for option in options} <= {"bitwise"}


def test_subnormal_numbers_are_flushed_while_the_option_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    option = named(monkeypatch, accepts_reduced=False)["numbers below 1.2e-38"]
    small = torch.tensor([1e-39])
    option.switch(True)
    try:
        assert (small * 1).item() == 0.0 and option.conflict() == ""
        torch.set_flush_denormal(False)
        assert option.conflict() == "the script sets this itself"
    finally:
        option.switch(False)
    assert (small * 1).item() > 0.0 and option.conflict() == ""
    torch.set_flush_denormal(True)
    try:
        assert option.conflict() == "the script sets this itself"
    finally:
        torch.set_flush_denormal(False)


def test_real_options_keep_their_stage_through_races_and_windows(
    monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    """Each option is announced as faster; switching it must not look like a change by the script."""
    torch.set_num_threads(2)
    parts = [part_of(option) for option in named(monkeypatch, accepts_reduced=False).values()]
    optimizer = torch.optim.SGD([torch.full((4,), 1e-39)])
    races = OptionRaces(parts, lambda: [optimizer])
    is_on = dict.fromkeys((part.name for part in parts), False)
    for part in parts:
        real = part.option.switch

        def switch(on: bool, name: str = part.name, real: Callable[[bool], None] = real) -> None:
            is_on[name] = on
            real(on)

        part.option.switch = switch
    for _ in range(1000):
        races.step_ended(step_of(0.010 * 0.8 ** sum(is_on.values())))
    assert [part.stage for part in parts] == ["use"] * len(parts) and len(parts) >= 2
    for enabled in (False, True, False):
        races.switch(enabled)
        assert set(is_on.values()) == {enabled} and [part.stage for part in parts] == ["use"] * len(parts)


def test_reduced_precision_needs_the_users_word_and_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    name, capabilities = "products of fp32 numbers", {"avx512_bf16": True}
    monkeypatch.setattr(options.torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(options.torch.cpu, "get_capabilities", lambda: capabilities)
    assert name not in named(monkeypatch, accepts_reduced=False)
    option = named(monkeypatch, accepts_reduced=True)[name]
    assert option.proof == "reduced-precision" and option.conflict() == ""
    before = torch.get_float32_matmul_precision()
    option.switch(True)
    try:
        assert torch.get_float32_matmul_precision() == "medium" and option.conflict() == ""
    finally:
        option.switch(False)
    assert torch.get_float32_matmul_precision() == before
    torch.set_float32_matmul_precision("high")
    try:
        assert option.conflict() == "the script sets the precision of products"
    finally:
        torch.set_float32_matmul_precision(before)
    capabilities.clear()
    assert "no bf16 instructions" in option.conflict()
