"""The child that compiles and proves a plan: what it returns, and each way in which it may fail."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from hotloop.core.files.package_use import PackageUse
from hotloop.core.records.race import TRUSTED_CLASSES
from hotloop.core.state import differing_paths
from hotloop.errors import DiskError, PlanError
from hotloop.lowering.build import lower
from hotloop.lowering.compile import package_cache
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.tuning import candidate_process
from hotloop.tuning.candidate_process import CandidateProcess, PreparedPlan
from hotloop.tuning.economics import Payoff
from hotloop.tuning.spare_time import MAX_LOSS
from tests.support.planted_step_faults import loss_scaled, loss_scaled_if
from tests.support.programs import a_task, advance
from tests.support.tasks.model_families import family

FUSED = Plan(optimizer="fused")
PAYOFF = Payoff(10**9, 1e-3, gain=2.0, loss=MAX_LOSS)

pytestmark = pytest.mark.usefixtures("one_thread")


def begun(plan: Plan = FUSED, payoff: Payoff = PAYOFF, training: Program | None = None) -> CandidateProcess:
    training = training or lower(a_task(epochs=4), Plan())
    return CandidateProcess(training.parts.task, training, Plan(), [plan], TRUSTED_CLASSES, payoff)


def result(child: CandidateProcess, seconds: float = 300.0) -> PreparedPlan:
    until = time.monotonic() + seconds
    while (found := child.poll()) is None:
        assert time.monotonic() < until, "the child doesn't end"
        time.sleep(0.02)
    return found


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def act(monkeypatch: pytest.MonkeyPatch, work: Callable[..., Any]) -> None:
    monkeypatch.setattr(candidate_process, "_prepare", work)


def test_an_equal_plan_is_proven() -> None:
    found = result(begun())
    assert found.why_not == "" and found.parity is not None and found.parity.parity in TRUSTED_CLASSES


def test_an_eager_plan_is_proven_without_a_compiler() -> None:
    training = lower(family("cnn"), Plan())
    advance(training, 6)
    found = result(begun(Plan(layout="channels_last"), training=training))
    assert found.why_not == "" and found.compile_s == 0.0


def test_a_wrong_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(task: Any, plan: Plan, *arguments: Any) -> Any:
        program = lower(task, plan, *arguments)
        loss_scaled(program)
        return program

    monkeypatch.setattr(candidate_process, "lower", faulty)
    found = result(begun())
    assert found.parity is not None and found.parity.parity == "broken" and found.why_not.startswith("it's broken")


def test_a_plan_that_is_wrong_for_the_weights_of_the_training_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is right for the small weights with which a training begins."""
    first, training = (lower(a_task(epochs=100), Plan()) for _ in range(2))
    advance(training, 150)
    limit = weight_size(training)
    advance(training, 150)
    assert weight_size(training) > limit

    def faulty(task: Any, plan: Plan, *arguments: Any) -> Any:
        program = lower(task, plan, *arguments)
        loss_scaled_if(program, lambda: weight_size(program) > limit)
        return program

    monkeypatch.setattr(candidate_process, "lower", faulty)
    assert result(begun(training=first)).why_not == ""
    before = training.state()
    found = result(begun(training=training))
    assert found.parity is not None and found.parity.parity == "broken" and found.why_not.startswith("it's broken")
    assert differing_paths(training.state(), before) == []


def weight_size(program: Program) -> float:
    return sum(float(value.detach().norm()) for value in program.model.parameters())


def test_a_plan_of_fewer_bits_is_refused_unless_it_was_asked_for() -> None:
    found = result(begun(Plan(precision="bf16")))
    assert found.why_not.startswith("it's reduced-precision") or found.why_not.startswith("it's broken")


def test_a_child_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    act(monkeypatch, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
    assert "died" in result(begun()).why_not


def test_an_error_of_the_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Any:
        raise PlanError("no such step", expected="another", fix="none")

    monkeypatch.setattr(candidate_process, "lower", fails)
    assert "no such step" in result(begun()).why_not


@pytest.mark.parametrize("paused", [False, True])
def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, paused: bool) -> None:
    act(monkeypatch, lambda *arguments: time.sleep(1000))
    child = begun()
    if paused:
        child.spare_time.pause()
    assert child.poll() is None
    child.limit_s = 0.0
    assert "did not end within" in result(child).why_not
    assert has_ended(child.pid)


def test_a_paused_child_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def work(*arguments: Any) -> dict[str, Any]:
        until = time.monotonic() + 60
        while not (tmp_path / "go").exists() and time.monotonic() < until:
            time.sleep(0.01)
        return {"failure": "for the test"}

    act(monkeypatch, work)
    child = begun()
    child.spare_time.pause()
    (tmp_path / "go").touch()
    time.sleep(0.3)
    assert child.poll() is None
    child.spare_time.proceed()
    assert result(child).why_not == "for the test"


def test_a_candidate_that_can_not_pay_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def lower_eager(task: Any, plan: Plan, *arguments: Any) -> Any:
        return os._exit(1) if plan == FUSED else lower(task, plan, *arguments)

    payoff = Payoff(100, 1e-3, loss=MAX_LOSS)
    monkeypatch.setattr(candidate_process, "lower", lower_eager)
    found = result(begun(payoff=payoff))
    assert not found.pays and "should save 0 s" in found.why_not


@pytest.mark.more
def test_a_package_that_can_not_be_stored_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(path: Path, content: bytes) -> None:
        raise DiskError("no space left on device", expected="free space", fix="free some")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(package_cache, "write_atomic", full)
    found = result(begun(Plan(compile="package")), 600.0)
    assert "isn't cached for later runs: no space left" in found.why_not


@pytest.mark.more
def test_a_child_without_space_for_the_compilers_files_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def limited(*arguments: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))  # in the child alone
        return lower(*arguments)

    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(candidate_process, "lower", limited)
    child = begun(Plan(compile="package"))
    found = result(child, 600.0)
    assert found.why_not and found.parity is None and found.pays
    assert has_ended(child.pid)
    assert not list(tmp_path.rglob("*.pt2"))
    monkeypatch.setattr(candidate_process, "lower", lower)
    assert result(begun(Plan(compile="package")), 600.0).why_not == "", "another child can't use what the first wrote"


@pytest.mark.more
def test_a_wrong_package_is_refused_and_a_right_one_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load = package_cache._load_package

    def wrong(path: Path) -> Any:
        run = load(path)

        def changed(flat: list[Any]) -> Any:
            before = flat[0].clone()
            outputs = run(flat)
            flat[0].add_(flat[0] - before, alpha=1e-3)  # an update that is a thousandth too long
            return outputs

        return changed

    with monkeypatch.context() as patch:
        patch.setattr(package_cache, "_load_package", wrong)
        found = result(begun(Plan(compile="package")), 600.0)
        assert found.parity is not None and found.why_not.startswith("it's broken")
    found = result(begun(Plan(compile="package")), 600.0)
    assert found.why_not == ""
    assert (
        lower(a_task(epochs=4), Plan(compile="package"), package=PackageUse(found.package)).parts.package.digest
        == found.package
    )


def test_pooling_that_can_be_rewritten_favours_the_usual_layout() -> None:
    training, plans = lower(family("cnn"), Plan()), [Plan(layout="channels_last"), FUSED]
    for has_pooling, plan in ((True, FUSED), (False, plans[0])):
        payoff = replace(PAYOFF, has_pooling=has_pooling)
        child = CandidateProcess(training.parts.task, training, Plan(), plans, TRUSTED_CLASSES, payoff)
        assert result(child).plan == plan
