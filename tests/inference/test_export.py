"""A trained network as a file: it answers as the model does, alone, or it isn't there."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import textwrap
import warnings
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.records.training import ExportRecord
from hotloop.errors import ExportError
from hotloop.training.run import Run
from tests.support.programs import a_task, labelled, trained

ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not ONNX, reason="ONNX isn't installed here: pip install 'hotloop[onnx]'")
GRAPHS = ["pt2", pytest.param("onnx", marks=needs_onnx)]
FORMATS = [*GRAPHS, "pt", "safetensors"]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 5, stride=3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(128, 10)
    )


@pytest.fixture(scope="module")
def images() -> hotloop.data.Bundle:
    return hotloop.data.digits()


@pytest.fixture(scope="module")
def digits(tmp_path_factory, images) -> Run:
    task = a_task(model=network, data=images, batch_size=64, average=0.9)
    return trained(task, tmp_path_factory.mktemp("export") / "run")


ALONE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hotloop":
            raise ImportError("there is no hotloop here")

sys.meta_path.insert(0, Blocker())
for name in list(sys.modules):
    assert name.split(".")[0] != "hotloop", name

import numpy as np, torch
from torch import nn

images, prepared, expected = (torch.from_numpy(np.load(f"{name}.npy")) for name in ("images", "prepared", "expected"))
model = nn.Sequential(
    nn.Conv2d(1, 2, 5, stride=3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(128, 10)
).eval()
"""

LOADED = {
    "pt2": "found = torch.export.load('model.pt2').module()(images)",
    "pt": "model.load_state_dict(torch.load('model.pt', weights_only=True)); found = model(prepared)",
    "safetensors": """
        import safetensors.torch
        model.load_state_dict(safetensors.torch.load_file('model.safetensors'))
        found = model(prepared)
    """,
    "onnx": """
        import onnxruntime
        session = onnxruntime.InferenceSession('model.onnx')
        assert [port.name for port in session.get_inputs()] == ["input"]
        assert [port.name for port in session.get_outputs()] == ["output"]
        assert session.get_inputs()[0].shape == ["batch", 28, 28]
        found = torch.from_numpy(session.run(None, {"input": images.numpy()})[0])
    """,
}


@pytest.fixture(scope="module")
def exported(digits, tmp_path_factory) -> Callable[[str], ExportRecord]:
    """Exports the run to a format, each once."""
    folder = tmp_path_factory.mktemp("exported")
    return cache(lambda kind: hotloop.export(digits, folder / f"model.{kind}"))


@pytest.fixture(scope="module")
def differences_alone(digits, images, exported) -> dict[str, float]:
    """What a process without hotloop found each file's outputs to differ by."""
    kinds = [kind for kind in LOADED if kind != "onnx" or ONNX]
    folder = Path(exported(kinds[0]).file).parent
    x = images.test[0][:50]
    np.save(folder / "images.npy", x.numpy())
    np.save(folder / "prepared.npy", images.prepare(x).numpy())
    np.save(folder / "expected.npy", hotloop.predict(digits, x))
    code = ALONE
    for kind in kinds:
        exported(kind)
        code += f"{textwrap.dedent(LOADED[kind])}\nprint({kind!r}, float((found - expected).abs().max()))\n"
    alone = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert alone.returncode == 0, alone.stderr
    return {kind: float(value) for kind, value in map(str.split, alone.stdout.splitlines())}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_gives_the_same_where_there_is_no_hotloop(exported, differences_alone, kind) -> None:
    assert differences_alone[kind] < 1e-5
    done = exported(kind)
    assert (done.format, done.size_bytes) == (kind, Path(done.file).stat().st_size)


@pytest.mark.parametrize("kind", GRAPHS)
def test_a_graph_holds_neither_hotloop_nor_paths_nor_training_data(exported, images, kind) -> None:
    path = Path(exported(kind).file)
    parts = [path.read_bytes()]
    if kind == "pt2":
        with zipfile.ZipFile(path) as archive:
            parts = [archive.read(name) for name in archive.namelist()]
    sample = images.train[0][0].numpy().tobytes()
    for part in parts:
        assert b"hotloop" not in part and str(Path(__file__).parents[2]).encode() not in part
        assert sample not in part


@pytest.mark.parametrize("kind", GRAPHS)
def test_what_the_record_says_of_a_graph(exported, kind) -> None:
    done = exported(kind)
    assert done.prepare is True
    assert [port.model_dump() for port in done.inputs] == [
        {"name": "input", "dtype": "uint8", "shape": ["batch", 28, 28]}
    ]
    assert [port.model_dump() for port in done.outputs] == [
        {"name": "output", "dtype": "float32", "shape": ["batch", 10]}
    ]
    assert 1 in done.batch_sizes and len(done.batch_sizes) > 1
    assert done.difference <= done.tolerance < 0.01


