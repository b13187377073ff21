"""A generative adversarial network (DCGAN): two optimizers, which one step updates in turn.

Run it:

    hotloop train examples/gan.py --run runs/gan
    hotloop predict runs/gan codes.npy --out images.npy     codes: float32 (n, 16), normally distributed
    hotloop export runs/gan --to generator.pt2 --inputs codes.npy
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hotloop

CODE = 16


class Pair(nn.Module):
    """Both networks; their parameters' names begin with `generator.` and `critic.`."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(CODE, 32 * 7 * 7, bias=False),
            nn.Unflatten(1, (32, 7, 7)),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 1),
        )


def likely(logits: Tensor, answer: float) -> Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, answer))


def step(model: Any, images: Tensor) -> Iterator[Any]:
    """Each `yield` updates the optimizer of that name; what follows is computed with the new weights."""
    made = model.generator(torch.randn(len(images), CODE, device=images.device))
    real, fake = model.critic(images), model.critic(made.detach())
    yield "critic", likely(real, 1) + likely(fake, 0), {"real": real.sigmoid().mean(), "fake": fake.sigmoid().mean()}
    yield "generator", likely(model.critic(made), 1)


def optimizers(parameters: Any) -> dict[str, torch.optim.Optimizer]:
    def adam(part: str) -> torch.optim.Optimizer:
        own = parameters.where(lambda name, value: name.startswith(f"{part}."))
        return torch.optim.Adam(own, lr=1e-3, betas=(0.5, 0.999))

    return {"critic": adam("critic"), "generator": adam("generator")}


def task() -> hotloop.Task:
    digits = hotloop.data.digits()
    return hotloop.Task(
        model=Pair,
        step=step,
        optimizer=optimizers,
        # No labels: a batch is just the images, (batch, 1, 28, 28) in -1..1.
        data=digits.train[0][:, None].float() / 127.5 - 1,
        batch_size=64,
        epochs=20,
        predict=lambda model, codes: model.generator(codes),
    )
