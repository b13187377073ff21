"""A module's exchange is used only after a proof; the module, its state and the random numbers stay the script's own."""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hotloop.exchanges import part as part_module
from hotloop.exchanges.modules import module_limits, module_proof, module_site
from hotloop.exchanges.modules.module_proof import compare_results
from hotloop.exchanges.modules.module_site import ModuleErrors
from hotloop.lowering.rewrites import REWRITE_FUNCTIONS
from tests.exchanges.conftest import set_clocks

SCRIPT = Path(__file__).parents[1] / "support/scripts/exchangeable_network.py"

READY, PROVEN = 16, 40
"""Steps after which a module is compiled in place, and proven three times."""


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
    return nn.Sequential(*layers)


def train(model: nn.Module, steps: int, after: Callable[[], None] = lambda: None, rows: int = 16) -> list[float]:
    """Trains by plain gradient descent; the inputs depend on the step alone. Returns the losses."""
    generator, losses = torch.Generator().manual_seed(1), []
    torch.manual_seed(2)
    np.random.seed(2)
    for _ in range(steps):
        inputs = torch.randn(rows, 8, generator=generator)
        loss = model(inputs).square().mean()
        loss.backward()
        with torch.no_grad():
            for value in model.parameters():
                if value.grad is not None:
                    value -= 0.01 * value.grad
                    value.grad = None
        losses.append(loss.item())
        after()
    return losses


@pytest.fixture
def without_caches() -> Iterator[None]:
    """Compiles anew, since a planted fault may not get into the compiler's caches."""
    import torch._functorch.config
    import torch._inductor.config

    torch.compiler.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False), torch._inductor.config.patch(fx_graph_cache=False):
        yield
    torch.compiler.reset()


def assert_same_state(model: nn.Module, plain: nn.Module, *, bitwise: bool) -> None:
    for (name, mine), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        if bitwise:
            assert torch.equal(mine, theirs), name
        else:
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_module_is_proven_raced_and_used_and_stays_the_script_s_own(modules) -> None:
    model, plain = network(), network()
    states = dict(vars(model))

    def end_step() -> None:
        if modules.parts and modules.part.stage == "race":
            modules.exchange.remove()  # so far each result is the script's own
        else:
            modules.step_ended()

    before = train(model, PROVEN, end_step)
    part = modules.part
    assert (part.kind, part.name) == ("module", "Sequential, 484 parameters")
    assert part.stage == "race" and part.proven >= 3, part.as_record(used=True)
    assert before == train(plain, PROVEN)
    assert_same_state(model, plain, bitwise=True)
    part.stage = "use"
    (site,) = modules.exchange._sites.values()
    site.install()
    after = train(model, 10, modules.step_ended)
    assert part.stage == "use" and part.notes == []
    assert after == pytest.approx(train(plain, 10), rel=1e-4)
    assert_same_state(model, plain, bitwise=False)
    assert type(model) is nn.Sequential and list(model.state_dict()) == list(plain.state_dict())
    clone, file = copy.deepcopy(model), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (clone, torch.load(file, weights_only=False)):
        assert other._compiled_call_impl is None and vars(other).keys() == states.keys()


