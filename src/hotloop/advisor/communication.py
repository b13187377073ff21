"""Seconds of collective operations by size, link and number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from hotloop.advisor.chips import Chip
from hotloop.advisor.coefficients import Coefficients

GPUS_PER_NODE = 8

DEFAULT_PCIE_BYTES_PER_S = 15.75e9
"""PCIe 3.0 x16 in one direction, for a chip whose link isn't known."""


@dataclass(frozen=True)
class Interconnect:
    """Links between GPUs.

    Attributes:
        gpus_per_node: GPUs that the chip's own links connect.
        node_bytes_per_s: bytes/s of a node to other nodes in one direction, all adapters together.
    """

    gpus_per_node: int = GPUS_PER_NODE
    node_bytes_per_s: float = 100e9


def all_reduce_s(
    size: float,
    gpus: int,
    chip: Chip,
    coefficients: Coefficients,
    network: Interconnect | None = None,
    stride: int = 1,
) -> float:
    """Returns seconds of summing a tensor of `size` bytes over `gpus` GPUs.

    A ring moves 2 (n - 1) / n of the bytes through each link; its latency grows with the number of GPUs. Of several nodes,
    each node's adapters carry the bytes once for each of the groups that sum at the same time.

    Args:
        stride: of the group's members in the order of the GPUs: 8 for one GPU of each node of 8.
    """
    if gpus <= 1 or size <= 0:
        return 0.0
    network = network or Interconnect()
    facts = coefficients.communication
    within = min(gpus, max(1, network.gpus_per_node // stride))
    seconds = facts["latency_s"] + facts["hop_s"] * within
    if within > 1:
        seconds += 2 * size * (gpus - 1) / gpus / link_bytes_per_s(chip, within, coefficients)
    if gpus > within:
        nodes = gpus / within
        groups = min(stride, network.gpus_per_node)
        between = 2 * size * (nodes - 1) / nodes * groups / (network.node_bytes_per_s * facts["node_efficiency"])
        seconds = max(seconds, between) + facts["node_latency_s"] * (nodes - 1) ** 0.5
    return seconds


def link_bytes_per_s(chip: Chip, gpus: int, coefficients: Coefficients) -> float:
    """Returns the bytes/s that a ring of GPUs of one node reaches on each link."""
    facts = coefficients.communication
    if chip.link_bytes_per_s:
        return chip.link_bytes_per_s * facts["link_efficiency"]
    return (chip.pcie_bytes_per_s or DEFAULT_PCIE_BYTES_PER_S) * facts["pcie_efficiency"]


def gather_s(
    size: float,
    gpus: int,
    chip: Chip,
    coefficients: Coefficients,
    network: Interconnect | None = None,
    stride: int = 1,
) -> float:
    """Returns seconds of gathering, or of reducing and scattering, `size` bytes of sharded parameters in all.

    The bytes are half of an all-reduce's; the many tensors of a network reach a share of its rate.
    """
    return (
        all_reduce_s(size, gpus, chip, coefficients, network, stride) / 2 / coefficients.communication["gather_share"]
    )


def send_s(size: float, chip: Chip, coefficients: Coefficients) -> float:
    """Returns seconds of sending `size` bytes from one GPU to the next."""
    return size / link_bytes_per_s(chip, 2, coefficients) + coefficients.communication["latency_s"] / 2
