"""Export of model and loss as one graph, and split of the graph into consecutive pieces."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from hotloop.core.random.generators import OwnedGenerators
from hotloop.core.random.rng import RandomStreams, preserve_generators
from hotloop.core.reporter import silence_loggers
from hotloop.core.task_parts.models import set_training
from hotloop.data.batch_tree import map_tensors, tree_tensors
from hotloop.errors import HotloopError, PlanError, describe_error, is_out_of_memory
from hotloop.lowering.grouped_mm import traceable_groups
from hotloop.task import StepResult, Task

TensorLeaves = Sequence[Tensor]
"""The tensors of a batch, in order."""


class LossModule(nn.Module):
    """Model and loss as one module with tensors as inputs, which torch can export.

    Args:
        like: a batch with the structure of all batches.
        in_eval: names of the model's modules that stay in evaluation mode in training.
    """

    def __init__(self, model: nn.Module, task: Task, like: Any, in_eval: Collection[str] = ()) -> None:
        super().__init__()
        self.model, self._in_eval = model, in_eval
        self.loss = task.loss if isinstance(task.loss, nn.Module) else None
        self._task, self._like = task, like

    def train(self, mode: bool = True) -> LossModule:
        super().train(mode)
        if mode:
            set_training(self.model, self._in_eval)
        return self

    def forward(self, *leaves: Tensor) -> tuple[Any, Any, Any]:
        """Returns loss, output (in evaluation) and further scalars of a batch with these tensors."""
        following = iter(leaves)
        computed = self._task.compute(self.model, map_tensors(lambda _: next(following), self._like))
        return computed.loss, None if self.training else computed.output, computed.scalars


@dataclass(frozen=True)
class TracedForward:
    """The exported forward pass for a fixed number of samples.

    Attributes:
        module: the graph, with the model's parameters and buffers under `model.`, the loss' under `loss.`.
        nodes: the operations in order.
        paths: name of the module whose forward contains each node; empty for the model itself.
        tensor_names: names of the model's parameters and buffers.
    """

    module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    paths: tuple[str, ...]
    tensor_names: frozenset[str]
    _spec: pytree.TreeSpec

    @classmethod
    def from_task(cls, objective: LossModule, leaves: TensorLeaves) -> TracedForward:
        """Exports model and loss for a batch with these shapes.

        Raises:
            PlanError: the export fails; the message names the module.
        """
        exported = _export(objective, tuple(leaves))
        module: Any = exported.module()
        nodes = tuple(n for n in module.graph.nodes if n.op == "call_function")
        model = objective.model
        values = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        held = frozenset(name for name, _ in itertools.chain(*values))
        return cls(module, nodes, tuple(map(_path, nodes)), held, exported.call_spec.out_spec)

    def find(self, name: str) -> int | None:
        """Returns the first node of a module or of a parameter of that name; None if there is none."""
        inside = (place for place, path in enumerate(self.paths) if _is_inside(path, name))
        using = (
            n for n, node in enumerate(self.nodes) if any(_is_inside(held, name) for held in self.names_in_piece(node))
        )
        return next(inside, next(using, None))

    def names_in_piece(self, node: fx.Node) -> list[str]:
        """Returns the names of the model's parameters and buffers that a node reads."""
        found = (str(one.target).removeprefix("model.") for one in node.all_input_nodes if one.op == "get_attr")
        return [name for name in found if name in self.tensor_names]

    def cut_points(self) -> dict[str, int]:
        """Returns possible first modules of stages by name, with their first nodes: modules with parameters."""
        found: dict[str, int] = {}
        for node, path in zip(self.nodes, self.paths, strict=True):
            for held in self.names_in_piece(node):
                name = path or held
                if name not in found and (place := self.find(name)) is not None and not self.separates_mutation(place):
                    found[name] = place
        first_of: dict[int, str] = {}
        for name, place in found.items():
            first_of.setdefault(place, name)
        ordered = sorted((place, name) for place, name in first_of.items())
        return {name: place for place, name in ordered[1:]}  # the first stage begins with the model

    def separates_mutation(self, place: int) -> bool:
        """Checks whether a cut before that node separates a tensor from its in-place change."""
        number = {node: number for number, node in enumerate(self.nodes)}
        for changed, node in enumerate(self.nodes[place:], place):
            for root in _mutated_tensors(node):
                if root in number and number[root] < place <= changed:
                    return True
        return False

    def split(self, starts: Sequence[int]) -> list[GraphPiece]:
        """Splits the graph before each of these nodes."""
        bounds = [0, *starts, len(self.nodes)]
        results = [node for node in _node_results(self.module) if isinstance(node, fx.Node)]
        crossing = [self._crossing(place, results) for place in bounds[1:-1]]
        ends = zip(itertools.pairwise(bounds), [[], *crossing], [*crossing, results], strict=True)
        return [self._piece(first, last, arriving, leaving) for (first, last), arriving, leaving in ends]

    def result(self, values: Sequence[Tensor]) -> StepResult:
        """Returns the last piece's outputs as the result of the Task's `compute`."""
        following = iter(values)
        flat = [next(following) if isinstance(node, fx.Node) else node for node in _node_results(self.module)]
        return StepResult(*pytree.tree_unflatten(flat, self._spec))

    def _crossing(self, place: int, results: Sequence[fx.Node]) -> list[fx.Node]:
        before = set(self.nodes[:place])
        later = [used for node in self.nodes[place:] for used in node.all_input_nodes]
        return list(dict.fromkeys(node for node in [*later, *results] if node in before))

    def _piece(self, first: int, last: int, into: Sequence[fx.Node], out: Sequence[fx.Node]) -> GraphPiece:
        nodes = self.nodes[first:last]
        graph, copies = fx.Graph(), {}
        for node in into:
            copies[node] = graph.placeholder(node.name)
        read = (value for node in [*nodes, *out] for value in [node, *node.all_input_nodes])
        used = [value for value in dict.fromkeys(read) if value.op in ("get_attr", "placeholder")]
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        leaves = [place for place, node in enumerate(placeholders) if node in used]
        for place in leaves:
            copies[placeholders[place]] = graph.placeholder(placeholders[place].name)
        for node in [*(value for value in used if value.op == "get_attr"), *nodes]:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in out))
        return GraphPiece(fx.GraphModule(self.module, graph), tuple(leaves), len(into))


