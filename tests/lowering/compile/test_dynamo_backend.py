"""`torch.compile(model, backend="hotloop")` computes what the eager module does, with hotloop's rewrites."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hotloop.errors import PlanError
from hotloop.lowering.compile import dynamo_backend
from hotloop.lowering.rewrites import REWRITE_FUNCTIONS

ROOT = Path(__file__).parents[3]


class Block(nn.Module):
    """A block of a transformer: attention and a feed-forward network, both with dropout."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm, self.other_norm = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        samples, length, width = inputs.shape
        parts = self.project(self.norm(inputs)).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        inputs = inputs + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return inputs + self.feed(self.other_norm(inputs))


def _images() -> Tensor:
    return torch.randn(16, 1, 16, 16)


def _convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


def _pooled_convolution() -> nn.Module:
    """Its first pooling is rewritten with its convolution, and the second, with overlap, stays."""
    layers = (
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
    )
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10))


def _dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.3), nn.Linear(512, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "dense": (_dense, _images),
    "convolutions": (_convolutions, _images),
    "pooled convolution": (_pooled_convolution, _images),
    "attention": (Block, lambda: torch.randn(4, 12, 64)),
}


def backward(model: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns output and gradient of the inputs; the same random numbers at each call."""
    torch.manual_seed(3)
    inputs = inputs.clone().requires_grad_()
    output = model(inputs)
    output.square().mean().backward()
    assert inputs.grad is not None
    return output.detach(), inputs.grad


def train_pass(model: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    torch.manual_seed(3)
    output = model(inputs)
    output.square().mean().backward()
    return output.detach()


def assert_equal(model: nn.Module, plain: nn.Module) -> None:
    for (name, value), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert value.grad is not None and other.grad is not None
        error = (value.grad - other.grad).norm() / other.grad.norm()
        assert error < 1e-4 or other.grad.norm() < 1e-6, name  # a convolution's bias before a normalization has none
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.few("dense", "pooled convolution")
@pytest.mark.parametrize("network", NETWORKS)
def test_results_gradients_and_buffers_are_those_of_the_eager_module(network: str) -> None:
    make, inputs = NETWORKS[network]
    torch.manual_seed(0)
    plain, given = make(), inputs()
    model = copy.deepcopy(plain)
    compiled = torch.compile(model, backend=dynamo_backend.hotloop, fullgraph=True, dynamic=False)
    for _ in range(2):
        torch.testing.assert_close(train_pass(compiled, given), train_pass(plain, given), rtol=1e-4, atol=1e-5)
    assert_equal(model, plain)
    output, gradient = backward(compiled, given)
    expected, expected_gradient = backward(plain, given)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-6)


def test_the_rewrites_of_hotloop_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = list[dict[str, int]]()
    original = dynamo_backend.rewrite_joint_graph

    def noticed(*args: object) -> dict[str, int]:
        counts.append(original(*args))  # type: ignore[arg-type]
        return counts[-1]

    monkeypatch.setattr(dynamo_backend, "rewrite_joint_graph", noticed)
    torch.compiler.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False), torch._inductor.config.patch(fx_graph_cache=False):
        torch.compile(_pooled_convolution(), backend=dynamo_backend.hotloop, dynamic=False)(_images()).sum().backward()
    assert counts[0]["conv_in_pool"] == 1


def test_a_wrong_rewrite_changes_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of these tests sees a rewrite that loses a factor of 1.01."""

    def wrong(graph: torch.fx.GraphModule) -> int:
        (product, *_) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
        with graph.graph.inserting_after(product):
            scaled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (product, 1.01))
        scaled.meta.update(product.meta)
        product.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        return 1

    monkeypatch.setitem(REWRITE_FUNCTIONS, "mm_by_onednn", wrong)
    torch.compiler.reset()
    plain, given = _dense(), _images()
    model = copy.deepcopy(plain)
    with torch._functorch.config.patch(enable_autograd_cache=False), torch._inductor.config.patch(fx_graph_cache=False):
        train_pass(torch.compile(model, backend=dynamo_backend.hotloop, dynamic=False), given)
    train_pass(plain, given)
    with pytest.raises(AssertionError):
        assert_equal(model, plain)


@pytest.mark.more
def test_shapes_that_change_are_compiled_as_well() -> None:
    model, plain = _dense(), _dense()
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model.eval(), backend=dynamo_backend.hotloop, dynamic=True)
    for rows in (5, 9, 13):
        given = torch.randn(rows, 1, 16, 16)
        torch.testing.assert_close(compiled(given), plain.eval()(given), rtol=1e-4, atol=1e-5)


def test_a_mode_is_refused_in_one_line() -> None:
    with pytest.raises(PlanError, match="backend='hotloop'") as caught:
        dynamo_backend.hotloop(torch.fx.GraphModule({}, torch.fx.Graph()), [], mode="max-autotune")
    assert "\n" not in str(caught.value)


@pytest.fixture
def registered(tmp_path: Path) -> dict[str, str]:
    """An environment in which the entry points of `pyproject.toml` are installed."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    folder = tmp_path / "site" / "planted_entry_points-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-entry-points\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[torch_dynamo_backends]", *lines, ""]))
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT / "src")])
    return {**os.environ, "PYTHONPATH": path}


SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
inputs = torch.randn(3, 4)
compiled = torch.compile(model, backend="hotloop")
result = compiled(inputs)
result.sum().backward()
assert torch.allclose(result, model(inputs), atol=1e-6)
print("hotloop" in torch.compiler.list_backends())
"""


@pytest.mark.more
def test_torch_finds_the_backend_by_its_name(registered: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=registered, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.more
def test_without_a_compiler_the_module_runs_uncompiled_and_a_warning_reports_this(
    registered: dict[str, str], tmp_path: Path
) -> None:
    environment = {**{name: value for name, value in registered.items() if name != "CXX"}, "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (warning,) = (line for line in done.stderr.splitlines() if "hotloop:" in line)
    assert "there is no C++ compiler, so this graph runs uncompiled" in warning
