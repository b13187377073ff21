"""Pictures as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor


def make_grid(tensor: Tensor, nrow: int = 8, padding: int = 2, normalize: bool = False, **_: Any) -> Tensor:
    """Returns pictures of shape [number, channels, height, width] in rows of one picture."""
    values = tensor.detach().float().cpu()
    if values.shape[1] == 1:
        values = values.expand(-1, 3, -1, -1)
    if normalize:
        low, high = values.min(), values.max()
        values = (values - low) / (high - low).clamp_min(1e-5)
    columns = min(nrow, len(values))
    rows = -(-len(values) // columns)
    height, width = values.shape[2] + padding, values.shape[3] + padding
    grid = values.new_zeros(3, rows * height + padding, columns * width + padding)
    for place, picture in enumerate(values):
        top, left = place // columns * height + padding, place % columns * width + padding
        grid[:, top : top + picture.shape[1], left : left + picture.shape[2]] = picture
    return grid


def save_image(tensor: Tensor, fp: str | Path, nrow: int = 8, normalize: bool = False, **options: Any) -> None:
    """Writes pictures into one file."""
    values = make_grid(tensor, nrow, normalize=normalize, **options).mul(255).add(0.5).clamp(0, 255)
    Image.fromarray(values.permute(1, 2, 0).byte().numpy()).save(fp)
