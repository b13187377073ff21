"""Messages in one line and three parts, one tree, and the user's own line in what the user's code raised."""

from __future__ import annotations

import inspect
import json
import pickle
import re
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop import errors
from hotloop.errors import DataError, HotloopError, TaskError, call_user_code, describe_error, type_name

CLASSES = [
    value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, HotloopError) and name == value.__name__
]


def own_line(needle: str) -> str:
    """`test_errors.py:12`: where this file holds a text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"test_errors.py:{next(number for number, line in enumerate(lines, 1) if needle in line)}"


def raised(function, *arguments) -> BaseException:
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"given": "x has 3 rows"}, "x has 3 rows"),
        ({"given": "x has 3 rows", "expected": "4"}, "x has 3 rows; expected 4"),
        ({"given": "x has 3 rows", "fix": "add one"}, "x has 3 rows. Add one"),
        ({"given": "x has 3 rows.", "expected": "4.", "fix": "add one."}, "x has 3 rows.; expected 4. Add one"),
        ({"given": "a\nb", "expected": "c\n  d", "fix": "e\tf"}, "a b; expected c d. E f"),
    ],
)
def test_a_message_is_one_line_of_up_to_three_parts(parts: dict[str, str], says: str) -> None:
    error = HotloopError(**parts)
    assert str(error) == says
    assert (error.given, error.expected, error.fix) == tuple(
        parts.get(name, "") for name in ("given", "expected", "fix")
    )


@given(st.text(), st.text(), st.text())
def test_no_part_can_break_the_line(what: str, expected: str, fix: str) -> None:
    message = str(HotloopError(what, expected=expected, fix=fix))
    assert len(message.splitlines()) <= 1


def test_the_documented_tree_is_the_real_one() -> None:
    shown = re.findall(r"^[│├└─ ]*(\w+(?:Error|Exhausted))", errors.__doc__ or "", re.MULTILINE)
    assert sorted(shown) == sorted(one.__name__ for one in CLASSES)


@pytest.mark.parametrize("error", CLASSES, ids=lambda one: one.__name__)
def test_every_error_can_be_caught_as_one_and_says_what_it_is_for(error: type[HotloopError]) -> None:
    assert issubclass(error, HotloopError)
    assert error.__doc__


def test_an_error_survives_the_way_to_another_process() -> None:
    error = DataError("x has 3 rows", expected="4", fix="add one")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.fix) == (DataError, str(error), error.fix)


@pytest.mark.parametrize(
    ("value", "says"),
    [(None, "None"), (3, "an int"), ("x", "a str"), (errors, "a module"), (ValueError(), "a ValueError")],
)
def test_kind_says_what_a_value_is(value: object, says: str) -> None:
    assert type_name(value) == says


def fails() -> None:
    raise ValueError("first line\nsecond line")  # the line of fails


def fails_in_a_library() -> None:
    json.loads("{")  # the line of fails_in_a_library


def test_blame_shows_type_first_line_and_place() -> None:
    assert describe_error(raised(fails)) == f"ValueError: first line ({own_line('# the line of fails')})"


def test_blame_shows_the_users_line_where_a_library_raised() -> None:
    message = describe_error(raised(fails_in_a_library))
    assert message.startswith("JSONDecodeError: ")
    assert message.endswith(f"({own_line('# the line of fails_in_a_library')})")


def test_blame_of_an_error_without_words_or_frames() -> None:
    assert describe_error(AssertionError()) == "AssertionError: no message"


def test_blame_shows_no_place_where_no_line_is_the_users() -> None:
    error = ValueError("x")
    error.__traceback__ = raised(json.loads, "{").__traceback__.tb_next
    assert describe_error(error) == "ValueError: x"


def test_blame_of_what_a_worker_sent() -> None:
    """A DataLoader's worker sends the traceback as the message of an error of the same type."""
    text = "".join(traceback.format_exception(raised(fails_in_a_library)))
    sent = ValueError(f"Caught JSONDecodeError in DataLoader worker process 0.\nOriginal {text}")
    assert describe_error(sent) == "json.decoder." + describe_error(raised(fails_in_a_library))


def test_blame_of_what_a_worker_sent_in_several_lines() -> None:
    error = raised(fails)
    error.add_note("in sample 7")
    text = "".join(traceback.format_exception(error))
    sent = ValueError(f"Caught ValueError in DataLoader worker process 0.\nOriginal {text}")
    assert describe_error(sent) == describe_error(raised(fails))


def test_calling_passes_the_result_on() -> None:
    assert call_user_code("the sum", lambda a, b: a + b, 1, 2) == 3


def test_calling_names_what_raised_and_keeps_the_cause() -> None:
    error = raised(call_user_code, "the model factory", fails)
    assert isinstance(error, TaskError)
    assert str(error) == f"the model factory raised {describe_error(raised(fails))}. Correct that line"
    assert isinstance(error.__cause__, ValueError)


def test_calling_leaves_what_is_explained_already() -> None:
    def refuses() -> None:
        raise DataError("x has 3 rows")

    assert str(raised(call_user_code, "prepare", refuses)) == "x has 3 rows"


class OutOfMemoryError(RuntimeError):
    """Named as torch's, which is not imported here."""


@pytest.mark.parametrize("error", [MemoryError("no room"), OutOfMemoryError("no room")], ids=["host", "device"])
def test_calling_leaves_a_lack_of_memory_which_is_not_the_functions_fault(error: BaseException) -> None:
    def runs_out() -> None:
        raise error

    assert raised(call_user_code, "the model", runs_out) is error
