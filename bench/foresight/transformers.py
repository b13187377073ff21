"""Operators of a training step of transformers, written from their definitions, for networks of which only the sizes are known.

`hugging_face` follows the eager code of transformers 4.3x (attention by separate products, mask, softmax and dropout);
`fused` follows implementations with one attention kernel, fused normalization and fused dropout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from hotloop.core.records.step_costs import OperatorCost, StepCosts

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class Operators:
    """Collects the operators of a step: each method adds a forward operator and its backward operators.

    Attributes:
        dtype: of arithmetic and activations.
        training: whether backward operators are added.
    """

    dtype: str = "float32"
    training: bool = True
    count: int = 1
    found: list[OperatorCost] = field(default_factory=list)
    parameters: int = 0

    @property
    def width(self) -> int:
        return WIDTHS[self.dtype]

    def add(self, kind, phase, flops, read, written, shape, *, times=1, launches=1, name=None, dtype=None) -> None:
        self.found.append(
            OperatorCost(
                name or f"aten.{kind}", kind, phase, int(flops), int(read), int(written), tuple(map(int, shape)),
                dtype or self.dtype, launches, self.count * times,
            )
        )  # fmt: skip

    def product(self, batch: int, m: int, n: int, k: int, *, weight: bool, bias: bool = True) -> None:
        """A product of (batch, m, k) and (batch, k, n); a weight is counted as a parameter."""
        kind = "linear" if weight else "batched_product"
        forms = [("forward", m, n, k)]
        if self.training:
            forms += [("backward", m, k, n), ("backward", k, n, m)]
        for phase, rows, columns, inner in forms:
            read = batch * (rows * inner + inner * columns) * self.width
            self.add(kind, phase, 2 * batch * rows * columns * inner, read, batch * rows * columns * self.width,
                     (batch, rows, columns, inner))  # fmt: skip
        if weight:
            self.parameters += self.count * (n * k + n * bias)
            if self.training and bias:
                self.add("reduction", "backward", m * n, m * n * self.width, n * self.width, (n, m))

    def elementwise(self, elements: int, reads: int = 1, backward: int = 1, backward_reads: int = 1) -> None:
        """An elementwise operator over so many elements, and operators of the backward pass."""
        self.add("elementwise", "forward", elements, reads * elements * self.width, elements * self.width, (elements,))
        if self.training and backward:
            read = backward_reads * elements * self.width
            self.add("elementwise", "backward", elements, read, elements * self.width, (elements,), times=backward)

    def dropout(self, elements: int) -> None:
        if self.training:
            self.add("random", "forward", elements, elements * self.width, elements * (self.width + 1), (elements,))
            self.add(
                "elementwise", "backward", elements, elements * (self.width + 1), elements * self.width, (elements,)
            )

    def copy(self, elements: int) -> None:
        self.elementwise(elements)

    def normalization(self, rows: int, columns: int) -> None:
        size = rows * columns * self.width
        self.add("normalization", "forward", 5 * rows * columns, size, size, (rows, columns))
        if self.training:
            self.add("normalization", "backward", 8 * rows * columns, 3 * size, size, (rows, columns), launches=2)
        self.parameters += self.count * 2 * columns

    def softmax(self, rows: int, columns: int) -> None:
        size = rows * columns * self.width
        self.add("softmax", "forward", 4 * rows * columns, size, size, (rows, columns))
        if self.training:
            self.add("softmax", "backward", 3 * rows * columns, 2 * size, size, (rows, columns))

    def attention(self, batch_heads: int, queries: int, width: int, *, causal: bool) -> None:
        """One attention kernel; FLOPs of a causal mask are half of the full ones, as the kernel skips them."""
        flops = 4 * batch_heads * queries * queries * width // (2 if causal else 1)
        size = batch_heads * queries * width * self.width
        self.add("attention", "forward", flops, 3 * size, size, (batch_heads, queries, queries, width))
        if self.training:
            self.add(
                "attention",
                "backward",
                2.5 * flops,
                5 * size,
                3 * size,
                (batch_heads, queries, queries, width),
                launches=3,
            )

    def embedding(self, rows: int, columns: int, vocabulary: int, *, tied: bool = False) -> None:
        size = rows * columns * self.width
        self.add("gather", "forward", 0, size, size, (rows * columns,))
        if self.training:
            table = vocabulary * columns * self.width
            self.add("gather", "backward", rows * columns, size, size + table, (rows * columns,))
        if not tied:
            self.parameters += self.count * vocabulary * columns

    def loss(self, rows: int, classes: int) -> None:
        self.copy(rows * classes)
        self.softmax(rows, classes)

    def costs(self, batch: int, *, update: bool = False, parameter_width: int | None = None) -> StepCosts:
        width = parameter_width or self.width
        parameters = self.parameters
        if update:
            size = parameters * width
            self.count = 1
            self.add("update", "update", 12 * parameters, 4 * size, 3 * size, (parameters,), launches=1)
        return StepCosts(
            tuple(self.found), batch, parameters, parameters * width, 0, parameters * width * self.training,
            2 * parameters * width * update, 0, 0, 0,
        )  # fmt: skip


def _heads_to_front(ops: Operators, batch: int, sequence: int, hidden: int, tensors: int) -> None:
    """Copies of transposed queries, keys and values; a batch of 1 needs none."""
    if batch > 1:
        for _ in range(tensors):
            ops.copy(batch * sequence * hidden)


def gpt2(ops: Operators, config: dict, batch: int, sequence: int, shards: int = 1) -> None:
    """GPT2LMHeadModel; with `shards`, the part of one of several GPUs with Megatron's tensor parallelism."""
    hidden, heads, layers, vocabulary = (config[name] for name in ("n_embd", "n_head", "n_layer", "vocab_size"))
    rows, scores = batch * sequence, batch * heads * sequence * sequence // shards
    ops.embedding(rows, hidden, vocabulary)
    ops.embedding(sequence, hidden, config["n_positions"])
    ops.elementwise(rows * hidden, reads=2, backward=0)
    ops.dropout(rows * hidden)
    ops.count = layers
    ops.normalization(rows, hidden)
    ops.product(1, rows, 3 * hidden // shards, hidden, weight=True)
    _heads_to_front(ops, batch, sequence, hidden // shards, 3)
    width = hidden // heads
    ops.product(batch * heads // shards, sequence, sequence, width, weight=False)
    ops.elementwise(scores)
    ops.elementwise(scores)
    ops.softmax(scores // sequence, sequence)
    ops.dropout(scores)
    ops.product(batch * heads // shards, sequence, width, sequence, weight=False)
    ops.copy(rows * hidden // shards)
    ops.product(1, rows, hidden, hidden // shards, weight=True)
    ops.dropout(rows * hidden)
    ops.elementwise(rows * hidden, reads=2, backward=1, backward_reads=2)
    ops.normalization(rows, hidden)
    ops.product(1, rows, 4 * hidden // shards, hidden, weight=True)
    for reads in (1, 1, 2, 1, 1, 1, 1, 2):  # the steps of gelu_new: pow, *, +, *, tanh, +, *, *
        ops.elementwise(4 * rows * hidden // shards, reads=reads, backward_reads=reads)
    ops.product(1, rows, hidden, 4 * hidden // shards, weight=True)
    ops.dropout(rows * hidden)
    ops.elementwise(rows * hidden, reads=2, backward=1, backward_reads=2)
    ops.count = 1
    ops.normalization(rows, hidden)
    ops.product(1, rows, vocabulary, hidden, weight=False, bias=False)
    ops.loss(rows, vocabulary)


def bert(ops: Operators, config: dict, batch: int, sequence: int) -> None:
    """BertLMHeadModel."""
    hidden, heads, layers = (config[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    vocabulary, inner = config["vocab_size"], config["intermediate_size"]
    rows, scores = batch * sequence, batch * heads * sequence * sequence
    ops.embedding(rows, hidden, vocabulary)
    ops.embedding(rows, hidden, 2)
    ops.embedding(sequence, hidden, 512)
    ops.elementwise(rows * hidden, reads=2, backward=0)
    ops.elementwise(rows * hidden, reads=2, backward=0)
    ops.normalization(rows, hidden)
    ops.dropout(rows * hidden)
    ops.count = layers
    for _ in range(3):
        ops.product(1, rows, hidden, hidden, weight=True)
    _heads_to_front(ops, batch, sequence, hidden, 3)
    ops.product(batch * heads, sequence, sequence, hidden // heads, weight=False)
    ops.elementwise(scores)
    ops.elementwise(scores, reads=2, backward=0)
    ops.softmax(scores // sequence, sequence)
    ops.dropout(scores)
    ops.product(batch * heads, sequence, hidden // heads, sequence, weight=False)
    ops.copy(rows * hidden)
    ops.product(1, rows, hidden, hidden, weight=True)
    ops.dropout(rows * hidden)
    ops.elementwise(rows * hidden, reads=2, backward=1, backward_reads=2)
    ops.normalization(rows, hidden)
    ops.product(1, rows, inner, hidden, weight=True)
    ops.elementwise(rows * inner, backward_reads=2)
    ops.product(1, rows, hidden, inner, weight=True)
    ops.dropout(rows * hidden)
    ops.elementwise(rows * hidden, reads=2, backward=1, backward_reads=2)
    ops.normalization(rows, hidden)
    ops.count = 1
    ops.product(1, rows, hidden, hidden, weight=True)
    ops.elementwise(rows * hidden, backward_reads=2)
    ops.normalization(rows, hidden)
    ops.product(1, rows, vocabulary, hidden, weight=False)
    ops.loss(rows, vocabulary)


def opt(ops: Operators, config: dict, batch: int, sequence: int) -> None:
    """OPTForCausalLM."""
    hidden, heads, layers = (config[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    vocabulary, inner = config["vocab_size"], config["ffn_dim"]
    rows, scores = batch * sequence, batch * heads * sequence * sequence
    ops.embedding(rows, hidden, vocabulary)
    ops.embedding(rows, hidden, config["max_position_embeddings"])
    ops.elementwise(rows * hidden, reads=2, backward=0)
    ops.count = layers
    ops.normalization(rows, hidden)
    for _ in range(3):
        ops.product(1, rows, hidden, hidden, weight=True)
    ops.elementwise(rows * hidden)
    for _ in range(3):
        ops.copy(rows * hidden)
    ops.product(batch * heads, sequence, sequence, hidden // heads, weight=False)
    ops.elementwise(scores, reads=2, backward=0)
    ops.elementwise(scores, reads=1, backward=1, backward_reads=2)
    ops.softmax(scores // sequence, sequence)
    ops.product(batch * heads, sequence, hidden // heads, sequence, weight=False)
    ops.copy(rows * hidden)
    ops.product(1, rows, hidden, hidden, weight=True)
    ops.dropout(rows * hidden)
    ops.elementwise(rows * hidden, reads=2, backward=1, backward_reads=2)
    ops.normalization(rows, hidden)
    ops.product(1, rows, inner, hidden, weight=True)
    ops.elementwise(rows * inner, backward_reads=2)
    ops.product(1, rows, hidden, inner, weight=True)
    ops.dropout(rows * hidden)
    ops.elementwise(rows * hidden, reads=2, backward=1, backward_reads=2)
    ops.count = 1
    ops.normalization(rows, hidden)
    ops.product(1, rows, vocabulary, hidden, weight=False)
    ops.loss(rows, vocabulary)


def switch(ops: Operators, config: dict, batch: int, sequence: int) -> None:
    """SwitchTransformersForConditionalGeneration: each expert runs the tokens up to its capacity, one expert after another."""
    hidden, heads, width = config["d_model"], config["num_heads"], config["d_kv"]
    rows, scores, inner = batch * sequence, batch * heads * sequence * sequence, config["d_ff"]
    experts = config["num_experts"]
    routed = min(config["expert_capacity"] * batch, rows // experts)

    def normalize() -> None:  # pow, mean, rsqrt, *, * of T5's normalization
        ops.elementwise(rows * hidden)
        ops.elementwise(rows * hidden, reads=1)
        ops.elementwise(rows * hidden, reads=1, backward_reads=2)
        ops.elementwise(rows * hidden, reads=1, backward_reads=2)
        ops.parameters += ops.count * hidden

    def attend() -> None:
        normalize()
        for _ in range(3):
            ops.product(1, rows, heads * width, hidden, weight=True, bias=False)
        _heads_to_front(ops, batch, sequence, heads * width, 3)
        ops.product(batch * heads, sequence, sequence, width, weight=False)
        ops.elementwise(scores, reads=2, backward=1)
        ops.softmax(scores // sequence, sequence)
        ops.dropout(scores)
        ops.product(batch * heads, sequence, width, sequence, weight=False)
        ops.copy(rows * heads * width)
        ops.product(1, rows, hidden, heads * width, weight=True, bias=False)
        ops.dropout(rows * hidden)
        ops.elementwise(rows * hidden, reads=2)

    def feed(tokens: int, times: int) -> None:
        for _ in range(times):
            ops.product(1, tokens, inner, hidden, weight=True, bias=False)
            ops.elementwise(tokens * inner, backward_reads=2)
            ops.dropout(tokens * inner)
            ops.product(1, tokens, hidden, inner, weight=True, bias=False)

    for attentions, layers in ((1, config["num_layers"]), (2, config["num_decoder_layers"])):
        ops.embedding(rows, hidden, config["vocab_size"], tied=attentions == 2)
        ops.count = layers
        for _ in range(attentions):
            attend()
        normalize()
        ops.elementwise(rows * hidden, reads=2)
        ops.count = layers // 2
        feed(rows, 1)
        ops.product(1, rows, experts, hidden, weight=True, bias=False)
        for _ in range(6 + 6 * experts):  # routing, and the rows of each expert
            ops.elementwise(rows)
        for _ in range(2 * experts):
            ops.elementwise(rows * hidden)
        feed(routed, experts)
        ops.count = 1
    ops.product(1, rows, config["vocab_size"], hidden, weight=True, bias=False)
    ops.loss(rows, config["vocab_size"])


def hugging_face(config: dict, batch: int, sequence: int, *, training: bool, shards: int = 1) -> StepCosts:
    """Returns forward and backward of a network by its configuration, in fp32, without an update."""
    ops = Operators(training=training)
    match config["model_type"]:
        case "gpt2":
            gpt2(ops, config, batch, sequence, shards)
        case "bert":
            bert(ops, config, batch, sequence)
        case "opt":
            opt(ops, config, batch, sequence)
        case _:
            switch(ops, config, batch, sequence)
    return ops.costs(batch)


def elements(shape: tuple[int, ...]) -> int:
    return prod(shape)


def fused(
    hidden: int, layers: int, heads: int, vocabulary: int, batch: int, sequence: int, *,
    recomputes: bool = False, flash: bool = True,
) -> StepCosts:  # fmt: skip
    """Returns forward, backward and update of a GPT with one attention kernel, or with Megatron's fused softmax.

    The record is in fp32, as that of a traced step; `estimate` converts it to the precision. With `recomputes`, the backward
    pass repeats the forward pass of each layer.
    """
    ops = Operators()
    inner = 4 * hidden
    rows, scores = batch * sequence, batch * heads * sequence * sequence
    ops.embedding(rows, hidden, vocabulary)
    ops.elementwise(rows * hidden, reads=2, backward=0)
    ops.count = layers
    first = len(ops.found)
    ops.normalization(rows, hidden)
    ops.product(1, rows, 3 * hidden, hidden, weight=True)
    width = hidden // heads
    if flash:
        ops.attention(batch * heads, sequence, width, causal=True)
    else:
        ops.copy(3 * rows * hidden)
        ops.product(batch * heads, sequence, sequence, width, weight=False)
        ops.softmax(scores // sequence, sequence)
        ops.dropout(scores)
        ops.product(batch * heads, sequence, width, sequence, weight=False)
        ops.copy(rows * hidden)
    ops.product(1, rows, hidden, hidden, weight=True)
    ops.elementwise(rows * hidden, reads=2, backward_reads=2)
    ops.normalization(rows, hidden)
    ops.product(1, rows, inner, hidden, weight=True)
    ops.elementwise(rows * inner, backward_reads=2)
    ops.product(1, rows, hidden, inner, weight=True)
    ops.elementwise(rows * hidden, reads=2, backward_reads=2)
    if recomputes:
        ops.found += [
            OperatorCost(one.name, one.kind, "backward", one.flops, one.read_bytes, one.written_bytes, one.shape, one.dtype,
                         one.launches, one.count)
            for one in ops.found[first:] if one.phase == "forward"
        ]  # fmt: skip
    ops.count = 1
    ops.normalization(rows, hidden)
    ops.product(1, rows, vocabulary, hidden, weight=False)
    ops.loss(rows, vocabulary)
    return ops.costs(batch, update=True)
