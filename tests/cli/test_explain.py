"""`hotloop explain`: in words, as JSON, and what it says of mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hotloop.core.records.explanation import Explanation
from hotloop.explainer import explain
from tests.support.processes.in_process_command import SMALL, Hotloop, commands


@pytest.fixture
def hotloop(tmp_path: Path, monkeypatch, capfd) -> Iterator[Hotloop]:
    (tmp_path / "task.py").write_text(
        f"{SMALL}def task(epochs: int = 1):\n    print('made')\n    return make(epochs=epochs)\n"
    )
    with commands(tmp_path, monkeypatch, capfd) as run:
        yield run


def test_as_json(hotloop: Hotloop) -> None:
    done = hotloop("explain", "task.py", "--batch-size", "7", "--json")
    assert done.code == 0
    assert "made" in done.err
    explanation = Explanation(**done.document)
    assert explanation.batch == ["7x4", "7"]
    linear, loss = explanation.layers
    assert (linear.operation, linear.parameters, linear.known) == ("linear", 15, True)
    assert [(one.result, one.text, one.flops, one.agrees) for one in linear.equations] == [
        ("Z", "X W^T + b", 2 * 7 * 4 * 3, True),
        ("dW", "dZ^T X = sum of dz_n^T x_n over the rows n", 2 * 7 * 4 * 3, True),
        ("db", "sum of dz_n over the rows n", 21, True),
    ]
    assert (loss.module, loss.operation) == ("(loss)", "cross_entropy_loss")
    assert explanation.gradients == (2, 2)
    assert linear.notes == ["no dX: X needs no gradient, since nothing before it is trained"]
    assert explanation.example is not None and explanation.example.difference == 0


def test_in_words(hotloop: Hotloop) -> None:
    done = hotloop("explain", "task.py", "-p", "epochs=2")
    assert (done.code, done.out) == (0, "made\n")
    assert "the model (Linear), 15 parameters" in done.err
    assert "dW = dZ^T X" in done.err
    assert "agree with torch and autograd" in " ".join(done.err.split())


def test_the_page_as_a_file(hotloop: Hotloop, tmp_path: Path) -> None:
    assert hotloop("explain", "task.py", "--html", "page.html").code == 0
    assert "The backward pass of a linear layer" in (tmp_path / "page.html").read_text()
    done = hotloop("explain", "task.py", "--html", "task.py/page.html", "--json")
    assert done.code == 1 and "task.py/page.html" in done.err and Explanation(**done.document).layers


def test_a_frozen_weight_has_no_gradient(hotloop: Hotloop, tmp_path: Path) -> None:
    frozen = "nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3))"
    (tmp_path / "frozen.py").write_text(f"{SMALL}task = make(model=lambda: {frozen})\n")
    first, second, _ = Explanation(**hotloop("explain", "frozen.py", "--json").document).layers
    assert first.notes == ["no gradient reaches this layer"]
    assert second.notes == ["no dX: X needs no gradient, since nothing before it is trained"]


def test_a_wrong_equation_is_shown_and_fails(hotloop: Hotloop, monkeypatch: pytest.MonkeyPatch) -> None:
    formula = explain.FORMULAS["linear"]

    def wrong(call):
        worked = formula(call)
        return replace(worked, backward=[replace(worked.backward[1], value=lambda: 2 * worked.backward[1].value())])

    monkeypatch.setattr(explain, "FORMULAS", {**explain.FORMULAS, "linear": wrong})
    done = hotloop("explain", "task.py")
    assert done.code == 1
    assert "WRONG: dW of the model (Linear)" in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("nowhere.py",), 1, "no file nowhere.py"),
        (("task.py", "--batch-size", "0"), 2, "--batch-size is 0; expected 1 or more"),
        (("task.py:other",), 1, "no Task named 'other'"),
        (("detached.py",), 1, "the loss is no single number with a gradient"),
        (("fails.py",), 1, "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_mistakes_are_one_line(arguments, code, says, hotloop: Hotloop, tmp_path: Path) -> None:
    (tmp_path / "detached.py").write_text(f"{SMALL}task = make(loss=lambda out, y: out.detach().sum())\n")
    (tmp_path / "fails.py").write_text(f"{SMALL}task = make(model=lambda: nn.Linear(5, 3), loss=nn.MSELoss())\n")
    done = hotloop("explain", *arguments, "--json")
    assert done.code == code
    assert says in done.document["error"]["message"]
    assert "Traceback" not in done.err
