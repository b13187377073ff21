"""Records a forward pass: the torch functions called, their arguments and modules."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hotloop.core.torch_private import FakeTensor, FunctionalTensor, peek_interpreter_stack, tree_leaves, tree_map_only
from hotloop.errors import is_library_file

_PATCHED_LIBRARIES = (torch.nn.functional, torch.functional, torch._tensor)
"""Their Python functions are dispatched as a whole; patched queries dispatch the inner calls instead."""
_QUERY_FUNCTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")

_REFLECTED = {
    "radd": "add",
    "rmul": "mul",
    "truediv": "div",
    "rtruediv": "rdiv",
    "rmatmul": "matmul",
    "multiply": "mul",
}
_REFLECTED |= {"subtract": "sub", "divide": "div", "true_divide": "div", "negative": "neg", "hardtanh_": "hardtanh"}
_REFLECTED |= {"iadd": "add", "isub": "sub", "imul": "mul", "idiv": "div", "itruediv": "div", "ipow": "pow"}


RANDOM_FUNCTIONS = frozenset(("dropout", "feature_dropout", "scaled_dot_product_attention"))


def function_name(function: Any) -> str:
    """Returns the name of a torch function, the same for its method, operator and in-place form."""
    if getattr(function, "__name__", "") == "__get__":
        return str(function.__self__.__name__)  # an attribute such as `.T`
    plain = str(getattr(function, "__name__", type(function).__name__)).strip("_")
    return _REFLECTED.get(plain, plain)


@dataclass(frozen=True)
class ModuleCall:
    """A running call of a module: name (`(loss)` outside of modules), class, and number of the call."""

    module: str
    kind: str
    call: int
    is_leaf: bool


OUTSIDE_MODULES = ModuleCall("(loss)", "", 1, False)


@dataclass
class TorchCall:
    """One call of a torch function.

    Attributes:
        function: the function, which can be called again.
        arguments, options: arguments before the call, with detached tensors.
        versions: versions of these tensors, in the same order, to detect later changes.
        needs, parameters: for each floating-point tensor, whether it needs a gradient, and its name in the model or
            `""`.
        drawn_from: state of the random generator before the call, for random functions.
        outputs: detached outputs.
        gradients: gradients by index of the output, filled by the backward pass.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    module_call: ModuleCall
    where: str
    versions: list[int]
    needs: list[bool]
    parameters: list[str]
    drawn_from: Tensor | None
    outputs: list[Tensor]
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.arguments, self.options)) if isinstance(leaf, Tensor)]

    @property
    def is_overwritten(self) -> bool:
        """Whether an input was changed in place later."""
        return [tensor._version for tensor in self.tensors] != self.versions


@dataclass(frozen=True)
class UnrecordedNode:
    """A node of autograd's graph without a recorded function, such as a `torch.autograd.Function`."""

    node: str
    place: ModuleCall
    shape: list[int]


