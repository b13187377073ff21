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
    size: float, gpus: int, chip: Chip, coefficients: Coefficients, network: Interconnect | None = None
) -> float:
    """Returns seconds of summing a tensor of `size` bytes over `gpus` GPUs.

    A ring moves 2 (n - 1) / n of the bytes through each link; its latency grows with the number of GPUs.
    """
    if gpus <= 1 or size <= 0:
        return 0.0
    network = network or Interconnect()
    facts = coefficients.communication
    within = min(gpus, network.gpus_per_node)
    traffic = 2 * size * (gpus - 1) / gpus
    seconds = traffic / link_bytes_per_s(chip, within, coefficients) + facts["latency_s"] + facts["hop_s"] * within
    if gpus > within:
        nodes = gpus / within
        between = 2 * size * (nodes - 1) / nodes / (network.node_bytes_per_s * facts["node_efficiency"])
        seconds = max(seconds, between) + facts["node_latency_s"] * (nodes - 1) ** 0.5
    return seconds


def link_bytes_per_s(chip: Chip, gpus: int, coefficients: Coefficients) -> float:
    """Returns the bytes/s that a ring of GPUs of one node reaches on each link."""
    facts = coefficients.communication
    if chip.link_bytes_per_s:
        return chip.link_bytes_per_s * facts["link_efficiency"]
    return (chip.pcie_bytes_per_s or DEFAULT_PCIE_BYTES_PER_S) * facts["pcie_efficiency"]


def gather_s(
    size: float, gpus: int, chip: Chip, coefficients: Coefficients, network: Interconnect | None = None
) -> float:
    """Returns seconds of gathering, or of reducing and scattering, `size` bytes in all: half of an all-reduce."""
    return all_reduce_s(size, gpus, chip, coefficients, network) / 2


def send_s(size: float, chip: Chip, coefficients: Coefficients) -> float:
    """Returns seconds of sending `size` bytes from one GPU to the next."""
    return size / link_bytes_per_s(chip, 2, coefficients) + coefficients.communication["latency_s"] / 2
