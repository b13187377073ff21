"""Models and targets that can't be trained as given: one line that says what to do, or it works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import hotloop
from hotloop.errors import DataError, NonFiniteError, PlanError, TaskError
from hotloop.plan import Plan
from tests.support.programs import a_task, advance, state_after, trained

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)
LATE = torch.arange(24)[:, None] >= 10
"""Of batches of 5, the first two have no target that counts."""


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(6, 3)


def partly_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3, device="meta"))


def buffer_on_meta() -> nn.Module:
    model = nn.Linear(6, 3)
    model.register_buffer("angles", torch.empty(3, device="meta"), persistent=False)
    return model


@pytest.mark.parametrize(
    ("model", "name"),
    [(on_meta, "weight"), (on_meta(), "weight"), (partly_on_meta, "1.weight"), (buffer_on_meta, "angles")],
    ids=["factory", "module", "part", "buffer"],
)
def test_a_model_on_the_meta_device_is_refused_in_a_line(model: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=rf"'{name}' is on the meta device.*to_empty\(device='cpu'\)") as caught:
        trained(a_task(model=model), tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_missing_targets_have_a_way_out_that_works(tmp_path: Path) -> None:
    missing = torch.where(LATE, Y, torch.nan)
    given = dict(model=lambda: nn.Linear(6, 1), loss=nn.MSELoss(), shuffle=False)
    with pytest.raises(DataError, match=r"nan_to_num.*mask next to it, as data=\(x, y, mask\), for a step"):
        trained(a_task(**given, data=(X, missing)), tmp_path / "refused")

    def step(model: Any, batch: Any) -> Tensor:
        x, y, mask = batch
        return ((model(x) - y).square() * mask).sum() / mask.sum().clamp(min=1)

    given |= dict(loss=None, step=step, weight=lambda batch: batch[2].sum(), data=(X, missing.nan_to_num(), LATE))
    run = trained(a_task(**given), tmp_path / "run")
    state = state_after(a_task(**given), 0)
    first = (X @ state.parameters["weight"].T + state.parameters["bias"] - Y).square()[LATE].mean()
    assert run.epochs[0]["train_loss"] == pytest.approx(float(first), rel=0.5)


EMPTY: dict[str, tuple[Callable[[Any, Any], Tensor], str]] = {
    "ignored": (
        lambda model, batch: F.cross_entropy(model(batch[0]), torch.where(batch[2], 1, -100).flatten()),
        "a cross entropy of which all targets are ignored",
    ),
    "another index": (
        lambda model, batch: F.nll_loss(model(batch[0]).log_softmax(1), batch[2].long().flatten(), ignore_index=0),
        "a cross entropy of which all targets are ignored",
    ),
    "picked": (
        lambda model, batch: F.mse_loss(model(batch[0])[batch[2]], batch[1][batch[2]]),
        "a mean over no element",
    ),
    "a part of it": (
        lambda model, batch: model(batch[0]).square().mean() + model(batch[0])[batch[2][:, 0]].mean(),
        "a mean over no element",
    ),
    "masked": (
        lambda model, batch: (model(batch[0]) * batch[2]).sum() / batch[2].sum(),
        "a division by a sum that is 0",
    ),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_batch_whose_targets_are_all_left_out_is_named(name: str, tmp_path: Path) -> None:
    step, said = EMPTY[name]
    classes = 1 if name in ("picked", "masked") else 3
    task = a_task(model=lambda: nn.Linear(6, classes), step=step, data=(X, Y, LATE), shuffle=False)
    with pytest.raises(
        NonFiniteError, match=rf"step 1 .*the loss became NaN: it has {said}.*weight\(batch\)"
    ) as caught:
        trained(task, tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_so_it_is_in_validation(tmp_path: Path) -> None:
    def step(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0])[batch[2]], batch[1][batch[2]])

    everything, nothing = torch.ones(24, 1, dtype=torch.bool), torch.zeros(24, 1, dtype=torch.bool)
    task = a_task(model=lambda: nn.Linear(6, 1), step=step, data=(X, Y, everything), validation=(X, Y, nothing))
    with pytest.raises(NonFiniteError, match=r"validation loss is NaN .*it has a mean over no element, in a batch"):
        trained(task, tmp_path / "run")


def test_another_nan_is_not_blamed_on_that(tmp_path: Path) -> None:
    task = a_task(step=lambda model, batch: (model(batch[0]).square().mean() * 0 - 1).log())
    with pytest.raises(NonFiniteError, match=r"the loss itself became NaN.*Look for a log"):
        trained(task, tmp_path / "run")


# --- modules with a tensor that is computed before each forward


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    prune.random_unstructured(model[0], "weight", 0.3)
    return model


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 3))


class Cached(nn.Linear):
    """Has its last output, with the graph that computed it, in a list."""

    def forward(self, x: Tensor) -> Tensor:
        self.cache = [super().forward(x)]
        return self.cache[0]


@pytest.mark.parametrize("model", [normed, pruned, lambda: Cached(6, 3)], ids=["weight_norm", "pruned", "cached"])
def test_pieces_of_a_batch_train_a_model_with_a_computed_weight(model: Callable[[], nn.Module]) -> None:
    task = a_task(model=model, batch_size=6)
    whole = state_after(task, 6)
    program = hotloop.lower(task, Plan(accumulation=3))
    advance(program, 6)
    for name, value in program.state().parameters.items():
        torch.testing.assert_close(value, whole.parameters[name], rtol=1e-5, atol=1e-6)
    program.close()


@pytest.mark.parametrize("model", [normed, pruned])
def test_such_a_model_may_be_given_itself(model: Callable[[], nn.Module]) -> None:
    given = model()
    before = [value.detach().clone() for value in given.parameters()]
    state_after(a_task(model=given), 3)
    assert all(map(torch.equal, before, given.parameters()))


def test_what_cant_be_copied_is_not_blamed_on_float64() -> None:
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no copies")

    with pytest.raises(
        PlanError, match=r"accumulation=2 can't be checked: the model can't be copied: .*no copies"
    ) as caught:
        hotloop.lower(a_task(model=lambda: Locked(6, 3)), Plan(accumulation=2))
    assert "float64" not in str(caught.value)
