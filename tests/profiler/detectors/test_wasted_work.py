"""Work in the forward and in the loss that no gradient reaches. Records are made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.core.records.profile import ModuleTime, OperatorTime, Remedy
from hotloop.core.records.profile_terms import SlowPattern
from tests.support.profiler.handmade_steps import operator, product, remedies, seen

MODULES = [
    ModuleTime(name=name, kind="Module", calls=1, forward_ms=1, backward_ms=1, share=0.2)
    for name in ("", "net", "teacher")
]


def trained() -> list[OperatorTime]:
    return [
        product(1.0, where="net.py:3", module="net", used=True),
        product(2.0, where="net.py:3", module="net", phase="backward"),
    ]


def aside(name: str, ms: float = 1.0, **fields: Any) -> OperatorTime:
    given = dict(where="net.py:9", function="Net.forward", module="net", bytes=1e3) | fields
    return operator(name, ms, **given)


def said(ones: list[OperatorTime], **fields: Any) -> list[Remedy]:
    phases = {"forward": 5.0, "loss": 1.5}
    found = remedies(seen(phases, operators=[*trained(), *ones], modules=MODULES, **fields))
    return [one for one in found if "no gradient reaches" in one.cause]


NAMED: dict[str, tuple[list[OperatorTime], str]] = {
    "statistics without a graph": ([aside("mean"), aside("std")], "statistics or checks"),
    "statistics whose graph is discarded": ([aside("mean", used=False)], "statistics or checks"),
    "a check of each layer": (
        [aside("isnan"), aside("any", dtype=""), aside("is_nonzero", dtype="")],
        "statistics or checks",
    ),
    "an error that is only told": (
        [aside("mean", module="(loss)", phase="loss", where="train.py:23", function="train")],
        "statistics or checks",
    ),
    "a mask": ([aside("ones"), aside("tril")], "masks, positions"),
    "a bank that is put together anew": (
        [aside("cat", shapes=[]), aside("detach", 0.1, bytes=0.0)],
        "stored tensors are copied",
    ),
    "a head that nobody uses": ([aside("addmm", module="net.head", used=False)], "whose graph is discarded"),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_no_gradient_comes_back_to_is_named(case: str) -> None:
    ones, cause = NAMED[case]
    (found,) = said(ones)
    assert cause in found.cause and found.where == ones[0].where
    assert found.gain >= 0.1 and not found.note


NEEDED: dict[str, list[OperatorTime]] = {
    "a line that a gradient comes back to": [aside("mean"), aside("mul", used=True)],
    "a line that a backward goes through": [aside("mean"), aside("mul", phase="backward")],
    "a batch that is passed on": [aside("sub"), aside("div")],
    "a mask of targets": [aside("ne", dtype=""), aside("sum", dtype="")],
    "what is chosen": [aside("mean", used=False), aside("topk", used=False)],
    "a frozen part": [aside("mean", module="teacher.norm")],
    "a teacher that is asked": [aside("addmm", module="teacher.last"), aside("mean", module="")],
    "inputs put side by side": [aside("cat", shapes=[])],
}


@pytest.mark.parametrize("case", NEEDED)
def test_what_the_step_may_need_is_not_named(case: str) -> None:
    assert said(NEEDED[case]) == []


def test_a_network_of_which_a_habit_tells_is_not_told_of_twice() -> None:
    ones = [
        aside("addmm", module="net.0", used=False, where="train.py:9"),
        aside("mean", where="train.py:9", module=""),
    ]
    assert said(ones)
    assert said(ones, habits=[SlowPattern(what="unused graph", where="train.py:9", per_step=1.0, ms=1.0)]) == []


def loop_line(number: int, name: str, ms: float = 1.0, **fields: Any) -> OperatorTime:
    """What the training loop calculates at a line of its own between forward and backward."""
    given = dict(phase="loss", where=f"train.py:{number}", function="train", module="(loss)") | fields
    return aside(name, ms, **given)


def loss_of_loop() -> list[OperatorTime]:
    return [
        loop_line(28, "mse_loss", 0.1, used=True),
        operator("_fused_adam_", 0.1, phase="update", where="train.py:30", function="train"),
    ]


def forward(number: int, name: str, **fields: Any) -> OperatorTime:
    return aside(name, where=f"net.py:{number}", **fields)


def mixed() -> OperatorTime:
    """Another line of the same function, to which a gradient comes back."""
    return forward(12, "relu", used=True)


NORMALISED: dict[str, list[OperatorTime]] = {
    "advantages": [
        *loss_of_loop(),
        *(loop_line(25, name, shapes=["64"]) for name in ("mean", "sub", "std", "div")),
    ],
    "inputs in a forward": [
        forward(9, "mean", shapes=["64x96x7"]),
        forward(10, "var", shapes=["64x96x7"]),
        forward(11, "sub", shapes=["64x96x7", "64x1x7"]),
        forward(11, "div", shapes=["64x96x7", "64x1x7"]),
        mixed(),
    ],
    "inputs in a function of its own": [forward(9, "mean"), forward(10, "sub_", shapes=["64x256", "64x1"])],
    "what is normalised where a gradient comes back": [
        forward(9, "mean", used=False),
        forward(10, "sub", shapes=["64x256", "64x1"], used=True),
    ],
    "what another function of the module normalises": [
        forward(9, "mean", function="Normal.look"),
        forward(20, "div", shapes=["64x256", "64x1"], function="Normal.scale"),
    ],
    "keys of unit length": [
        forward(9, "linalg_vector_norm"),
        forward(9, "div", shapes=["64x256", "64x256"]),
        mixed(),
    ],
    "a pooled backbone": [forward(9, "mean", shapes=["64x512x7x7"]), mixed()],
    "what the loop pools": [*loss_of_loop(), loop_line(25, "mean")],
    "what a loop pools whose loss is a function": [*loss_of_loop()[1:], loop_line(25, "mean")],
    "what torch's own operators sum up": [forward(9, "linalg_vector_norm", outer="aten::cosine_similarity")],
}


@pytest.mark.parametrize("case", NORMALISED)
def test_what_is_normalised_or_pooled_is_no_statistic(case: str) -> None:
    assert said(NORMALISED[case]) == []


MEASURED: dict[str, list[OperatorTime]] = {
    "pooled for a number that is read": [forward(9, "mean"), forward(9, "item", ms=0.1), mixed()],
    "an error in a function of its own": [forward(9, "sub", shapes=["64x256", "64x256"]), forward(9, "mean")],
    "answers counted in a forward": [
        forward(9, "argmax"),
        forward(9, "eq", dtype=""),
        forward(9, "_to_copy", dtype=""),
        forward(9, "mean"),
        mixed(),
    ],
    "a mean within which torch divides": [forward(9, "mean"), forward(9, "div_", outer="aten::mean")],
}


@pytest.mark.parametrize("case", MEASURED)
def test_statistics_are_told_from_normalising(case: str) -> None:
    (found,) = said(MEASURED[case])
    assert "statistics or checks" in found.cause and found.where == "net.py:9"


def test_of_a_function_that_a_gradient_comes_back_to_only_the_lines_that_are_named_count() -> None:
    ones = [forward(9, "tril"), forward(10, "add")]
    assert [one.gain for one in said(ones)] == pytest.approx([0.2])
    assert [one.gain for one in said([*ones, mixed()])] == pytest.approx([0.1])


def test_of_the_loop_only_the_lines_that_are_named_count() -> None:
    ones = [loop_line(24, "ones"), loop_line(25, "mul", 0.2)]
    assert [one.where for one in said([*loss_of_loop(), *ones])] == ["train.py:24"]
    (found,) = said([*loss_of_loop(), *ones])
    assert found.evidence.startswith("1 operations")


@pytest.mark.parametrize(
    "ones",
    [
        [forward(9, "ones", ms=0.01), forward(10, "randn"), mixed()],
        [forward(9, "zeros", ms=0.01), forward(10, "normal_")],
        [forward(9, "full"), forward(9, "bernoulli")],
    ],
)
def test_what_is_drawn_is_not_made_anew_for_nothing(ones: list[OperatorTime]) -> None:
    assert said(ones) == []


def test_metrics_are_told_of_once() -> None:
    ones = [
        loop_line(24, "argmax", 3.0),
        *(loop_line(25, name, 0.1, dtype="") for name in ("eq", "_to_copy")),
        loop_line(25, "mean"),
        loop_line(25, "item", 0.1),
    ]
    profile = seen({"forward": 5.0, "loss": 4.5}, operators=[*trained(), *loss_of_loop(), *ones], modules=MODULES)
    causes = [one.cause for one in remedies(profile)]
    assert sum("metrics at each step" in cause for cause in causes) == 1
    assert not any("no gradient reaches" in cause for cause in causes)


def test_what_operators_of_torchs_own_read_and_make_is_none_of_the_users() -> None:
    inside = [forward(9, name, ms=0.1, outer="aten::one_hot") for name in ("min", "item", "zeros")]
    ones = [forward(9, "one_hot"), *inside, forward(9, "_to_copy"), mixed()]
    profile = seen({"forward": 8.0}, operators=[*trained(), *ones], modules=MODULES)
    assert said(ones) == []
    assert not any(".item()" in one.cause for one in remedies(profile))


def test_what_is_computed_again_is_told_at_the_line_of_the_forward() -> None:
    """The backward asks for it, and does at that line what a forward does."""
    forward = [operator("gelu", 1.0, module="body.0", where="net.py:7", shapes=["64x256"])]
    backward = [
        operator("gelu", 1.0, module="body.0", where="net.py:7", shapes=["64x256"], phase="backward"),
        operator("mm", 2.0, module="head", where="net.py:9", phase="backward"),
    ]
    habit = SlowPattern(what="recomputed forward", where="train.py:20", per_step=6.0, ms=1.5)
    (found,) = [
        one
        for one in remedies(seen({"forward": 1.0, "backward": 3.0}, operators=[*forward, *backward], habits=[habit]))
        if "again" in one.cause
    ]
    assert (found.where, found.gain, found.note) == ("net.py:7", pytest.approx(0.15), False)
    unknown = seen(habits=[habit]).model_copy(update={"operators": []})
    assert [one.where for one in remedies(unknown) if "again" in one.cause] == ["train.py:20"]
