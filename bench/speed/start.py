"""What all peers have in common at each step: the weights that they start from, and the batches in their order.

The files are laid down once, as hotloop draws its Task's order, and are read with NumPy alone. So another loss after as many
steps is another result, but for networks with dropout, whose masks each library draws by itself.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.speed.workloads import HOME, Workload

EPOCHS = 200
"""Whose orders are laid down."""


def orders_file(samples: int, home: Path) -> Path:
    return home / "orders" / f"{samples}.npy"


def weights_file(name: str, home: Path) -> Path:
    return home / "weights" / f"{name}.npz"


def lay_down_start(workload: Workload, samples: int, home: Path = HOME) -> None:
    """Writes the orders of the epochs, and the first weights of networks that have a spelling without torch."""
    from bench.speed.models import build  # brings torch
    from hotloop.data.order import Order

    if not (path := orders_file(samples, home)).is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        order = Order(samples, 1, seed=0)
        orders = np.stack([order.epoch(epoch).numpy() for epoch in range(EPOCHS)])
        np.save(path, orders.astype(np.uint16 if samples < 2**16 else np.uint32))
    if workload.grey and not (path := weights_file(workload.name, home)).is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, *(value.detach().numpy() for value in build(workload.name).parameters()))


def epoch_order(samples: int, epoch: int, home: Path = HOME) -> np.ndarray:
    """Returns the positions of the samples in an epoch: int64 (samples,)."""
    if epoch >= EPOCHS:
        raise IndexError(f"the order of epoch {epoch + 1} isn't laid down, but that of {EPOCHS} epochs: train fewer")
    return np.load(orders_file(samples, home), mmap_mode="r")[epoch].astype(np.int64)


def channels_last_weights(name: str, home: Path = HOME) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns kernel and bias of each layer as JAX and Keras have them: (kh, kw, in, out), and (in, out).

    The first dense layer behind convolutions gets its inputs in the order height, width, channels.
    """
    with np.load(weights_file(name, home)) as stored:
        values = [stored[key] for key in stored.files]
    found: list[tuple[np.ndarray, np.ndarray]] = []
    channels = 0
    for kernel, bias in zip(values[::2], values[1::2], strict=True):
        if kernel.ndim == 4:
            channels = len(kernel)
            found.append((kernel.transpose(2, 3, 1, 0), bias))
            continue
        if channels:  # from channels, places to places, channels
            kernel = kernel.reshape(len(kernel), channels, -1).swapaxes(1, 2).reshape(len(kernel), -1)
            channels = 0
        found.append((kernel.T, bias))
    return [(np.ascontiguousarray(kernel), bias) for kernel, bias in found]
