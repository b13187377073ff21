"""A variational autoencoder: a loss of one's own in two parts, and draws inside the model.

Run it:

    hotloop train examples/vae.py
    hotloop train examples/vae.py -p beta=4
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop


class Autoencoder(nn.Module):
    """Images of 784 pixels to a few numbers, and back."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 2 * size))
        self.decoder = nn.Sequential(nn.Linear(size, 100), nn.ReLU(), nn.Linear(100, 784))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images (batch, 28, 28) -> the logits of their pixels (batch, 784), and the code's mean and log-variance."""
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        # These draws follow from the seed and the number of the step, so a resumed run makes the same ones.
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else mean
        return self.decoder(code), mean, log_variance


def task(beta: float = 1.0) -> hotloop.Task:
    """`beta` is the weight of the second part of the loss."""

    def step(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        logits, mean, log_variance = model(images)
        pixels = F.binary_cross_entropy_with_logits(logits, images.flatten(1), reduction="none").sum(1).mean()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        return {"loss": pixels + beta * divergence, "pixels": pixels, "divergence": divergence}

    digits = hotloop.data.digits()
    return hotloop.Task(
        model=Autoencoder,
        step=step,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        # No labels: a batch is just the images.
        data=digits.train[0].float() / 255,
        validation=0.1,
        batch_size=64,
        epochs=15,
        predict=lambda model, images: model(images)[0].sigmoid(),
    )
