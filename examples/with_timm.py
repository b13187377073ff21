"""A model of timm, untrained, so that nothing is downloaded.

Run it:

    pip install timm
    hotloop train examples/with_timm.py
    hotloop train examples/with_timm.py -p name=vit_tiny_patch16_224

Any model that `timm.list_models()` names will do. `pretrained=True` in `create_model` starts from trained weights.
"""

import timm
import torch
from torch import Tensor, nn

import hotloop


def stripes(count: int = 320, size: int = 32) -> tuple[Tensor, Tensor]:
    """Noisy pictures (count, 3, size, size) of stripes that lie (0), stand (1), rise (2) or fall (3)."""
    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 4
    row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    phase = torch.stack([row, column, row + column, row - column])[labels].float()
    shift = 6.3 * torch.rand(count, 1, 1, generator=draws)
    pictures = torch.sin(phase + shift).unsqueeze(1) + 0.5 * torch.randn(count, 3, size, size, generator=draws)
    return pictures, labels


def task(name: str = "resnet10t") -> hotloop.Task:
    """`name` is one of timm's models."""
    size = 224 if name.endswith("_224") else 32
    return hotloop.Task(
        model=lambda: timm.create_model(name, num_classes=4),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=stripes(size=size),
        validation=0.2,
        epochs=3,
        classes=["lying", "standing", "rising", "falling"],
    )
