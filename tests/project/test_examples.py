"""Each example trains, learns, and goes on exactly after a stop; without its library it says how to install it."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hotloop
from hotloop.errors import TaskError
from hotloop.task_file import load_task
from tests.conftest import RunCli
from tests.support.programs import advance, assert_resumes

EXAMPLES = Path(__file__).parents[2] / "examples"

# The Task's name in its file, and the epochs after which it has learnt something.
HERE = {
    "recipe.py": 3,
    "language.py": 3,
    "vae.py": 2,
    "lengths.py": 3,
    "two_inputs.py": 4,
    "loader.py": 2,
    "written_out.py": 2,
    "with_transformers.py:bert": 4,
    "with_transformers.py:gpt2": 5,
    "with_transformers.py:vit": 2,
    "with_keras.py": 1,
    "with_datasets.py": 2,
    "with_timm.py": 2,
}
LIBRARIES = ("transformers", "keras", "datasets", "timm")
ELSEWHERE = {
    "fashion.py",  # tested with the data it is about
    "gan.py",  # no loss of whose falls
}


@pytest.fixture(autouse=True)
def modules_stay_apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an example imports by name, or puts on the path, is forgotten again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    yield
    for name in names & sys.modules.keys():
        del sys.modules[name]


def example(reference: str) -> hotloop.Task:
    """The Task of an example; skips with the reason where its library can't be imported."""
    try:
        return load_task(str(EXAMPLES / reference)).task
    except TaskError as error:
        if not isinstance(error.__cause__, ImportError | RuntimeError) or "with_" not in reference:
            raise
        pytest.skip(str(error))


def test_every_example_is_tested() -> None:
    assert {reference.partition(":")[0] for reference in HERE} | ELSEWHERE == {
        path.name for path in EXAMPLES.glob("*.py")
    }


@pytest.mark.few("recipe.py", "language.py", "lengths.py", "loader.py", "with_keras.py", "with_datasets.py")
@pytest.mark.parametrize(
    "reference", [pytest.param(name, marks=[pytest.mark.more] * name.endswith(":bert")) for name in HERE]
)
def test_it_learns(reference: str) -> None:
    """The training loss of an epoch falls well below that of the first steps."""
    program = hotloop.lower(example(reference))
    program.advance(2)
    first = program.read_sums()
    for _ in range(HERE[reference]):
        while not program.advance(1000).ended:
            pass
        last = program.read_sums()
        program.end_epoch(last["loss"] / last["weight"])
    program.close()
    assert last["loss"] / last["weight"] < 0.85 * first["loss"] / first["weight"]


@pytest.mark.more
def test_the_generator_of_the_gan_learns_the_mean_image() -> None:
    task = example("gan.py")
    program = hotloop.lower(task)
    mean = task.roles.train.columns.mean(0)  # type: ignore[attr-defined]

    def distance() -> float:
        codes = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
        with program.inference() as model:
            return float((task.output(model, codes).mean(0) - mean).square().mean())

    before = distance()
    advance(program, 60)
    assert distance() < 0.25 * before
    sums = program.read_sums()
    assert 0 < sums["fake"] < sums["real"] < sums["weight"]


@pytest.mark.few("loader.py", "gan.py", "two_inputs.py", "recipe.py")
@pytest.mark.parametrize("reference", [*HERE, "gan.py"])
def test_it_goes_on_exactly(reference: str) -> None:
    assert_resumes(example(reference), stop=2, steps=4)


@pytest.mark.more
@pytest.mark.parametrize("reference", ["language.py"])
def test_it_runs_from_the_command_line(reference: str, run_cli: RunCli, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_cli(
        "train", EXAMPLES / reference, "--epochs", "1", "--device", "cpu", "--run", tmp_path / "run", env=environment
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "source" / reference).is_file()
    assert "bits_per_letter" in done.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_without_its_library_it_says_how_to_install_it(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(TaskError, match=rf"pip install {library}$") as caught:
        load_task(str(EXAMPLES / f"with_{library}.py"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_its_docstring_says_how_to_run_it(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert f"hotloop train examples/{path.name}" in text
    if path.name.startswith("with_"):
        assert f"pip install {path.stem.removeprefix('with_')}" in text


def test_the_numbers_of_the_loader_are_the_same_with_workers() -> None:
    task = example("loader.py")
    states = []
    for workers in (0, 2):
        program = hotloop.lower(task, hotloop.Plan(workers=workers))
        advance(program, 3)
        program.close()
        states.append(program.state().parameters)
    assert all(value.equal(states[1][name]) for name, value in states[0].items())
