"""How several chips share a step: the share of each, its memory, and the time of collectives that isn't hidden."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from hotloop.advisor.chips import Chip
from hotloop.advisor.rates import Coefficients
from hotloop.core.records.step_costs import OperatorCost, StepCosts
from hotloop.errors import HotloopError

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
        seconds += 2 * size * (gpus - 1) / gpus / link_bytes_per_s(chip, coefficients)
    if gpus > within:
        nodes = gpus / within
        groups = min(stride, network.gpus_per_node)
        between = 2 * size * (nodes - 1) / nodes * groups / (network.node_bytes_per_s * facts["node_efficiency"])
        seconds = max(seconds, between) + facts["node_latency_s"] * (nodes - 1) ** 0.5
    return seconds


def link_bytes_per_s(chip: Chip, coefficients: Coefficients) -> float:
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
    return size / link_bytes_per_s(chip, coefficients) + coefficients.communication["latency_s"] / 2


Way = Literal["none", "data", "sharded", "tensor", "stages"]

WAYS = ("none", "data", "sharded", "tensor", "stages")

BUCKET_BYTES = 25 * 2**20
"""Gradients that DistributedDataParallel sums at once."""


@dataclass(frozen=True)
class Split:
    """How chips share a step: `tensor` x `data` x `stages` chips; those of one tensor group are neighbours.

    Attributes:
        tensor: chips that share each linear layer.
        data: copies of the network, each with a part of the batch.
        stages: chips in a row, each with a part of the layers.
        is_sharded: whether parameters, gradients and optimizer state are divided over `data`.
        pieces: microbatches that each copy computes in turn before the update.
    """

    tensor: int = 1
    data: int = 1
    stages: int = 1
    is_sharded: bool = False
    pieces: int = 1

    @classmethod
    def of(cls, way: Way, gpus: int, pieces: int | None) -> Self:
        """Returns the split of one way alone; a pipeline has four pieces per chip by default."""
        if way not in WAYS:
            raise HotloopError(f"parallel {way!r}", expected="one of " + ", ".join(WAYS))
        if way in ("data", "sharded"):
            return cls(data=gpus, is_sharded=way == "sharded", pieces=pieces or 1)
        if way == "stages":
            return cls(stages=gpus, pieces=pieces or 4 * gpus)
        return cls(tensor=gpus if way == "tensor" else 1, pieces=pieces or 1)

    @property
    def gpus(self) -> int:
        return self.tensor * self.data * self.stages

    @property
    def rounds(self) -> int:
        """Pieces that a chip computes or waits for: the first stage's pieces, and the bubble."""
        return self.pieces + self.stages - 1