class GraphPiece(nn.Module):
    """Consecutive operations of a model.

    Attributes:
        leaves: indices of the batch's tensors that it uses.
        arriving: number of tensors from the piece before.
    """

    def __init__(self, body: fx.GraphModule, leaves: tuple[int, ...], arriving: int) -> None:
        super().__init__()
        self.body, self.leaves, self.arriving = body, leaves, arriving

    def forward(self, arrived: Sequence[Tensor], batch: TensorLeaves) -> tuple[Tensor, ...]:
        """Returns the inputs of the next piece."""
        return self.body(*arrived, *(batch[place] for place in self.leaves))


def _path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return path.removeprefix("model").removeprefix(".")


def _is_inside(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _node_results(module: fx.GraphModule) -> Sequence[Any]:
    return next(node for node in module.graph.nodes if node.op == "output").args[0]


def _mutated_tensors(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the tensors whose memory a node changes, each by the node that created it."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for value, argument in zip(node.args, schema.arguments, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
            while (viewed := _viewed_node(value)) is not None:
                value = viewed
            yield value


def _viewed_node(node: fx.Node) -> fx.Node | None:
    """Returns the node whose memory the result may share."""
    schema = getattr(node.target, "_schema", None)
    shares = schema is not None and any(one.alias_info is not None for one in schema.returns)
    # operations that return a view or a copy have no alias information: they count as views
    maybe = str(node.target) in ("aten.reshape.default", "aten.contiguous.default", "aten.flatten.using_ints")
    return node.args[0] if (shares or maybe) and node.args and isinstance(node.args[0], fx.Node) else None


def _export(objective: LossModule, leaves: tuple[Tensor, ...]) -> Any:
    streams, owned = RandomStreams(0), OwnedGenerators({"the model or the loss": objective})
    owned.refresh()
    before = owned.states()
    try:
        with silence_loggers("torch"), traceable_groups(), preserve_generators():
            streams.reseed("export")
            exported = torch.export.export(objective, leaves, strict=False)
            apart = any(node.kwargs.get("generator") is not None for node in exported.graph.nodes)
            if streams.has_drawn("export") or owned.states() != before or apart:
                raise draws_error()
            return exported
    except HotloopError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise PlanError(
            f"parallel=stages can't cut the model: {_failing_module(objective, leaves)} can't be exported as a graph"
            f" ({describe_error(error)})",
            expected="a forward pass without decisions that depend on the values in its tensors",
            fix="change that module, or use parallel=sharded",
        ) from error


def draws_error() -> PlanError:
    """Returns the error for random draws that would be constants of a graph."""
    return PlanError(
        "parallel=stages, and the model or the loss draws from NumPy's or Python's generator, or from its own",
        expected="random numbers of torch's functions, which are drawn anew in each step",
        fix="draw by torch there, or use parallel=data",
    )


def no_backward_error(what: str) -> PlanError:
    """Returns the error for a custom backward, which a graph of the forward pass lacks."""
    return PlanError(
        f"parallel=stages, and backward calls {what}, which torch.export leaves out",
        expected="gradients that follow from the operations of the forward pass",
        fix="leave it out, or use parallel=data or sharded",
    )


def _failing_module(objective: LossModule, leaves: tuple[Tensor, ...]) -> str:
    inside: list[str] = []
    hooks: list[RemovableHandle] = []
    for name, module in objective.named_modules():
        own = name.removeprefix("model").removeprefix(".")

        def enter(*_: Any, own: str = own) -> None:
            inside.append(own)

        def leave(*_: Any) -> None:
            inside.pop()

        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        with silence_loggers("torch"), traceable_groups():
            torch.export.export(objective, leaves, strict=False)
    except Exception:  # the same error again: only its place matters here
        return repr(inside[-1]) if inside and inside[-1] else "the model's own forward"
    finally:
        for hook in hooks:
            hook.remove()
    return "the model"


def batch_leaves(batch: Any, samples: int) -> list[Tensor]:
    """Returns the tensors of a batch, each with a row per sample.

    Raises:
        PlanError: the batch has another part, which can't be cut into microbatches.
    """
    others: list[Any] = []
    map_tensors(lambda value: value, batch, lambda leaf: others.append(leaf))
    found = list(tree_tensors(batch))
    odd = [f"a tensor of shape {tuple(v.shape)}" for v in found if not v.ndim or len(v) != samples]
    odd += [type(leaf).__name__ for leaf in others]
    if odd:
        raise PlanError(
            f"parallel=stages, and a batch holds {odd[0]}, which has no row per sample",
            expected=f"tensors whose first dimension counts the {samples} samples, to be cut into microbatches",
            fix="leave it out of the batch, or use parallel=data",
        )
    return found