def load(path: Path) -> Any:
    return torch.export.load(path).module()


def test_without_prepare_the_file_takes_prepared_inputs(digits, images, tmp_path) -> None:
    done = hotloop.export(digits, tmp_path / "model.pt2", prepare=False)
    assert (done.prepare, done.inputs[0].dtype, done.inputs[0].shape) == (False, "float32", ["batch", 1, 28, 28])
    x = images.test[0][:3]
    found = load(tmp_path / "model.pt2")(images.prepare(x)).detach().numpy()
    np.testing.assert_allclose(found, hotloop.predict(digits, x), atol=1e-6)


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_weights_are_the_state_dict_with_averages_in_place(digits, tmp_path, kind) -> None:
    path = tmp_path / f"model.{kind}"
    done = hotloop.export(digits, path)
    found = torch.load(path, weights_only=True) if kind == "pt" else safetensors.torch.load_file(path)
    own = hotloop.load_model(digits).state_dict()
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
    assert (done.prepare, done.inputs, done.outputs) == (None, [], [])


def test_best_and_last_weights(tmp_path) -> None:
    x, y = labelled(40)
    task = a_task(data=(x, y), validation=(x, y), monitor="validation_loss", goal="max", epochs=2)
    run = trained(task, tmp_path / "run")
    for weights, epoch in (("best", 1), ("last", 2)):
        done = hotloop.export(run, tmp_path / "model.pt", weights=weights)
        own = hotloop.load_model(run, weights=weights).weight
        assert torch.equal(torch.load(tmp_path / "model.pt")["weight"], own)
        assert (done.weights, done.epoch) == (weights, epoch)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(2, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.a(a) + self.b(b)


@pytest.mark.few("pt2")
@pytest.mark.parametrize("kind", GRAPHS)
def test_several_inputs_and_outputs_keep_their_names(tmp_path, kind) -> None:
    x, y = labelled()
    z = x[:, :2] + 1
    task = a_task(
        model=Two,
        data={"first": x, "second": z, "label": y},
        step=lambda model, batch: nn.functional.cross_entropy(model(batch["first"], batch["second"]), batch["label"]),
        predict=lambda model, batch: {"scores": model(batch["first"], batch["second"]), "twice": 2 * batch["first"]},
    )
    run = trained(task, tmp_path / "run")
    done = hotloop.export(run, tmp_path / f"model.{kind}")
    assert [port.name for port in done.inputs] == ["first", "second", "label"]
    assert [port.name for port in done.outputs] == ["scores", "twice"]
    expected = hotloop.predict(run, {"first": x, "second": z, "label": y})
    if kind == "pt2":
        found = load(tmp_path / "model.pt2")({"first": x, "second": z, "label": y})
        found = {name: value.detach().numpy() for name, value in found.items()}
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        given = {"first": x.numpy(), "second": z.numpy(), "label": y.numpy()}
        used = {port.name: given[port.name] for port in session.get_inputs()}
        found = dict(zip([port.name for port in session.get_outputs()], session.run(None, used), strict=True))
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-6)


@pytest.mark.more
def test_a_tuple_of_inputs(tmp_path) -> None:
    x, y = labelled()
    z = x[:, :2] + 1
    run = trained(a_task(model=Two, data=(x, z, y)), tmp_path / "run")
    done = hotloop.export(run, tmp_path / "model.pt2")
    assert [port.name for port in done.inputs] == ["input_0", "input_1"]
    found = load(tmp_path / "model.pt2")(x[:1], z[:1]).detach().numpy()
    np.testing.assert_allclose(found, hotloop.predict(run, (x[:1], z[:1])), atol=1e-6)


# --- what can't be exported, and is said to be so


def refused(task: hotloop.Task, folder: Path, name: str = "model.pt2", **options: Any) -> str:
    """The error's one line; nothing is left behind, and a file that was there stays as it was."""
    run = trained(task, folder / "run")
    (folder / name).write_text("what was here before")
    before = sorted(folder.iterdir())
    with pytest.raises(ExportError) as error:
        hotloop.export(run, folder / name, **options)
    assert sorted(folder.iterdir()) == before
    assert (folder / name).read_text() == "what was here before"
    assert "\n" not in str(error.value)
    return str(error.value)


