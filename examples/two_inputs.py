"""A regression on two inputs, stopped early, with an error in plain units beside the loss.

Run it:

    hotloop train examples/two_inputs.py
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import hotloop


def measurements(count: int = 1000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Made-up houses: sizes and ages, (count, 2), a district from 0 to 4, (count,), and prices, (count, 1).

    The last array is the target, all others are inputs. NumPy's float64 becomes float32.
    """
    draws = np.random.default_rng(0)
    size, age = draws.uniform(40, 200, count), draws.uniform(0, 80, count)
    district = draws.integers(0, 5, count)
    price = 2.5 * size * (1 + 0.2 * district) - 1.5 * age + draws.normal(0, 10, count)
    return np.stack([size / 100, age / 40], axis=1), district, price[:, None]


class Prices(nn.Module):
    """One vector for each district, next to the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.district = nn.Embedding(5, 4)
        self.layers = nn.Sequential(nn.Linear(2 + 4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers: Tensor, district: Tensor) -> Tensor:
        """Prices (batch, 1), in thousands; the layers work on hundreds of them."""
        return 100 * self.layers(torch.cat([numbers, self.district(district)], dim=1))


task = hotloop.Task(
    model=Prices,
    loss=nn.MSELoss(),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
    data=measurements(),
    validation=0.2,
    batch_size=50,
    epochs=200,
    # One number per sample; a mean over the batch would do as well.
    metrics={"thousands_off": lambda output, target: (output - target).abs().flatten()},
    # Watches the monitored figure, so it steps once per epoch.
    schedule=lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=3),
    patience=10,
)
