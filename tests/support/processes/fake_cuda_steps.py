"""Training steps under the plans of a GPU on the CUDA device of tests, compared with the CPU's baseline.

python -m tests.support.processes.fake_cuda_steps FOLDER

Prints a JSON object with `plans` and `faults`: by name the distance of the losses from the baseline's, or what was raised.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.fake_cuda import DEVICE, cuda_device, install

if __name__ == "__main__":
    install(Path(sys.argv[1]))

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.state import State, differing_paths
from hotloop.core.task_parts import optimizers
from hotloop.data.feeds import feed, prefetch
from hotloop.lowering import build
from hotloop.lowering.transforms import layout, placement, precision, residency
from hotloop.plan import Plan
from tests.support.programs import a_task, advance, through_file
from tests.support.tasks.batch_losses import HONEST
from tests.support.tasks.model_families import FAMILIES, family
from tests.support.tasks.parity_families import MORE_FAMILIES, another_family
from tests.support.tasks.placed_models import both
from tests.support.tasks.rank_tasks import CASES
from tests.support.tasks.state_kinds import gan, lookahead, schedule_free, thawing

STEPS = 6  # into the second epoch of most Tasks
ON = Plan(device=DEVICE)
AXES: dict[str, dict[str, Any]] = {
    "device": {},
    "residency=host": {"residency": "host"},
    "residency=device": {"residency": "device"},
    "layout=channels_last": {"layout": "channels_last"},
    "accumulation=3": {"accumulation": 3},
    **{f"precision={name}": {"precision": name} for name in ("fp32", "tf32", "bf16", "fp16")},
    **{f"optimizer={name}": {"optimizer": name} for name in ("forloop", "foreach", "fused")},
}
PLANS = {name: ON.with_axes(**axes) for name, axes in AXES.items()}
WITHOUT_PIECES = {name: plan for name, plan in PLANS.items() if plan.accumulation == 1}
FEW = {name: PLANS[name] for name in ("device", "residency=device", "precision=bf16", "optimizer=fused")}
PLACEMENTS = {
    "a part on the GPU": Plan(placement={"encoder": DEVICE, "head": DEVICE}),
    "a part on the CPU": ON.with_axes(placement={"encoder": "cpu", "blocks": "cpu"}),
}
ON_ANY_DEVICE = (
    "padded_with_a_weight",
    "layers_dropped_by_python",
    "a_loss_with_a_buffer",
    "norms_without_statistics",
    "draws_of_probabilities",
    "rows_mixed_in_the_step",
    "data_with_a_generator_of_its_own",
    "data_with_names",
    "spectral_norms",
    "a_layer_that_counts",
    "a_step_that_counts",
    "a_step_that_changes_its_batch",
)
"""The Tasks of `HONEST` whose own code makes no tensor on the CPU."""

Make = Callable[[], hotloop.Task]

TASKS: dict[str, tuple[Make, dict[str, Plan]]] = {
    **{name: (partial(family, name), PLANS) for name in FAMILIES},
    "vae": (partial(family, "vae"), WITHOUT_PIECES),  # each piece of a batch draws noise of its own
    **{f"another {name}": (partial(another_family, name), FEW) for name in MORE_FAMILIES},
    **{name: (partial(make, torch.float32), FEW) for name, make in CASES.items()},
    **{name: (HONEST[name], FEW) for name in ON_ANY_DEVICE},
    **{make.__name__: (make, FEW) for make in (gan, lookahead, schedule_free, thawing)},
    "both": (partial(both, "fp32"), {**FEW, **PLACEMENTS}),
}


# --- planted faults, at least one for each axis


def _leave_model(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(build, "move_to_device", lambda parts, device: replace(parts, device=device))


def _leave_batch(patch: pytest.MonkeyPatch) -> None:
    for module in (prefetch, feed):
        patch.setattr(module, "to_device", lambda batch, device: batch)


def _leave_data(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(residency, "_move_table", lambda parts, name, table: table)
    _leave_batch(patch)


def _lay_out_on_cpu(patch: pytest.MonkeyPatch) -> None:
    lay_out = layout.to_channels_last
    patch.setattr(layout, "to_channels_last", lambda tensor: lay_out(tensor.cpu()))


def _cast_on_cpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(precision, "autocast_context", lambda parts: torch.autocast("cpu", torch.bfloat16))


def _leave_outputs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placement.DeviceTrip, "move_outputs", lambda self, module, args, output: None)


def _restore_on_cpu(patch: pytest.MonkeyPatch) -> None:
    restore = optimizers._restore_plain

    def restored(optimizer: Any, model: nn.Module, saved: Any) -> None:
        restore(optimizer, model, saved)
        for state in optimizer.state.values():
            state.update({name: value.cpu() for name, value in state.items() if isinstance(value, Tensor)})

    patch.setattr(optimizers, "_restore_plain", restored)


class MadeOnCpu(nn.Linear):
    """Adds numbers that it makes without a device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.zeros(self.out_features)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Make, Plan]] = {
    "model": (_leave_model, partial(family, "mlp"), ON),
    "batch": (_leave_batch, partial(family, "mlp"), ON),
    "data": (_leave_data, partial(family, "mlp"), PLANS["residency=device"]),
    "layout": (_lay_out_on_cpu, partial(family, "residual"), PLANS["layout=channels_last"]),
    "autocast": (_cast_on_cpu, partial(family, "mlp"), PLANS["precision=bf16"]),
    "outputs": (_leave_outputs, partial(both, "fp32"), PLACEMENTS["a part on the GPU"]),
    "restored state": (_restore_on_cpu, partial(family, "mlp", optimizer=torch.optim.Adam), PLANS["optimizer=fused"]),
    "tensor": (lambda patch: None, partial(a_task, model=lambda: MadeOnCpu(6, 3)), ON),
}


def train_steps(task: hotloop.Task, plan: Plan) -> State:
    """Returns the State after some steps, of which the last one follows a restore from a checkpoint's bytes."""
    program = hotloop.lower(task, plan)
    try:
        advance(program, STEPS)
        state = program.state()
        program.restore(through_file(state))
        assert not differing_paths(program.state(), state), "a restored State has other bits"
        advance(program, 1)
        return program.state()
    finally:
        program.close()


def distance_of(make: Make, plan: Plan, expected: State) -> float | str:
    """Returns the largest relative difference of a sum of losses, or the error."""
    try:
        found = train_steps(make(), plan)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    assert found.sums.keys() == expected.sums.keys() and found.sums
    return max(float(abs(found.sums[name] - value) / abs(value)) for name, value in expected.sums.items())


def main() -> None:
    plans, faults = {}, {}
    with cuda_device():
        for name, (make, tried) in TASKS.items():
            expected = train_steps(make(), Plan())
            for axis, plan in tried.items():
                plans[f"{name}, {axis}"] = distance_of(make, plan, expected)
        for name, (plant, make, plan) in FAULTS.items():
            expected = train_steps(make(), Plan())
            with pytest.MonkeyPatch.context() as patch:
                plant(patch)
                faults[name] = distance_of(make, plan, expected)
    print(json.dumps({"plans": plans, "faults": faults}))


if __name__ == "__main__":
    main()