class Positions(nn.Linear):
    """Its output depends on how many samples there are, in a way that fits four alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.arange(4.0)[:, None] if len(x) == 4 else super().forward(x)


@pytest.mark.more
def test_a_model_for_one_batch_size_is_offered_that(tmp_path) -> None:
    task = a_task(model=lambda: Positions(6, 3))
    assert "any number of samples" in (line := refused(task, tmp_path)) and "batch_size=" in line
    done = hotloop.export(tmp_path / "run", tmp_path / "model.pt2", task=task, batch_size=4)
    assert (done.inputs[0].shape, done.batch_sizes) == ([4, 6], [4])
    model, x = hotloop.load_model(tmp_path / "run", task=task), labelled()[0][:4]
    assert torch.allclose(load(tmp_path / "model.pt2")(x), model(x))


class ByLength(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(len(x), -1))


@pytest.mark.few("pt2")
@pytest.mark.parametrize("kind", GRAPHS)
def test_len_of_a_batch_is_no_constant(tmp_path, kind) -> None:
    run = trained(a_task(model=lambda: ByLength(6, 3)), tmp_path / "run")
    assert hotloop.export(run, tmp_path / f"model.{kind}").inputs[0].shape == ["batch", 6]


def test_a_batch_size_of_one(tmp_path) -> None:
    run = trained(a_task(), tmp_path / "run")
    assert hotloop.export(run, tmp_path / "model.pt2", batch_size=1).inputs[0].shape == [1, 6]
    with pytest.raises(ExportError, match="batch_size=0"):
        hotloop.export(run, tmp_path / "model.pt2", batch_size=0)


def by_lists(x: Tensor) -> Tensor:
    return torch.tensor([[2 * value for value in row] for row in x.tolist()])


@pytest.mark.more
def test_a_prepare_that_cannot_be_captured_can_be_left_out(tmp_path) -> None:
    task = a_task(prepare=by_lists)
    assert "prepare=False" in refused(task, tmp_path)
    done = hotloop.export(tmp_path / "run", tmp_path / "model.pt2", task=task, prepare=False)
    x = labelled()[0]
    found = load(tmp_path / "model.pt2")(by_lists(x)).detach().numpy()
    assert done.prepare is False
    np.testing.assert_allclose(found, hotloop.predict(tmp_path / "run", x, task=task), atol=1e-6)


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > -1e9 else -super().forward(x)


@pytest.mark.few("pt2")
@pytest.mark.parametrize("kind", GRAPHS)
def test_a_model_that_cannot_be_captured_still_has_weights(tmp_path, kind, capfd) -> None:
    task = a_task(model=lambda: Branching(6, 3))
    line = refused(task, tmp_path, f"model.{kind}")
    assert capfd.readouterr() == ("", "")
    assert "can't be captured" in line and ".safetensors" in line
    hotloop.export(tmp_path / "run", tmp_path / "model.safetensors", task=task)


class Drawing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(len(x), 3)


class Forgetful(nn.Linear):
    """Learns something that its state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return super().forward(x) + self.seen


@pytest.mark.parametrize(
    ("model", "name"),
    [(lambda: Drawing(6, 3), "model.pt2"), (Forgetful, "model.pt"), (Forgetful, "model.safetensors")],
)
def test_a_file_that_answers_differently_is_not_left_behind(tmp_path, model, name) -> None:
    assert "differs from the model" in refused(a_task(model=model), tmp_path, name)


def test_a_graph_keeps_what_a_state_dict_leaves_out(tmp_path) -> None:
    run = trained(a_task(model=Forgetful), tmp_path / "run")
    hotloop.export(run, tmp_path / "model.pt2")
    x = labelled()[0]
    assert torch.allclose(load(tmp_path / "model.pt2")(x), hotloop.load_model(run)(x))


class Counting(nn.Linear):
    """Has state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"note": "extra"}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_safetensors_holds_tensors_alone(tmp_path) -> None:
    task = a_task(model=lambda: Counting(6, 3))
    assert "no tensor" in refused(task, tmp_path, "model.safetensors")
    hotloop.export(tmp_path / "run", tmp_path / "model.pt", task=task)


class Shared(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize("kind", ["pt2", "pt", "safetensors"])
def test_shared_weights(tmp_path, kind) -> None:
    run = trained(a_task(model=Shared), tmp_path / "run")
    assert hotloop.export(run, tmp_path / f"model.{kind}").difference == 0


@pytest.mark.parametrize("name", ["model.h5", "model", "model.pth2"])
def test_an_unknown_format(digits, tmp_path, name) -> None:
    with pytest.raises(ExportError, match=r"\.pt2, \.onnx, \.pt, \.safetensors"):
        hotloop.export(digits, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_onnx_that_is_not_installed_is_named_with_the_command(digits, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("hotloop.inference.export_formats.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r'onnx.*pip install "hotloop\[onnx\]"'):
        hotloop.export(digits, tmp_path / "model.onnx")


def test_exporting_leaves_logging_warnings_and_random_numbers_alone(digits, tmp_path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    filters = list(warnings.filters)
    hotloop.export(digits, tmp_path / "model.pt2")
    assert torch.equal(torch.rand(3), expected)
    assert (logging.root.manager.disable, list(warnings.filters)) == (0, filters)
