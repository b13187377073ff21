"""Modules on a CUDA device and on the CPU in one training: the result is that of one device, and its State any plan's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hotloop
from hotloop.core.random.rng import preserve_generators
from hotloop.core.state import differing_paths
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from tests.support.programs import advance, last_state, through_file, trained
from tests.support.tasks.placed_models import a_chain, alone, both, come_to, distance

pytestmark = pytest.mark.gpu

ON = "cuda:0"
QUIET = {"encoder.drop": "cpu", "branch": "cpu"}
"""All that draws random numbers: those of a GPU are others."""

PLACED = {
    "the first part": Plan(placement={"encoder": ON, **QUIET}),
    "the last part": Plan(placement={"head": ON, "blocks": ON}),
    "all but what draws": Plan(device=ON, placement=QUIET),
    "parts of parts": Plan(placement={"encoder": ON, **QUIET, "encoder.inside": "cpu", "blocks.1.0": ON}),
    "fused": Plan(placement={"head": ON, "blocks": ON}, optimizer="fused"),
    "lists": Plan(placement={"head": ON, "blocks": ON}, optimizer="foreach"),
}


@pytest.mark.parametrize("name", PLACED)
def test_it_comes_to_what_the_cpu_comes_to(name: str) -> None:
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        assert distance(come_to(both("fp64"), PLACED[name]), alone("fp64")) < 1e-10
        fp32 = distance(come_to(both("fp32"), PLACED[name]), alone("fp64"))
    assert fp32 <= 8 * distance(alone("fp32"), alone("fp64"))


def on_the_gpu(program: Program) -> set[str]:
    return {name for name, value in program.model.named_parameters() if value.device == torch.device(ON)}


def test_tensors_are_where_they_were_placed_and_no_others() -> None:
    program = hotloop.lower(a_chain(), Plan(placement={"4": ON}))
    before = torch.cuda.memory_allocated(0)
    advance(program, 2)
    assert on_the_gpu(program) == {"4.weight", "4.bias"}
    for value, state in program.optimizer.state.items():
        assert state["exp_avg"].device == value.device
    assert torch.cuda.memory_allocated(0) >= before
    assert program.devices == (torch.device("cpu"), torch.device(ON))


def test_random_numbers_follow_from_the_step_on_each_device() -> None:
    """Dropout on the GPU: a State and its step give the same bits again, whatever was drawn meanwhile."""
    program = hotloop.lower(a_chain(average=None), Plan(placement={"2": ON}))
    advance(program, 3)
    state = program.state()
    advance(program, 4)
    expected = program.state()
    torch.rand(100, device=ON)
    program.restore(through_file(state))
    advance(program, 4)
    assert differing_paths(program.state(), expected) == []
    drawn = torch.cuda.get_rng_state(0)
    with preserve_generators(*program.devices):
        advance(program, 1)
    assert torch.cuda.get_rng_state(0).equal(drawn)


def test_a_run_goes_on_with_another_placement_and_is_evaluated_anywhere(tmp_path: Path) -> None:
    task = a_chain()
    run = trained(task, tmp_path / "run", plan=Plan(placement={"4": ON}))
    for epochs, plan in ((4, Plan()), (5, Plan(placement={"0": ON}))):
        run = hotloop.fit(a_chain(epochs=epochs), run=run.path, resume=True, plan=plan, device="cpu", progress=False)
    assert last_state(run).position.epoch == 5
    x = task.roles.validation.columns[0]  # type: ignore[union-attr]
    here, there = (hotloop.predict(run, x, task=task, device=device) for device in ("cpu", ON))
    torch.testing.assert_close(torch.as_tensor(here), torch.as_tensor(there), rtol=1e-4, atol=1e-5)
