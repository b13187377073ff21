"""A model's layers with shapes, parameters, FLOPs and memory: frozen, versioned records, readable without torch."""

from __future__ import annotations

from pydantic import Field

from hotloop.core.records.training import Record


class ModuleRow(Record):
    """One module of the model's tree.

    Numbers are of the module alone, without its submodules: the sum of a column is the model's total.

    Attributes:
        name: qualified name; empty for the model itself.
        kind: the module's class.
        depth: 0 for the model, 1 for its children.
        output: shapes of the output's tensors, of the first call; empty without a call.
        calls: number of calls in one forward pass.
        parameters: elements of parameters. A parameter that several modules share counts at the first one.
        trainable: elements of parameters that need a gradient.
        flops: FLOPs of one forward pass, in all calls.
        activations: bytes that the forward pass stores for the backward pass.
        shared_with: name of the first place of a module that the tree has several times; else empty.
        notes: such as `not called`.
    """

    name: str
    kind: str
    depth: int
    output: list[list[int]] = Field(default_factory=list)
    calls: int = 0
    parameters: int = 0
    trainable: int = 0
    flops: float = 0
    activations: int = 0
    shared_with: str = ""
    notes: list[str] = Field(default_factory=list)


class ModelMemory(Record):
    """Bytes of one training step, by purpose.

    Attributes:
        activations: largest number of bytes stored for the backward pass at one time.
        average: the averaged weights, if the Task has them.
        batch: the batch itself.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    average: int
    activations: int
    batch: int

    @property
    def total(self) -> int:
        return sum(value for _, value in self)


class ModelSummary(Record):
    """The modules of a Task's model, and totals of one training step.

    Attributes:
        batch: shapes of the batch's tensors.
        rows: modules in the order of the tree.
        parameters, trainable, frozen, buffers: numbers of elements; shared ones count once.
        forward_flops, backward_flops: FLOPs of matrix products, convolutions, attention and recurrent layers in one step.
        memory: bytes.
        optimizer: its class.
    """

    version: int = 1
    task: str
    batch: list[str]
    rows: list[ModuleRow]
    parameters: int
    trainable: int
    frozen: int
    buffers: int
    forward_flops: float
    backward_flops: float
    memory: ModelMemory
    optimizer: str
    notes: list[str] = Field(default_factory=list)

    def folded(self, depth: int) -> list[ModuleRow]:
        """Returns the rows down to `depth`; deeper rows are added to their ancestor at that depth."""
        rows: list[ModuleRow] = []
        for row in self.rows:
            if row.depth <= depth:
                rows.append(row)
                continue
            above = rows[-1]
            added = {name: getattr(above, name) + getattr(row, name) for name in _SUMMED}
            rows[-1] = above.model_copy(update=added)
        return rows


_SUMMED = ("parameters", "trainable", "flops", "activations")
