"""What can be imported, and nothing else by accident."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import hotloop
import hotloop.arrays
import hotloop.data

PUBLIC = {
    "hotloop": [
        "HotloopError",
        "Parameters",
        "Plan",
        "Run",
        "Task",
        "View",
        "advise",
        "arrays",
        "check",
        "choose_plan",
        "data",
        "devices",
        "errors",
        "estimate_step",
        "evaluate",
        "explain",
        "export",
        "find_batch_size",
        "find_learning_rate",
        "fit",
        "load_model",
        "lower",
        "predict",
        "profile",
        "race",
        "study",
        "summary",
        "tune",
    ],
    "hotloop.arrays": [
        "AdaDelta",
        "AdaGrad",
        "Adam",
        "AdamW",
        "At",
        "AveragePool",
        "BatchNorm",
        "BinaryCrossEntropy",
        "Chain",
        "Conv",
        "CrossEntropy",
        "Dense",
        "Dropout",
        "ELU",
        "Embedding",
        "Epoch",
        "Flatten",
        "GELU",
        "Graph",
        "Identity",
        "LSTM",
        "Layer",
        "LayerNorm",
        "LayerTime",
        "LeakyReLU",
        "Loss",
        "MaxPool",
        "Mean",
        "Momentum",
        "Nesterov",
        "Network",
        "Optimizer",
        "RMSProp",
        "RNN",
        "ReLU",
        "Reshape",
        "Residual",
        "SGD",
        "SiLU",
        "Sigmoid",
        "Softmax",
        "Softplus",
        "SquaredError",
        "Step",
        "Tanh",
    ],
    "hotloop.data": [
        "Bundle",
        "Draws",
        "Standardize",
        "compose",
        "csv",
        "digits",
        "fashion_mnist",
        "image_folder",
        "mnist",
        "random_crop",
        "random_erase",
        "random_flip",
    ],
}
NAMES = [(module, name) for module, names in PUBLIC.items() for name in names]


@pytest.mark.parametrize("module", PUBLIC)
def test_the_list_is_complete(module: str) -> None:
    assert sorted(importlib.import_module(module).__all__) == PUBLIC[module]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_each_name_is_there_and_explains_itself(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    assert callable(value) or inspect.ismodule(value)
    assert inspect.getdoc(value), f"{module}.{name} has no docstring"


@pytest.mark.parametrize("name", PUBLIC["hotloop"])
def test_each_name_is_the_same_however_it_is_imported_first(name: str) -> None:
    """Importing a module must not put itself in the place of a function of the same name."""
    modules = sorted(path.stem for path in Path(hotloop.__file__).parent.iterdir() if path.stem[0] not in "_.")
    assert name not in modules or name in ("arrays", "data", "errors")


def test_names_are_offered_for_completion() -> None:
    assert set(PUBLIC["hotloop"]) <= set(dir(hotloop))


@pytest.mark.parametrize("module", PUBLIC)
def test_an_unknown_name_is_an_attribute_error(module: str) -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_sort"):
        importlib.import_module(module).nothing_of_the_sort  # noqa: B018


def test_a_star_import_brings_the_public_names(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    exec("from hotloop import *", names)
    assert sorted(names.keys() - {"__builtins__"}) == PUBLIC["hotloop"]


@pytest.mark.parametrize("names", ["", "errors", "arrays", "Plan, HotloopError, errors"])
def test_what_needs_no_torch_brings_none(names: str) -> None:
    code = f"import sys, hotloop\n{f'from hotloop import {names}' if names else ''}\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.more
def test_a_training_that_races_nothing_pays_for_no_statistics() -> None:
    code = "import sys, hotloop.api, hotloop.tuning.search\nsys.exit('scipy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert hotloop.__version__ == version("hotloop")


def test_it_says_that_it_is_typed() -> None:
    assert (Path(hotloop.__file__).parent / "py.typed").is_file()
