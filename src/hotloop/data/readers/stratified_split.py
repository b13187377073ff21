"""Splits samples into training, validation and test parts by seed, with the same shares of each class."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotloop.errors import DataError

Share = float | int


def check_share(share: Any, name: str) -> None:
    """Raises DataError for a share that is neither in [0, 1) nor a number of samples."""
    valid = isinstance(share, int | float) and not isinstance(share, bool) and share >= 0
    if not valid or (isinstance(share, float) and share >= 1):
        raise DataError(
            f"{name}={share!r}",
            expected="a share from 0 to below 1, such as 0.1, or a number of samples",
            fix=f"choose another {name}",
        )


def split_by_class(labels: np.ndarray, validation: Share, test: Share, seed: int) -> list[np.ndarray]:
    """Returns sorted int64 positions of the training, validation and test samples.

    The split depends on the labels and the seed alone. The first sample of each class in the seed's random order is
    for training, so that no class is without training samples.

    Args:
        labels: class number of each sample; zeros for a regression.
        validation, test: a share of all samples, or a number of samples; 0 for none.

    Raises:
        DataError: too few samples are left for training.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise DataError(f"seed={seed!r}", expected="a whole number, 0 or more", fix="pass seed=0")
    # NumPy guarantees the numbers of RandomState for all versions.
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed))).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    _, first = np.unique(labels[order], return_index=True)
    free = np.delete(order, first)
    parts = {}
    for name, share in (("test", test), ("validation", validation)):
        check_share(share, name)
        count = round(len(labels) * share) if isinstance(share, float) else share
        if count > len(free):
            raise DataError(
                f"{name}={share!r} of {len(labels):,} samples",
                expected=f"at most {len(free):,} samples, so that each class has one for training",
                fix=f"choose a smaller {name}",
            )
        chosen = (2 * np.arange(count) + 1) * len(free) // max(1, 2 * count)
        parts[name], free = np.sort(free[chosen]), np.delete(free, chosen)
    training = np.sort(np.concatenate([free, order[first]]))
    return [training, parts["validation"], parts["test"]]