def share_of(costs: StepCosts, split: Split) -> StepCosts:
    """Returns the costs of one round of one chip: a piece of the batch, with its part of the update."""
    if split == Split():
        return costs
    piece = at_batch(costs, costs.batch_size / (split.data * split.pieces))
    operators = (_sharded(one, split.tensor) if split.tensor > 1 else one for one in piece.operators)
    parts = split.stages * split.rounds * (split.data if split.is_sharded else 1)
    shares = tuple(_divided(one, parts) if one.phase == "update" else _of_stage(one, split.stages) for one in operators)
    return replace(piece, operators=shares, module_calls=costs.module_calls // split.stages)


def at_batch(costs: StepCosts, batch_size: float) -> StepCosts:
    """Returns the costs of a batch of another size: activations scale with it, weights and the update don't."""
    ratio = batch_size / max(1, costs.batch_size)
    if ratio == 1:
        return costs
    weights = weight_gradients(costs)
    operators = tuple(one if one.phase == "update" else _scaled(one, ratio, one in weights) for one in costs.operators)
    activations = round(costs.activation_peak_bytes * ratio)
    return replace(
        costs,
        operators=operators,
        batch_size=max(1, round(batch_size)),
        input_bytes=round(costs.input_bytes * ratio),
        activation_peak_bytes=activations,
        saved_bytes=round(costs.saved_bytes * ratio),
        peak_bytes=max(
            costs.peak_bytes + round((costs.activation_peak_bytes + costs.input_bytes) * (ratio - 1)),
            costs.parameter_bytes,
        ),
    )


def weight_gradients(costs: StepCosts) -> set[OperatorCost]:
    """Returns the backward products whose inner dimension is the batch, by comparison with the forward products."""
    linear = [one for one in costs.operators if one.kind == "linear" and len(one.shape) == 4]
    forward = {one.shape[1:] for one in linear if one.phase == "forward"}
    found = set()
    for one in linear:
        m, n, k = one.shape[1:]
        if one.phase == "backward" and ({(k, m, n), (k, n, m)} & forward) and (m, k, n) not in forward:
            found.add(one)
    return found


def _scaled(operator: OperatorCost, ratio: float, is_weight_gradient: bool) -> OperatorCost:
    """Returns an operator of a batch `ratio` times as large."""
    constant = _weight_bytes(operator, is_weight_gradient)
    moved = max(0, operator.bytes - constant) * ratio + min(constant, operator.bytes)
    share = moved / operator.bytes if operator.bytes else 1.0
    shape = operator.shape
    if shape:
        index = 0
        if operator.kind == "linear" and len(shape) == 4:
            index = 3 if is_weight_gradient else 1
        shape = (*shape[:index], max(1, round(shape[index] * ratio)), *shape[index + 1 :])
    return replace(
        operator,
        flops=round(operator.flops * ratio),
        read_bytes=round(operator.read_bytes * share),
        written_bytes=round(operator.written_bytes * share),
        shape=shape,
    )


def _weight_bytes(operator: OperatorCost, is_weight_gradient: bool = False) -> int:
    shape, width = operator.shape, 2 if "16" in operator.dtype else 4
    if operator.kind == "linear" and len(shape) == 4:
        _, m, n, k = shape
        return width * (m * n if is_weight_gradient else n * k)
    if operator.kind == "convolution" and len(shape) >= 9:
        return width * shape[1] * shape[4] * shape[5] * shape[6] // max(1, shape[8])
    return 0


def _divided(operator: OperatorCost, parts: int) -> OperatorCost:
    """Returns an operator with a part of the calls; fewer calls than one are a smaller call."""
    if operator.count >= parts:
        return replace(operator, count=round(operator.count / parts))
    scale = operator.count / parts
    return replace(
        operator,
        count=1,
        flops=round(operator.flops * scale),
        read_bytes=round(operator.read_bytes * scale),
        written_bytes=round(operator.written_bytes * scale),
    )


def _of_stage(operator: OperatorCost, stages: int) -> OperatorCost:
    """Returns the calls in one stage; an operator with fewer calls than stages is in one stage, which all others wait for."""
    return replace(operator, count=round(operator.count / stages)) if operator.count >= stages else operator


def _sharded(operator: OperatorCost, gpus: int) -> OperatorCost:
    """Returns one chip's part of an operator whose linear layers are split: normalization stays whole."""
    if operator.kind == "normalization":
        return operator
    shape = operator.shape
    if operator.kind == "linear" and len(shape) == 4:
        shape = (shape[0], shape[1], max(1, shape[2] // gpus), shape[3])
    elif shape:
        shape = (max(1, shape[0] // gpus), *shape[1:])
    return replace(
        operator,
        flops=operator.flops // gpus,
        read_bytes=operator.read_bytes // gpus,
        written_bytes=operator.written_bytes // gpus,
        shape=shape,
    )


def communication_s(
    costs: StepCosts,
    split: Split,
    chip: Chip,
    coefficients: Coefficients,
    network: Interconnect | None,
    round_s: float,
    precision: str,
) -> float:
    """Returns seconds of communication in a step that computation doesn't hide.

    Args:
        costs: of the whole step.
        round_s: seconds of a chip's computation in one round.
    """
    width = 2 if precision in ("fp16", "bf16") else 4
    seconds = 0.0
    own = split.tensor * split.stages
    if split.data > 1 and split.is_sharded:
        each = gather_s(costs.parameter_bytes / own, split.data, chip, coefficients, network, split.tensor)
        moving, computing = 3 * each * split.pieces, round_s * split.rounds
        hidden = min(moving, computing)
        seconds += moving - hidden + coefficients.communication["unhidden"] * hidden
    elif split.data > 1:
        size = costs.gradient_bytes / own
        total, last = (
            all_reduce_s(one, split.data, chip, coefficients, network, split.tensor)
            for one in (size, min(BUCKET_BYTES, size))
        )
        seconds += last + max(0.0, total - last - coefficients.communication["overlap"] * 0.6 * round_s)
    outputs = [
        one for one in costs.operators if one.kind == "linear" and one.phase == "forward" and len(one.shape) == 4
    ]
    sizes = [(one.count, one.shape[1] * min(one.shape[2], one.shape[3])) for one in outputs]
    piece = width / (split.data * split.pieces)
    if split.tensor > 1 and sizes:
        count = sum(count for count, _ in sizes)
        mean = sum(count * size for count, size in sizes) / count
        each = all_reduce_s(mean * piece, split.tensor, chip, coefficients, network)
        seconds += split.rounds * count / split.stages * each
    if split.stages > 1:
        largest = max((size for _, size in sizes), default=0)
        seconds += 2 * (split.rounds - 1) * send_s(largest * piece, chip, coefficients)
    return seconds


def memory_of(costs: StepCosts, split: Split, width: float) -> int:
    """Returns the peak bytes of tensors on each chip; activations have `width` times their bytes in the record."""
    fixed: float = costs.parameter_bytes + costs.gradient_bytes + costs.optimizer_bytes
    activations: float = max(
        costs.activation_peak_bytes, costs.peak_bytes - fixed - costs.buffer_bytes - costs.input_bytes
    )
    fixed += (1 - width) * costs.parameter_bytes  # weights cast to the precision of products
    own = split.tensor * split.stages
    state = fixed / own / (split.data if split.is_sharded else 1)
    if split.data > 1:
        largest = max((_weight_bytes(one) for one in costs.operators if one.phase == "forward"), default=0)
        state += 2 * largest / split.tensor if split.is_sharded else costs.gradient_bytes / own
    moving = (costs.input_bytes + activations * width) / (split.data * own)
    moving *= min(1.0, split.stages / split.pieces)
    moving *= (1.3 if split.tensor > 1 else 1.0) * (1.2 if split.stages > 1 else 1.0)
    return round(state + costs.buffer_bytes + moving)
