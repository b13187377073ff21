"""Reasons why the batches of a data set are fetched by the script's own process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch import Tensor, distributed
from torch.utils.data import Dataset

from hotloop.data.batch_difference import batch_leaves, raw_bytes
from hotloop.data.dataset_changes import names_in_sample_code
from hotloop.exchanges.dataset_watch import DatasetWatch
from hotloop.exchanges.sample_table import SIDE_EFFECTS

_PROCESS_NAMES = frozenset(
    ("get_worker_info", "initial_seed", "get_rng_state", "getstate", "get_state", "current_process")
)
"""Names of functions whose result is another in a worker."""

_WORKER_BYTES = 128 << 20
"""Free memory that a worker needs: a fork shares most of its memory with the script's process."""

_SHARED_MEMORY = "/dev/shm"


def why_unfit_process() -> str:
    """Returns why this process can't have workers; empty if it can."""
    if sys.platform != "linux":
        return "the workers are forks that end with the script, which only Linux allows here"
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "several ranks share this machine's cores"
    return ""


def why_unfit_data(dataset: Dataset, watch: DatasetWatch) -> str:
    """Returns why a data set can't be read in another process; empty if it can, as far as its code and objects show.

    Args:
        watch: the data set's objects.
    """
    if watch.unfit:
        return watch.unfit
    if found := sorted((SIDE_EFFECTS | _PROCESS_NAMES) & names_in_sample_code(dataset)):
        return f"its code uses {found[0]}, so it may do more than return a sample"
    return ""


def why_short_of_memory(workers: int, batch_bytes: int) -> str:
    """Returns why there is too little memory for workers with two batches each; empty if there is enough."""
    ahead_bytes = 2 * (2 * workers + 1) * batch_bytes
    if ahead_bytes + workers * _WORKER_BYTES > psutil.virtual_memory().available:
        return "its workers need more memory than is free"
    if ahead_bytes > shutil.disk_usage(_SHARED_MEMORY).free:
        return f"its workers need {ahead_bytes / 1e6:,.0f} MB of shared memory, more than is free in {_SHARED_MEMORY}"
    return ""


def why_unfit_batch(batch: Any) -> str:
    """Returns why a batch can't come from another process with equal bits; empty if it can."""
    if not _has_plain_containers(batch):
        return "its batches have containers that are neither tuple, list nor dict"
    places = set[int]()
    for _, leaf in batch_leaves(batch):
        if isinstance(leaf, Tensor):
            is_plain = type(leaf) is Tensor and leaf.layout == torch.strided and leaf.device.type == "cpu"
            if not is_plain or leaf.requires_grad or leaf.is_quantized or leaf.is_conj() or leaf.is_neg():
                return "its batches have tensors that are no plain tensors on the CPU"
            if leaf.numel() and leaf.data_ptr() in places:
                return "its batches have a tensor twice"
            places.add(leaf.data_ptr())
        elif type(leaf) not in (str, bytes, int, float, bool, type(None)):
            return f"its batches have a {type(leaf).__name__}"
    return ""


def difference(one: Any, other: Any) -> str:
    """Returns where two fit batches differ in form, strides or bits; empty if they are equal."""
    mine, others = list(batch_leaves(one)), list(batch_leaves(other))
    if _form(one) != _form(other) or [path for path, _ in mine] != [path for path, _ in others]:
        return "they have other containers"
    for (path, a), (_, b) in zip(mine, others, strict=True):
        if type(a) is not type(b):
            return f"{path} has another type"
        if not isinstance(a, Tensor):
            if repr(a) != repr(b):
                return f"{path} has another value"
        elif (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
            return f"{path} has another dtype, shape or strides"
        elif not raw_bytes(a).equal(raw_bytes(b)):
            return f"{path} holds other values"
    return ""


def _has_plain_containers(tree: Any) -> bool:
    if type(tree) is dict:
        return all(type(key) in (str, int) for key in tree) and all(map(_has_plain_containers, tree.values()))
    if type(tree) in (list, tuple):
        return all(map(_has_plain_containers, tree))
    return not isinstance(tree, Mapping | list | tuple)


def _form(tree: Any) -> Any:
    if isinstance(tree, dict):
        return dict, [(key, _form(item)) for key, item in tree.items()]
    return (type(tree), [_form(item) for item in tree]) if isinstance(tree, list | tuple) else None
