"""What is typed for a parameter of a function that gives a Task becomes what its annotation or default says."""

from __future__ import annotations

import enum
import inspect
from pathlib import Path
from typing import Any, Literal

import pytest

from hotloop.errors import TaskError
from hotloop.task_file import _arguments


class Colour(enum.Enum):
    RED = "red"


def annotated(
    *, number: float = 1, whole: int | None = None, maybe: float | None = 0.5, word: str = "x",
    word_or_none: str | None = "x", yes: bool = False, kind: Literal["relu", "gelu"] = "relu",
    colour: Colour = Colour.RED, path: Path = Path(), sizes: list[int] | None = None,
    other: NotThere = 1,  # noqa: F821
) -> None:  # fmt: skip
    """Annotations that say what is wanted."""


def plain(whole=1, number=1.0, yes=True, word="x", pair=(1, 2), many=[1], nothing=None, table={}) -> None:  # noqa: B006
    """Defaults that say what is wanted."""


def typed(function: Any, name: str, text: str) -> Any:
    return _arguments(function, {name: text}, "task")[name]


def without(name: str) -> Any:
    """`annotated` without the parameter whose annotation names nothing, so that the others are types."""

    def function() -> None: ...

    signature = inspect.signature(annotated)
    kept = [p for p in signature.parameters.values() if p.name != "other"]
    names = dict(globals())
    kept = [p.replace(annotation=eval(p.annotation, names)) for p in kept]
    function.__signature__ = signature.replace(parameters=kept, return_annotation=None)  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("number", "2", 2.0), ("number", "1e-3", 0.001), ("number", "inf", float("inf")),
        ("whole", "3", 3), ("whole", "none", None), ("whole", "None", None),
        ("maybe", "2", 2.0), ("maybe", "none", None),
        ("word", "3", "3"), ("word", "none", "none"), ("word", "true", "true"), ("word", "", ""),
        ("word_or_none", "none", None),
        ("yes", "true", True), ("yes", "False", False), ("yes", "1", True), ("yes", "off", False),
        ("kind", "gelu", "gelu"), ("colour", "red", Colour.RED), ("path", "a/b", Path("a/b")),
        ("sizes", "[1, 2]", [1, 2]), ("sizes", "3,4", [3, 4]), ("sizes", "none", None),
    ],
)  # fmt: skip
def test_a_text_becomes_what_the_annotation_says(name: str, text: str, value: Any) -> None:
    found = typed(without("other"), name, text)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("whole", "3", 3), ("number", "2", 2.0), ("yes", "no", False), ("word", "3", "3"), ("pair", "3,4,5", (3, 4, 5)),
        ("pair", "[3]", (3,)), ("many", "3,4", [3, 4]), ("table", "{'a': 1}", {"a": 1}), ("nothing", "3", 3),
        ("nothing", "3.5", 3.5), ("nothing", "true", True), ("nothing", "none", None), ("nothing", "abc", "abc"),
        ("nothing", "[1, 'a']", [1, "a"]), ("nothing", "__import__('os')", "__import__('os')"),
    ],
)  # fmt: skip
def test_a_text_becomes_what_the_default_is(name: str, text: str, value: Any) -> None:
    found = typed(plain, name, text)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("whole", "1.5", "whole=1.5; expected a whole number"),
        ("whole", "true", "whole=true; expected a whole number"),
        ("number", "wide", "number=wide; expected a number. Check its default, 1.0"),
        ("yes", "perhaps", "yes=perhaps; expected true or false"),
        ("pair", "abc", "pair=abc; expected a valid tuple"),
    ],
)
def test_another_text_is_refused(name: str, text: str, says: str) -> None:
    with pytest.raises(TaskError) as caught:
        typed(plain, name, text)
    assert str(caught.value).startswith(says)


def test_a_choice_that_is_none_names_the_choices() -> None:
    with pytest.raises(TaskError, match=r"kind=swish; expected 'relu' or 'gelu'"):
        typed(without("other"), "kind", "swish")


def test_annotations_that_name_nothing_leave_the_defaults_to_say() -> None:
    assert typed(annotated, "other", "7") == 7
    assert typed(annotated, "number", "2") == 2


def test_values_that_are_no_text_pass() -> None:
    marker = object()
    assert _arguments(plain, {"nothing": marker}, "task") == {"nothing": marker}


def test_any_name_goes_where_a_function_takes_any() -> None:
    def many(width, *sizes, **options):
        pass

    with pytest.raises(TaskError, match="no parameter 'options'"):
        _arguments(many, {"options": "1"}, "task")
    with pytest.raises(TaskError, match="task\\(\\) needs a value for 'width'"):
        _arguments(many, {}, "task")