class Planted(nn.Module):
    """A network with one fault of a kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 4), 0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


class Printing(Planted):
    def forward(self, inputs: Tensor) -> Tensor:
        print("called")
        return self.layer(inputs)


class Counting(Planted):
    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(inputs)


class Branching(Planted):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) if inputs.sum() > 0 else self.layer(-inputs)


class NumpyNoise(Planted):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) * float(np.random.rand())


class FixedDtype(Planted):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs.float()).float()


class Opaque(Planted):
    def forward(self, inputs: Tensor) -> Any:
        result = self.layer(inputs)
        result.__class__ = type("Own", (Tensor,), {})
        return result


CALLS = argparse.Namespace(count=0)


class CountingElsewhere(Planted):
    def forward(self, inputs: Tensor) -> Tensor:
        CALLS.count += 1
        return self.layer(inputs)


class PlainTensor(Planted):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(8)  # no buffer

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.add_(inputs.detach().sum(0))
        return self.layer(inputs)


FAULTS = {
    Printing: "it can't be compiled",
    Counting: "its forward changes calls",
    CountingElsewhere: "its forward changes an object",
    PlainTensor: "neither parameter nor buffer",
    Branching: "it can't be compiled",
    NumpyNoise: "draws from Python's or NumPy's generator",
    FixedDtype: "float64 copy",
    Opaque: "that is no plain tensor",
}


@pytest.mark.few("NumpyNoise", "Opaque", "Printing", "PlainTensor")
@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_a_module_that_can_not_be_compared_stays(modules, kind: type[nn.Module], capsys) -> None:
    model, plain = kind(), kind()
    plain.load_state_dict(model.state_dict())
    train(model, READY, modules.step_ended)
    printed = capsys.readouterr().out
    assert modules.part.stage == "off" and FAULTS[kind] in modules.part.reason, modules.part.reason
    assert model._compiled_call_impl is None
    modules.exchange.remove()
    train(plain, READY)
    assert_same_state(model, plain, bitwise=True)
    assert printed == capsys.readouterr().out  # a fork prints nothing


def _hooked() -> nn.Module:
    model = network()
    model[0].register_forward_hook(lambda *call: None)
    return model


def _wrapped() -> nn.Module:
    model = Planted()
    model.__class__ = type("DistributedDataParallel", (Planted,), {})
    return model


def _compiled() -> nn.Module:
    model = Planted()
    model.compile(backend="eager")
    return model


class Recurrent(Planted):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.cell(self.layer(inputs))[0]


UNFIT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hooks": (_hooked, "its part 0 (Linear) has hooks"),
    "recurrent": (Recurrent, "its part cell (LSTM) is recurrent"),
    "wrapped": (_wrapped, "it is wrapped by DistributedDataParallel"),
    "compiled": (_compiled, "the script uses torch.compile itself"),
    "bf16": (lambda: Planted().bfloat16(), "is bfloat16, and a proof needs float32"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_module_that_could_lose_something_stays(modules, case: str) -> None:
    make, reason = UNFIT[case]
    model = make()
    inputs = torch.randn(4, 8, dtype=next(model.parameters()).dtype)
    for _ in range(READY):
        model(inputs).sum().backward()
        modules.step_ended()
    assert modules.part.stage == "off" and reason in modules.part.reason
    assert case == "compiled" or model._compiled_call_impl is None


def test_reduced_precision_stays(modules) -> None:
    model = network()
    with torch.autocast("cpu", torch.bfloat16):
        train(model, 4, modules.step_ended)
    assert modules.part.stage == "off" and "autocast" in modules.part.reason


def test_exact_leaves_modules(modules) -> None:
    modules.exchange._exact = True
    train(network(), READY, modules.step_ended)
    assert modules.part.stage == "off" and "bitwise exchanges only" in modules.part.reason


def test_a_script_that_compiles_keeps_its_own_way(modules) -> None:
    model = network()
    train(model, 5, modules.step_ended)
    assert model._compiled_call_impl is not None
    torch.compile(lambda value: value, backend="eager")
    assert model._compiled_call_impl is None and "torch.compile itself" in modules.part.reason


def test_inputs_of_many_shapes_stay(modules) -> None:
    model = network()
    for rows in range(2, 30):
        train(model, 1, modules.step_ended, rows=rows)
    assert modules.part.stage == "off" and "kinds of shapes" in modules.part.reason


class Graph(Planted):
    """A graph network, whose adjacency matrix is sparse."""

    def forward(self, inputs: Tensor, adjacency: Any) -> Tensor:
        return adjacency @ self.layer(inputs)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_call_with_a_sparse_matrix_stays_the_script_s_own(modules, layout: torch.layout) -> None:
    model = Graph()
    inputs, adjacency = torch.randn(16, 8), torch.eye(16).to_sparse(layout=layout)
    expected = adjacency @ nn.functional.linear(inputs, model.layer.weight, model.layer.bias)
    for _ in range(READY):
        output = model(inputs, adjacency)
        output.square().mean().backward()
        modules.step_ended()
        assert torch.equal(output, expected)
    assert modules.part.stage == "off" and "an argument has a Tensor that is no plain tensor" in modules.part.reason


@pytest.mark.parametrize("text", ["g = grad(y, x, create_graph=True)", "torch.autograd.functional.jacobian(f, x)"])
def test_a_script_that_differentiates_twice_stays(
    modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "train.py").write_text(text)
    monkeypatch.setattr(module_limits, "_script_files", lambda: iter([tmp_path / "train.py"]))
    train(network(), READY, modules.step_ended)
    assert modules.part.stage == "off" and "differentiated twice" in modules.part.reason


def test_a_second_differentiation_in_a_package_is_noticed(modules) -> None:
    model = Planted()
    for _ in range(READY):
        inputs = torch.randn(4, 8)
        torch.autograd.grad(model(inputs).square().sum(), model.layer.weight, create_graph=True)[0].sum().backward()
        modules.step_ended()
    assert modules.part.stage == "off" and "differentiated twice" in modules.part.reason


@pytest.mark.slow
@pytest.mark.usefixtures("without_caches")
@pytest.mark.few("1.001")
@pytest.mark.parametrize("factor", [1.001, -1.0])
def test_a_wrong_gradient_is_refused(modules, monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Planted in a rewrite: the last product of the graph, which is a gradient, gets a factor."""

    def wrong(graph: torch.fx.GraphModule) -> int:
        product = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)[-1]
        with graph.graph.inserting_after(product):
            scaled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (product, factor))
        scaled.meta.update(product.meta)
        product.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
        return 1

    monkeypatch.setitem(REWRITE_FUNCTIONS, "mm_by_onednn", wrong)
    model = network()
    train(model, READY, modules.step_ended)
    assert modules.part.stage == "off"
    assert "the error of its gradient of" in modules.part.reason and "noise floor" in modules.part.reason


