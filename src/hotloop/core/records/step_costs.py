"""The costs of one training step: operators with shapes, FLOPs and bytes, and the memory by purpose; without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from hotloop.errors import HotloopError

Kind = Literal[
    "linear",
    "batched_product",
    "convolution",
    "attention",
    "elementwise",
    "reduction",
    "normalization",
    "softmax",
    "gather",
    "copy",
    "recurrent",
    "random",
    "update",
    "view",
    "other",
]
StepPhase = Literal["forward", "backward", "update"]


class _Record:
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < 0:
                raise HotloopError(f"a cost with {name} {value}", expected="0 or more")


@dataclass(frozen=True)
class _StoredRecord:
    """A record with a form in JSON; messages name it by `what`."""

    what: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Reads the result of `to_dict`, also after JSON; raises HotloopError for the first wrong field."""
        from pydantic import TypeAdapter, ValidationError  # slow to import

        try:
            return TypeAdapter(cls).validate_python(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the record"
            raise HotloopError(f"{where} of {cls.what}: {first['msg']}", expected="a record of to_dict()") from None


@dataclass(frozen=True)
class OperatorCost(_Record):
    """One call of an operator, and the number of equal calls in the step.

    FLOPs, bytes and launches are those of one call. Multiply by `count` for the step.

    Attributes:
        name: `aten.addmm`.
        kind: the class of operators with a common rate. A `view` computes nothing: it costs the host's dispatch alone.
        phase: `forward`, `backward` or `update`.
        flops: a multiplication with an addition counts as two.
        read_bytes, written_bytes: each tensor is read once and written once.
        shape: of products (batch, m, n, k), where `linear` has batch 1; of attention (batch * heads, queries, keys,
            width); of convolutions (n, c_in, h, w, c_out, kh, kw, stride, groups) with the input's h and w, and with
            the products of depth and height as h and kh in three dimensions; of recurrent layers (steps, rows, inputs,
            hidden); of normalization, softmax and reductions (rows, columns), where columns are reduced; of other
            operators (elements,), the elements written.
        dtype: of the arithmetic, such as `float32`.
        launches: kernels that a GPU launches.
        count: equal calls.
        tensors: the tensors that the operator reads and writes; a fused update has one or more for each parameter.
        gradients: of a backward of a product or convolution, how many of the products for input and weight it has.
    """

    name: str
    kind: Kind
    phase: StepPhase
    flops: int
    read_bytes: int
    written_bytes: int
    shape: tuple[int, ...]
    dtype: str = "float32"
    launches: int = 1
    count: int = 1
    tensors: int = 1
    gradients: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("kind", Kind), ("phase", StepPhase)):
            if getattr(self, name) not in get_args(allowed):
                raise HotloopError(
                    f"an operator with {name} {getattr(self, name)!r}",
                    expected="one of " + ", ".join(get_args(allowed)),
                )

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True)
class StepCosts(_StoredRecord, _Record):
    """One training step of a batch: forward, backward and update.

    Attributes:
        operators: in the order of their first call.
        batch_size: rows of the batch.
        parameters: elements of all parameters, shared ones once.
        parameter_bytes, buffer_bytes: of the model.
        gradient_bytes: of the trainable parameters' gradients.
        optimizer_bytes: of the optimizer's state after the first update.
        input_bytes: of the batch on the device.
        activation_peak_bytes: the most that a step adds to parameters, buffers, gradients, optimizer state and batch:
            saved activations, temporaries and workspace.
        peak_bytes: the most bytes of tensors on the device at one time, in the order of execution.
        forward_peak_bytes, backward_peak_bytes, update_peak_bytes: `peak_bytes` of each phase.
        saved_bytes: of tensors that the forward pass keeps for the backward pass.
        largest_bytes: of one tensor that the step allocates.
        module_calls: calls of modules in the forward pass.
        autograd_nodes: nodes of the backward graph.
        parameter_tensors: trainable ones.
        notes: what was estimated or left out, a line each.
    """

    what = "a step's costs"

    operators: tuple[OperatorCost, ...]
    batch_size: int
    parameters: int
    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    input_bytes: int
    activation_peak_bytes: int
    peak_bytes: int
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    update_peak_bytes: int = 0
    saved_bytes: int = 0
    largest_bytes: int = 0
    module_calls: int = 0
    autograd_nodes: int = 0
    parameter_tensors: int = 0
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        return sum(one.flops * one.count for one in self.operators)

    @property
    def bytes(self) -> int:
        """Bytes read and written by all operators."""
        return sum(one.bytes * one.count for one in self.operators)

    @property
    def launches(self) -> int:
        return sum(one.launches * one.count for one in self.operators)

    def in_phase(self, phase: StepPhase) -> Iterator[OperatorCost]:
        return (one for one in self.operators if one.phase == phase)


Points = tuple[tuple[tuple[float, ...], float], ...]


@dataclass(frozen=True)
class CpuRates(_StoredRecord):
    """What small probes take on a CPU.

    Attributes:
        products: by operator and phase, such as `aten.mm/backward`: ((shape as in `OperatorCost`), FLOP/s) a probe.
        traffic: by operator, such as `aten.relu`: ((bytes read and written), seconds) a probe.
        overhead_s: seconds of the host: `view`, a view in the forward pass; `node`, in the backward pass; `module`, a
            module's call; `parameter`, of an update, beside its operators; `optimizer`, an update beside its parameters;
            `engine`, a backward pass beside its nodes.
        fault_s: seconds per byte of new memory, which the system zeroes.
        cold_s: seconds per byte that a tensor takes longer to read and write from main memory than from a cache.
        cache_bytes: of the last-level cache.
        threads: of one operation.
    """

    what = "a CPU's rates"

    products: dict[str, Points]
    traffic: dict[str, Points]
    overhead_s: dict[str, float]
    fault_s: float
    cold_s: float
    cache_bytes: int
    threads: int = 1
