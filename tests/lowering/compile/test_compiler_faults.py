"""Where torch's compiler makes something else of a captured graph than eager kernels do; the graph is mended before."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hotloop
from hotloop.plan import Plan
from tests.support.programs import a_task, advance


class Cached(nn.Module):
    """Attention whose keys and values are put behind those of a cache, which is empty yet."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(2, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        split = self.layer(x.unflatten(1, (3, 2))).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        q, k, v = split[0], torch.cat([torch.tensor([]), split[1]], -2), torch.cat([torch.tensor([]), split[2]], -2)
        mixed = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.head(mixed.transpose(1, 2).flatten(1))  # type: ignore[no-any-return]


def test_what_is_empty_has_a_say_in_the_dtype_of_what_is_put_together() -> None:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(model(torch.cat([torch.tensor([]), inputs.long()], 1)), targets)

    task = a_task(step=step)
    eager, compiled = (hotloop.lower(task, plan) for plan in (Plan(), Plan(compile="forward")))
    for program in (eager, compiled):
        advance(program, 2)
    assert torch.allclose(compiled.state().parameters["weight"], eager.state().parameters["weight"], atol=1e-5)


def test_a_cache_that_is_empty_yet_is_compiled() -> None:
    task = a_task(model=Cached)
    eager, compiled = (hotloop.lower(task, plan) for plan in (Plan(), Plan(compile="forward")))
    for program in (eager, compiled):
        advance(program, 3)
    assert compiled.compiled_steps == 3
    for name, value in eager.state().parameters.items():
        assert torch.allclose(compiled.state().parameters[name], value, atol=1e-5), name