@pytest.fixture
def used(modules, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Any]:
    """A network whose exchange is used, and the exchange's part."""
    monkeypatch.setattr(part_module, "RECHECK_CALLS", 10**9)
    model = network()
    train(model, PROVEN, modules.step_ended)
    assert modules.part.stage == "race"
    modules.part.stage = "use"
    train(model, 2, modules.step_ended)
    assert modules.part.stage == "use"
    return model, modules.part


def _fails(site: Any, model: nn.Module) -> None:
    def failing(*args: Any) -> Any:
        raise RuntimeError("planted")

    site._compiled = failing


def _is_hooked(site: Any, model: nn.Module) -> None:
    model[0].register_forward_hook(lambda *call: None)


def _is_replaced(site: Any, model: nn.Module) -> None:
    model[4] = nn.Sequential(nn.Linear(32, 4), nn.Tanh())


LATER = {_fails: "planted", _is_hooked: "has hooks", _is_replaced: "the module changed"}


@pytest.mark.slow
@pytest.mark.few("_fails")
@pytest.mark.parametrize("change", LATER, ids=lambda change: change.__name__)
def test_an_exchange_that_fails_later_is_taken_back_and_the_run_goes_on(modules, used, change: Any) -> None:
    model, part = used
    (site,) = modules.exchange._sites.values()
    plain = copy.deepcopy(model)
    change(site, model)
    plain[4] = copy.deepcopy(model[4])
    losses = train(model, 5, modules.step_ended)
    assert part.stage == "off" and "was taken back" in part.notes[0] and LATER[change] in part.notes[0]
    assert "\n" not in part.notes[0] and model._compiled_call_impl is None
    assert losses == train(plain, 5)
    assert_same_state(model, plain, bitwise=True)


@pytest.mark.more
def test_an_error_of_a_signals_handler_reaches_the_script(modules, used, end_by_signal) -> None:
    model, part = used
    (site,) = modules.exchange._sites.values()
    site._compiled = end_by_signal
    with pytest.raises(TimeoutError):
        train(model, 1, modules.step_ended)
    assert part.stage == "use" and not part.notes


@pytest.mark.more
def test_an_exchange_that_becomes_wrong_is_taken_back(modules, used, monkeypatch: pytest.MonkeyPatch) -> None:
    model, part = used
    monkeypatch.setattr(module_site, "RECHECK_CALLS", 3)
    (site,) = modules.exchange._sites.values()
    compiled = site._compiled
    site._compiled = lambda *args: compiled(*args) * 1.001
    train(model, 8, modules.step_ended)
    assert part.stage == "off" and "times the noise floor" in part.notes[0]


@pytest.mark.more
def test_evaluation_and_other_batches_stay_eager(modules, used) -> None:
    model, part = used
    (site,) = modules.exchange._sites.values()
    calls = []
    compiled = site._compiled
    site._compiled = lambda *args: calls.append(args) or compiled(*args)
    train(model, 1, rows=3)
    model.eval()
    with torch.no_grad():
        model(torch.randn(16, 8))
    assert not calls
    model.train()
    train(model, 1)
    assert len(calls) == 1 and part.stage == "use"


