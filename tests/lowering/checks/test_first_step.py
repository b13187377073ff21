"""What a look at the model before training finds wrong is said by the first step, which knows where; and nothing else is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.errors import HotloopError
from tests.support.programs import a_task, labelled


class Stateful(nn.Module):
    """Adds to each batch a state of its size, so that it takes no other one."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("before", torch.zeros(samples, 3))
        self.register_buffer("looks", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.looks += 1
        return self.linear(x) + self.before  # type: ignore[no-any-return]


def test_a_model_that_takes_batches_of_one_size_trains_on_those() -> None:
    x, y = labelled()
    run = hotloop.lower(a_task(model=lambda: Stateful(8), data=(x[:24], y[:24]), batch_size=8), hotloop.Plan())
    assert float(run.state().buffers["looks"]) == 0
    assert run.advance(3).steps == 3


@pytest.mark.parametrize(
    ("model", "dtype", "says"),
    [
        (
            lambda: nn.Sequential(nn.Linear(6, 3)),
            torch.uint8,
            r"step 1 .* dtypes that don't go together in '0' \(Linear\)",
        ),
        (lambda: nn.Sequential(nn.Linear(7, 3)), torch.float32, r"step 1 .* cannot be multiplied.*, in '0' \(Linear\)"),
    ],
)
def test_what_does_not_fit_is_named_with_its_module(model, dtype, says, tmp_path) -> None:
    x, y = labelled()
    with pytest.raises(HotloopError, match=says):
        hotloop.fit(a_task(model=model, data=(x.to(dtype), y)), run=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
