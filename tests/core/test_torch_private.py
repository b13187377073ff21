"""Each private part of PyTorch that packages of hotloop share exists, and does what its name says."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hotloop.core import torch_private as private


def test_each_name_exists() -> None:
    assert all(getattr(private, name) is not None for name in private.__all__)


def test_modes_are_counted_and_disabled() -> None:
    class Counter(private.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            assert isinstance(function, private.OpOverload)
            self.seen += 1
            return function(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Counter() as counter:
        assert private.dispatch_mode_count() == 1
        x + 1
        with private.disable_current_modes():
            assert private.dispatch_mode_count() == 0
            x + 1
    assert counter.seen == 1 and private.dispatch_mode_count() == 0
    with torch.device("cpu"):
        assert private.function_mode_count() == 1
    assert private.function_mode_count() == 0


def test_subclasses_of_tensors_are_passed_by() -> None:
    class Marked(torch.Tensor):
        pass

    x = torch.ones(2).as_subclass(Marked)
    assert type(x + 1) is Marked
    with private.DisableTorchFunction():
        assert type(x + 1) is torch.Tensor

    class Refusing(private.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise RuntimeError("called")

    with Refusing(), private.DisableTorchDispatch():
        torch.ones(2) + 1


def test_nodes_and_passes_of_autograd_are_numbered() -> None:
    x = torch.ones(2, requires_grad=True)
    before = private.next_sequence_number()
    y = x * 2
    assert private.next_sequence_number() == before + 1
    assert private.current_autograd_node() is None and private.current_graph_task_id() == -1
    seen = []
    y.register_hook(lambda gradient: seen.append(private.current_graph_task_id()))
    z = y.sin()
    z.register_hook(lambda gradient: seen.append(private.current_autograd_node()))
    z.sum().backward()
    assert len(seen) == 2 and seen[1] != -1 and seen[0] is not None


def test_function_transforms_and_traces_are_seen() -> None:
    assert private.peek_interpreter_stack() is None and not private.tracing_state()
    inside = []

    def function(x: torch.Tensor) -> torch.Tensor:
        inside.append(private.peek_interpreter_stack())
        return x.sin()

    torch.func.vmap(function)(torch.ones(2))
    assert inside[0] is not None
    traced = []

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            traced.append(bool(private.tracing_state()))
            return x + 1

    torch.jit.trace(Layer(), torch.ones(2), check_trace=False)
    assert traced[0]


def test_trees_and_fake_tensors() -> None:
    tree = {"a": [torch.ones(2)], "b": (1, None)}
    leaves, spec = private.tree_flatten(tree)
    assert private.tree_unflatten(leaves, spec) == tree
    assert private.tree_leaves(tree) == leaves
    assert private.tree_map(lambda leaf: 0, tree) == {"a": [0], "b": (0, 0)}
    assert private.tree_map_only(torch.Tensor, lambda leaf: 0, tree)["a"] == [0]
    assert private.tree_any(lambda leaf: leaf == 1, {"a": 1}) and not private.tree_any(lambda leaf: leaf == 1, {"a": 2})
    with private.FakeTensorMode():
        assert isinstance(torch.ones(2), private.FakeTensor)


def test_parts_of_a_loader() -> None:
    fetcher = private.MapDatasetFetcher(TensorDataset(torch.arange(4)), True, list, False)
    assert [int(row[0]) for row in fetcher.fetch([1, 3])] == [1, 3]
    assert callable(private.signal_handling._set_worker_pids) and hasattr(private.worker, "_worker_loop")
    with pytest.raises(ValueError, match="wrong"):
        try:
            raise ValueError("wrong")
        except ValueError:
            private.ExceptionWrapper().reraise()


def test_a_read_only_mode_passes_errors_on() -> None:
    class Observer(private.ReadOnlyDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return function(*args, **(kwargs or {}))

    with pytest.raises(NotImplementedError), Observer():
        raise NotImplementedError