class TorchCallRecorder(TorchFunctionMode):
    """Records calls inside of `record()`.

    Args:
        model: gives the names of modules and parameters.
        knows: returns whether a function of that name has equations; others are only recorded if a gradient flows.
    """

    def __init__(self, model: nn.Module, knows: Callable[[str], bool]) -> None:
        super().__init__()
        self.calls: list[TorchCall | UnrecordedNode] = []
        self._knows = knows
        self._model = model
        self._names = {id(value): name for name, value in model.named_parameters()}
        self._inside: list[ModuleCall] = []
        self._counts: Counter[str] = Counter()
        self._seen: set[Any] = set()  # graph nodes; the references prevent reuse of their ids

    @contextmanager
    def record(self) -> Iterator[None]:
        """Records the calls in the context, with hooks on the model's modules."""
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    stack.callback(module.register_forward_pre_hook(self._enter(name)).remove)
                    stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for library in _PATCHED_LIBRARIES:
                for name in _QUERY_FUNCTIONS:
                    if hasattr(library, name):
                        stack.enter_context(mock.patch.object(library, name, lambda *_: False))
            stack.enter_context(self)
            yield

    def _enter(self, name: str) -> Callable:
        def entered(module: nn.Module, _: Any) -> None:
            self._counts[name] += 1
            self._inside.append(
                ModuleCall(name, type(module).__name__, self._counts[name], not list(module.children()))
            )

        return entered

    def _leave(self, *_: Any) -> None:
        if self._inside:
            self._inside.pop()

    @property
    def _place(self) -> ModuleCall:
        return self._inside[-1] if self._inside else OUTSIDE_MODULES

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        name = function_name(function)
        floating = _floating_tensors((args, options))
        if not floating or _is_in_transform() or _is_fake(floating):
            return function(*args, **options)
        before = _save_arguments(function, args, options)
        needs = [leaf.requires_grad for leaf in floating]
        state = torch.get_rng_state() if name in RANDOM_FUNCTIONS else None
        self._note_unseen((args, options))
        out = _copy_views(function(*args, **options), args)
        outputs = _floating_tensors(out)
        # The output is the input, as of `.contiguous()` or `.to()` without effect: nothing was computed.
        nothing = [id(output) for output in outputs] == [
            id(leaf) for leaf in _floating_tensors(args)[:1]
        ] and not _is_in_place(function, options)
        if not outputs or nothing:
            return out
        if len(outputs) > 1:  # outputs may share nodes; views separate their gradients
            self._seen.update(output.grad_fn for output in outputs)
            out = tree_map_only(Tensor, lambda x: x.view_as(x) if x.is_floating_point() else x, out)
            outputs = _floating_tensors(out)
        flows = torch.is_grad_enabled() and any(output.requires_grad for output in outputs)
        if flows or (self._knows(name) and self._place.is_leaf):
            self._record(name, function, before, needs, (args, options), state, outputs)
        return out

    def _record(
        self,
        name: str,
        function: Any,
        before: Any,
        needs: list[bool],
        call_arguments: Any,
        state: Tensor | None,
        outputs: list[Tensor],
    ) -> None:
        arguments, options = before
        tensors = [leaf for leaf in tree_leaves(before) if isinstance(leaf, Tensor)]
        names = [self._names.get(id(leaf), "") for leaf in _floating_tensors(call_arguments)]
        versions = [tensor._version for tensor in tensors]
        where = _user_line()
        recorded = TorchCall(name, function, arguments, options, self._place, where, versions, needs, names, state, [])
        for place, output in enumerate(outputs):
            recorded.outputs.append(output.detach())
            if output.requires_grad:
                if output.grad_fn is not None:
                    self._seen.add(output.grad_fn)
                output.register_hook(_keep_gradient(recorded, place))
        self.calls.append(recorded)

    def _note_unseen(self, tree: Any) -> None:
        """Records the nodes of tensors that no recorded function made."""
        for leaf in _floating_tensors(tree):
            node = leaf.grad_fn
            if node is not None and node not in self._seen:
                self._seen.add(node)
                self.calls.append(UnrecordedNode(node.name(), self._place, list(leaf.shape)))


def _keep_gradient(recorded: TorchCall, place: int) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor | None) -> None:
        if gradient is not None:  # None for an unused part of a tensor
            recorded.gradients[place] = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()

    return keep


def _floating_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _copy_views(out: Any, args: Any) -> Any:
    """Copies outputs that are views of a tensor inside of the function, as those of `linear`.

    If such a view is overwritten, autograd rebuilds its history, and the gradient hook is lost.
    """
    memory = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}

    def own(x: Tensor) -> Tensor:
        inner = x._base is not None and x.requires_grad and x.untyped_storage().data_ptr() not in memory
        return x.clone() if inner else x

    return tree_map_only(Tensor, own, out)


def _is_in_transform() -> bool:
    """Returns whether a transform such as `vmap` runs, whose tensors are invalid afterwards."""
    return peek_interpreter_stack() is not None


def _is_fake(floating: list[Tensor]) -> bool:
    """Returns whether a compiler traces the call, as `torch.cond` does for its branches."""
    return any(isinstance(one, FakeTensor | FunctionalTensor) for one in floating)


def _is_in_place(function: Any, options: dict[str, Any]) -> bool:
    name = str(getattr(function, "__name__", ""))
    reflected = name.startswith("__i") and name.strip("_")[1:] in ("add", "sub", "mul", "div", "truediv", "pow")
    return (name.endswith("_") and not name.endswith("__")) or reflected or bool(options.get("inplace"))


def _save_arguments(function: Any, args: Any, options: dict[str, Any]) -> Any:
    """Returns detached arguments; an argument that the call changes in place is copied."""
    changed = [args[0]] if args and _is_in_place(function, options) else []

    def apart(x: Tensor) -> Tensor:
        return x.detach().clone() if any(x is one for one in changed) else x.detach()

    return tree_map_only(Tensor, apart, (tuple(args), dict(options)))


def _user_line() -> str:
    """Returns the innermost line of the user's on the stack, below `explain`; empty if there is none."""
    frame = sys._getframe(1)
    while is_library_file(frame.f_code.co_filename):
        if frame.f_back is None or frame.f_code.co_name == "explain":
            return ""
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
