"""An explanation in a terminal: its equations, what agrees, what doesn't, and what isn't known."""

from __future__ import annotations

import io

from rich.console import Console

from hotloop.core.records.explanation import Equation, Explanation, LayerExplanation, MatrixRecord
from hotloop.explainer.explain import linear_example
from hotloop.report.explanation import explanation_html, explanation_page


def equation(result: str, difference: float | None = 1e-16, agrees: bool | None = True) -> Equation:
    largest = None if difference is None else 0.5
    return Equation(
        result=result,
        text="A B[red]",
        shape=[3],
        flops=2e6,
        bytes=100,
        difference=difference,
        largest=largest,
        agrees=agrees,
    )


def test_layers_are_shown_as_they_are_written_out() -> None:
    given = dict(task="t", batch=["2x3"], parameters=1, layers=[], flops=0, bytes=0)
    out = io.StringIO()
    Console(file=out, width=100).print(
        explanation_page(Explanation(**given, written={"Dense": "forward   Y = X Wᵀ [b]"}))
    )
    assert "hotloop.arrays.Dense" in out.getvalue()
    assert "Y = X Wᵀ" not in out.getvalue()  # the page has one notation


def test_the_lesson_comes_first_and_has_the_numbers_of_the_example() -> None:
    """By hand: dZ = (Z - T) / 2, and dW is the sum of an outer product for each of the two samples."""
    example = linear_example()
    assert example.difference == 0
    assert example.dz == [[0.5, 1], [-1, -1]]
    assert example.outer == [[[0.5, 1, 0], [1, 2, 0]], [[0, -1, -3], [0, -1, -3]]]
    assert (example.dw, example.db) == ([[0.5, 0, -3], [1, 1, -3]], [-0.5, 0])
    assert example.dx == [[2.5, 1, -0.5], [-3, -1, 1]]
    text = shown(explanation(LINEAR).model_copy(update={"example": example}))
    assert text.startswith("The backward pass of a linear layer")
    assert text.index("autograd computes the same numbers") < text.index("net.0 (Linear)")
    assert "dW  O x I  dW = dZ^T X = sum of dz_n^T x_n over n" in text
    assert "    0.5    1    0         0   -1   -3       0.5    0   -3" in text
    assert "The first layer has no dX: its X is data." in text


def test_the_page_in_html_needs_no_other_file() -> None:
    page = explanation_html(explanation(LINEAR).model_copy(update={"example": linear_example()}))
    assert page.startswith("<!DOCTYPE html>") and "dW = dZ^T X" in page and "net.0 (Linear)" in page
    assert "<script" not in page and "src=" not in page and "http" not in page


LINEAR = LayerExplanation(
    module="net.0",
    kind="Linear",
    operation="linear",
    call=2,
    where="/far/away/model.py:7",
    parameters=1234,
    matrices=[MatrixRecord(name="X", shape=[8, 4]), MatrixRecord(name="Z", shape=[8, 3])],
    forward=[equation("Z")],
    backward=[equation("dX", None, None), equation("dW")],
)
FLATTEN = LayerExplanation(
    module="net.1",
    kind="Flatten",
    operation="flatten",
    matrices=[MatrixRecord(name="X", shape=[8, 4, 2]), MatrixRecord(name="Z", shape=[8, 8])],
    forward=[Equation(result="Z", text="X", shape=[8, 8], flops=0, bytes=0)],
)
UNKNOWN = LayerExplanation(
    module="net.2",
    kind="Mine",
    operation="MineBackward",
    known=False,
    matrices=[MatrixRecord(name="output", shape=[8, 2])],
)


def explanation(*layers: LayerExplanation, unexplained: list[str] | None = None) -> Explanation:
    missing = unexplained or []
    return Explanation(
        task="t[bold]",
        batch=["8x4"],
        parameters=1234,
        layers=list(layers),
        flops=6e6,
        bytes=300,
        worst="net.0: dW",
        difference=2e-16,
        gradients=(2 - len(missing), 2),
        unexplained=missing,
    )


def shown(one: Explanation, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(explanation_page(one))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    return text


def test_equations_without_any_difference() -> None:
    """As those of one linear layer are, in float64."""
    words = " ".join(shown(explanation(LINEAR).model_copy(update={"difference": 0.0})).split())
    assert "equations that can be compared agree with torch and autograd. The network's own" in words


def test_layers_with_their_equations() -> None:
    text = shown(explanation(LINEAR, FLATTEN))
    assert "t[bold]: a batch of 8x4; 1,234 parameters" in text
    assert "net.0 (Linear), call 2, 1,234 parameters  (model.py:7)" in text
    assert "X 8x4   Z 8x3" in text
    assert "dZ 8x3   dX 3" in text
    assert "dW = A B[red]" in text and "2e-16" in text
    assert "net.1 (Flatten)" in text
    words = " ".join(text.split())
    assert (
        "All 2 equations that can be compared agree with torch and autograd; furthest off is net.0: dW, by 2e-16"
        in words
    )
    assert "own gradients of all 2 parameters are the sums of these equations" in words
    assert "Not explained" not in text and "WRONG" not in text


def test_what_only_moves_numbers_within_a_module_takes_one_line() -> None:
    moves = [
        FLATTEN.model_copy(update={"module": "net.0", "call": 2, "operation": name}) for name in ("view", "t", "view")
    ]
    text = shown(explanation(LINEAR, *moves, LINEAR))
    assert text.count("net.0 (Linear), call 2\n") == 1
    assert text.count("linear, 1,234 parameters") == 2
    assert text.count("moves: view, t: 8x4x2 -> 8x8") == 1


def test_what_is_wrong_or_unknown_is_said() -> None:
    bent = LINEAR.model_copy(update={"backward": [equation("dW", 0.25, False)]})
    words = " ".join(shown(explanation(bent, UNKNOWN, unexplained=["net.2.weight"])).split())
    assert "WRONG: dW of net.0 (Linear), call 2, 1,234 parameters (model.py:7) is off by 5.0e-01" in words
    assert "agree with torch" not in words
    assert "net.2 (Mine): MineBackward not explained output 8x2" in words
    assert "Not explained: net.2 (Mine): MineBackward." in words
    assert "Of 2 parameters, the gradients of 1 are the sums of these equations; not net.2.weight." in words
