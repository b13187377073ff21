"""Watches one forward pass: each torch function that it calls, on what, and inside of which module."""

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
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hotloop.errors import is_library_file

_ASK_FUNCTIONS = (torch.nn.functional, torch.functional, torch._tensor)
"""Their Python functions ask whether somebody overrides them as a whole; here what they call inside is of interest."""
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
    """What a torch function is called, the same for its method, its operator and its form in place."""
    if getattr(function, "__name__", "") == "__get__":
        return str(function.__self__.__name__)  # an attribute such as `.T`
    plain = str(getattr(function, "__name__", type(function).__name__)).strip("_")
    return _REFLECTED.get(plain, plain)


@dataclass(frozen=True)
class ModuleCall:
    """A module while it is called: its name (`(loss)` outside of any), its class, and how often it has been called."""

    module: str
    kind: str
    call: int
    is_leaf: bool


OUTSIDE_MODULES = ModuleCall("(loss)", "", 1, False)


@dataclass
class TorchCall:
    """One call of a torch function.

    Attributes:
        function: what was called; it may be called again.
        arguments, options: its tensors detached from the graph, as they were.
        versions: of these tensors in the same order, which tell whether they were changed since.
        drawn_from: the state of the random generator before, for functions that draw.
        needs, parameters: for each floating-point tensor, whether it needs a gradient, and its name in the model or nothing.
        outputs: what came out, apart from the graph.
        gradients: by the place of the output; filled while going back.
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
    """Something in autograd's graph that no torch function was seen to make, such as a `torch.autograd.Function`."""

    node: str
    place: ModuleCall
    shape: list[int]


class TorchCallRecorder(TorchFunctionMode):
    """Records calls while it is entered.

    Args:
        model: whose modules and parameters give the names.
        knows: whether a function of that name is explained; of others, those alone count that a gradient flows through.
    """

    def __init__(self, model: nn.Module, knows: Callable[[str], bool]) -> None:
        super().__init__()
        self.calls: list[TorchCall | UnrecordedNode] = []
        self._knows = knows
        self._model = model
        self._names = {id(value): name for name, value in model.named_parameters()}
        self._inside: list[ModuleCall] = []
        self._counts: Counter[str] = Counter()
        self._seen: set[Any] = set()  # nodes of the graph; kept, so that no other can take on their identity

    @contextmanager
    def record(self) -> Iterator[None]:
        """While it lasts, the model's modules say when they are entered and left."""
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    stack.callback(module.register_forward_pre_hook(self._enter(name)).remove)
                    stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for library in _ASK_FUNCTIONS:
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
        # The same tensor again, as `.contiguous()` or `.to()` of what is so already: nothing was computed.
        nothing = [id(one) for one in outputs] == [
            id(leaf) for leaf in _floating_tensors(args)[:1]
        ] and not _is_in_place(function, options)
        if not outputs or nothing:
            return out
        if len(outputs) > 1:  # one may have been made from another: what comes back to each is that of its users alone
            self._seen.update(one.grad_fn for one in outputs)
            out = tree_map_only(Tensor, lambda x: x.view_as(x) if x.is_floating_point() else x, out)
            outputs = _floating_tensors(out)
        flows = torch.is_grad_enabled() and any(one.requires_grad for one in outputs)
        if flows or (self._knows(name) and self._place.is_leaf):
            self._record(name, function, before, needs, (args, options), state, outputs)
        return out

    def _record(
        self,
        name: str,
        function: Any,
        before: Any,
        needs: list[bool],
        given: Any,
        state: Tensor | None,
        outputs: list[Tensor],
    ) -> None:
        arguments, options = before
        tensors = [leaf for leaf in tree_leaves(before) if isinstance(leaf, Tensor)]
        names = [self._names.get(id(leaf), "") for leaf in _floating_tensors(given)]
        versions = [tensor._version for tensor in tensors]
        where = _user_line()
        one = TorchCall(name, function, arguments, options, self._place, where, versions, needs, names, state, [])
        for place, output in enumerate(outputs):
            one.outputs.append(output.detach())
            if output.requires_grad:
                if output.grad_fn is not None:
                    self._seen.add(output.grad_fn)
                output.register_hook(_keep_gradient(one, place))
        self.calls.append(one)

    def _note_unseen(self, tree: Any) -> None:
        """Notes what made a tensor without being seen."""
        for leaf in _floating_tensors(tree):
            node = leaf.grad_fn
            if node is not None and node not in self._seen:
                self._seen.add(node)
                self.calls.append(UnrecordedNode(node.name(), self._place, list(leaf.shape)))


def _keep_gradient(one: TorchCall, place: int) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor | None) -> None:
        if gradient is not None:  # as that of a part of a tensor that nobody used
            one.gradients[place] = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()

    return keep


def _floating_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _copy_views(out: Any, args: Any) -> Any:
    """Results that are views of something inside of the function, as those of `linear`, as tensors of their own.

    Where a view is overwritten, autograd makes its history anew, and what was to watch its gradient is lost.
    """
    memory = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}

    def own(x: Tensor) -> Tensor:
        inner = x._base is not None and x.requires_grad and x.untyped_storage().data_ptr() not in memory
        return x.clone() if inner else x

    return tree_map_only(Tensor, own, out)


def _is_in_transform() -> bool:
    """Whether a transform such as `vmap` is under way, whose tensors live as long as it alone."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _is_fake(floating: list[Tensor]) -> bool:
    """Whether these are a compiler's, without any memory: `torch.cond` calls it for its branches."""
    return any(isinstance(one, FakeTensor | FunctionalTensor) for one in floating)


def _is_in_place(function: Any, options: dict[str, Any]) -> bool:
    name = str(getattr(function, "__name__", ""))
    reflected = name.startswith("__i") and name.strip("_")[1:] in ("add", "sub", "mul", "div", "truediv", "pow")
    return (name.endswith("_") and not name.endswith("__")) or reflected or bool(options.get("inplace"))


def _save_arguments(function: Any, args: Any, options: dict[str, Any]) -> Any:
    """The arguments apart from the graph; what the call will change is copied."""
    changed = [args[0]] if args and _is_in_place(function, options) else []

    def apart(x: Tensor) -> Tensor:
        return x.detach().clone() if any(x is one for one in changed) else x.detach()

    return tree_map_only(Tensor, apart, (tuple(args), dict(options)))


def _user_line() -> str:
    """The innermost line on the stack that is the user's, below the one that asked to explain; empty if there is none."""
    frame = sys._getframe(1)
    while is_library_file(frame.f_code.co_filename):
        if frame.f_back is None or frame.f_code.co_name == "explain":
            return ""
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