def test_the_race_compares_whole_steps(modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by one second in a step with the exchange, and by two in others."""
    now = [0.0]
    set_clocks(monkeypatch, lambda: now[0])
    model = network()
    train(model, 5, modules.step_ended)
    (site,) = modules.exchange._sites.values()
    modules.part.stage = "race"
    for _ in range(40):
        now[0] += 1.0 if site.exchanges_step else 2.0
        site.calls_in_step = 1
        modules.step_ended()
    assert modules.part.stage == "use" and modules.part.ratio.median == pytest.approx(2.0)


def _results(**changes: Tensor) -> dict[str, Tensor]:
    return {"output 0": torch.ones(4), "gradient of weight": torch.ones(3), **changes}


def test_errors_are_counted_in_multiples_of_the_noise_floor() -> None:
    wide = {name: value.double() for name, value in _results().items()}
    near = _results(**{"gradient of weight": torch.ones(3) * (1 + 1e-5)})
    found = compare_results(_results(), near, [_results()], wide)
    assert found["errors"]["output 0"] == 0 and found["errors"]["gradient of weight"] > 100
    assert not found["is_bitwise"] and compare_results(_results(), _results(), [], wide)["is_bitwise"]
    far = _results(**{"gradient of weight": torch.ones(3) * (1 + 1e-5)})
    assert compare_results(_results(), near, [far], wide)["errors"]["gradient of weight"] == pytest.approx(1)
    other_draws = {**far, "output 0": torch.ones(4) * 1.1}  # no harmless change
    assert compare_results(_results(), near, [other_draws], wide)["errors"]["gradient of weight"] > 100
    lost = {name: value for name, value in _results().items() if name == "output 0"}
    assert compare_results(_results(), lost, [], wide)["errors"] == {"gradient of weight": float("inf")}
    other = {**wide, "output 0": wide["output 0"] * 2}
    assert "differs altogether" in compare_results(_results(), _results(), [], other)["failure"]
    overflow = {**wide, "output 0": wide["output 0"] * float("inf")}
    assert compare_results(_results(), _results(), [], overflow)["numbers"] == 0


def test_the_limits_are_those_of_check() -> None:
    errors = ModuleErrors()
    assert errors.add({"a": 20.0}) == errors.add({"a": 1.0}) == "" and not errors.is_enough
    assert errors.add({"a": 1.0}) == "" and errors.is_enough
    assert "typical error of its a is 5" in errors.add({"a": 5.0}) + errors.add({"a": 6.0})
    assert "the error of its a is 33" in ModuleErrors().add({"a": 33.0})


def test_a_fork_that_hangs_is_ended(modules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_proof, "compile_and_prove", lambda *call: time.sleep(1000))
    model, plain = network(), network()
    losses = train(model, 16, lambda: modules.exchange.step_ended(modules.exchange._steps + 1))
    (site,) = modules.exchange._sites.values()
    assert site.process is not None
    monkeypatch.setattr(module_site.time, "monotonic", lambda: float("inf"))
    losses += train(model, 1, lambda: modules.exchange.step_ended(modules.exchange._steps + 1))
    assert site.process is None and "did not finish" in modules.part.reason
    assert losses == train(plain, 16) + train(plain, 1)


@pytest.mark.more
def test_a_script_s_output_exit_code_and_files_are_those_of_python(tmp_path: Path) -> None:
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    options = ["run", str(SCRIPT), "--record", "record.json", "--"]
    ends = [
        subprocess.run([sys.executable, *command, f], cwd=tmp_path, env=environment, capture_output=True, text=True)
        for f, command in {"plain.pt": [str(SCRIPT)], "hosted.pt": ["-m", "hotloop", *options]}.items()
    ]
    assert ends[0].stdout == ends[1].stdout
    assert [end.returncode for end in ends] == [3, 3]
    record = json.loads((tmp_path / "record.json").read_text())
    (part,) = (part for part in record["parts"] if part["kind"] == "module")
    assert part["proven"] >= 3, part
    plain, hosted = (torch.load(tmp_path / name, weights_only=False) for name in ("plain.pt", "hosted.pt"))
    assert_same_state(hosted["model"], plain["model"], bitwise=False)
    assert type(hosted["model"]) is nn.Sequential and hosted["model"]._compiled_call_impl is None
    assert torch.load(tmp_path / "hosted.pt", weights_only=False)["state"].keys() == plain["state"].keys()
