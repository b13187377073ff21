"""The space of hyper-parameters: `1e-4..1e-1:log`, `16..256:int`, `0.5,1,2`, fixed values, and conditions in a TOML file."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.core.files.atomic_files import read_regular
from hotloop.core.format import is_number
from hotloop.core.records.study import ParameterRecord, Value
from hotloop.errors import StudyError, did_you_mean, shorten, type_name

if TYPE_CHECKING:  # Optuna takes a second to import, which the processes of trials do without
    from optuna.trial import Trial

Space = dict[str, ParameterRecord]

TASK_FIELDS = ("batch_size", "epochs", "seed")
"""Fields of a Task that a space may set."""

_FORMS = "LOW..HIGH with :log, :int or :step=STEP, or values such as 0.5,1,2, or one value"
_KEYS_OF_LOW = ("high", "log", "int", "step")
_KEYS = ("low", *_KEYS_OF_LOW, "choices", "value", "range", "when")


def parse_options(texts: Sequence[str]) -> Space:
    """Returns the space of `-p name=...` options.

    Raises:
        StudyError: a text has another form, or a range is empty.
    """
    space: Space = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise StudyError(f"-p {shorten(text)}", expected=f"name={_FORMS}")
        if name in space:
            raise StudyError(f"-p {text}", expected=f"one -p for {name!r}", fix="write all its values in one")
        space[name] = _parse_text(name, value, f"-p {name}={value}")
    return space


def read_space(path: Path) -> Space:
    """Returns the space of a TOML file.

    Raises:
        StudyError: no file, no TOML, or a parameter that has another form.
    """
    content = read_regular(path) if path.is_file() else None
    if content is None:
        raise StudyError(f"no space at {shorten(str(path))}", expected="a TOML file", fix="check the path")
    try:
        table = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"{path}: {error}", expected='TOML, such as lr = "1e-4..1e-1:log"') from error
    return parse_space(table, f"{path}: ")


def parse_space(table: Mapping[str, Any], place: str = "") -> Space:
    """Returns the space of a mapping: a text as on the command line, a list of values, a value, or a table.

    Args:
        place: the beginning of messages, such as `space.toml: `.
    """
    if not isinstance(table, Mapping):
        raise StudyError(f"the space is {type_name(table)}", expected='a dict such as {"lr": "1e-4..1e-1:log"}')
    space = {
        str(name): _parse_entry(str(name), value, f"{place}{name} = {shorten(value)}") for name, value in table.items()
    }
    for parameter in space.values():
        _check_conditions(parameter, space)
    return space


def _check_conditions(parameter: ParameterRecord, space: Space) -> None:
    """Raises StudyError for a condition on a value that a choice of the same space doesn't have."""
    for name, values in parameter.when.items():
        choices = space[name].choices if name in space and not space[name].is_fixed else []
        for value in values if choices else []:
            if not _is_one_of(value, choices):
                raise StudyError(
                    f"{parameter.place}: when {name} is {value!r}",
                    expected="one of " + ", ".join(map(as_text, choices)),
                    fix=did_you_mean(str(value), list(map(as_text, choices))),
                )


def _parse_entry(name: str, value: Any, place: str) -> ParameterRecord:
    if isinstance(value, str):
        return _parse_text(name, value, place)
    if isinstance(value, list | tuple):
        return _choice(value, place)
    if isinstance(value, Mapping):
        return _parse_table(name, value, place)
    return _choice([value], place)


def _parse_table(name: str, table: Mapping[str, Any], place: str) -> ParameterRecord:
    for key in table:
        if key not in _KEYS:
            raise StudyError(f"{place}: {key!r}", expected="one of " + ", ".join(_KEYS), fix=did_you_mean(key, _KEYS))
    forms = [key for key in ("range", "choices", "value", "low") if key in table]
    if len(forms) != 1:
        raise StudyError(place, expected="a range, choices, a value, or low and high: one of them")
    unused = next((key for key in _KEYS_OF_LOW if key in table), "") if forms != ["low"] else ""
    if unused:
        raise StudyError(
            f"{place}: {unused} beside {forms[0]}",
            expected=f"{unused} beside low",
            fix='or a text such as "1e-4..1e-1:log"',
        )
    if "range" in table:
        parameter = _parse_text(name, str(table["range"]), place)
    elif "choices" in table:
        parameter = _choice(table["choices"], place)
    elif "value" in table:
        parameter = _choice([table["value"]], place)
    else:
        numbers = [table["low"], table.get("high"), *([table["step"]] if "step" in table else [])]
        if any(isinstance(one, bool) or not isinstance(one, int | float) for one in numbers):
            raise StudyError(place, expected="low, high and step as numbers")
        is_log, is_int = table.get("log", False), table.get("int", False)
        if not (isinstance(is_log, bool) and isinstance(is_int, bool)):
            raise StudyError(place, expected="log and int as true or false")
        parameter = _range(numbers[0], numbers[1], is_log, is_int, table.get("step"), place)
    return parameter.model_copy(update={"when": _conditions(table.get("when", {}), place)})


def _conditions(when: Any, place: str) -> dict[str, list[Value]]:
    if not isinstance(when, Mapping):
        raise StudyError(f"{place}: when is {type_name(when)}", expected='a table such as { optimizer = "sgd" }')
    return {str(key): list(value) if isinstance(value, list | tuple) else [value] for key, value in when.items()}


def _parse_text(name: str, text: str, place: str) -> ParameterRecord:
    found = re.fullmatch(r"(.+?)\.\.(.+?)((?::[a-z]\w*(?:=[^:]*)?)*)", text.strip())
    if found and (is_number(found[1]) or is_number(found[2])):
        return _parse_range(found[1], found[2], [flag for flag in found[3].split(":") if flag], place)
    if "," in text:
        parts = [part.strip() for part in text.split(",")]
        if "" in parts:
            raise StudyError(place, expected="a value between two commas")
        return _choice([_literal(part) for part in parts], place)
    return _choice([_literal(text.strip())], place)


def _parse_range(low: str, high: str, flags: list[str], place: str) -> ParameterRecord:
    for end in (low, high):
        if not is_number(end):
            raise StudyError(f"{place}: {end!r} is no number", expected=_FORMS)
    step: float | None = None
    for flag in flags:
        if flag.startswith("step=") and is_number(flag[5:]):
            step = float(flag[5:])
        elif flag not in ("log", "int"):
            raise StudyError(f"{place}: ':{flag}'", expected=":log, :int or :step=STEP")
    return _range(float(low), float(high), "log" in flags, "int" in flags, step, place)


def _range(low: float, high: float, log: bool, is_int: bool, step: float | None, place: str) -> ParameterRecord:
    if not (math.isfinite(low) and math.isfinite(high)):
        raise StudyError(place, expected="finite ends")
    if low > high:
        raise StudyError(
            f"{place}: the range is reversed", expected="the smaller end first", fix=f"write {high:g}..{low:g}"
        )
    if low == high:
        raise StudyError(
            f"{place}: the range is empty", expected="two different ends", fix=f"write {low:g} for one value"
        )
    if log and low <= 0:
        raise StudyError(f"{place}: a log range begins above 0", expected="a smaller end such as 1e-6")
    if is_int and any(not float(one).is_integer() for one in (low, high, step or 1)):
        raise StudyError(f"{place}: an :int range has whole ends", expected="whole numbers")
    if step is not None and (step <= 0 or log):
        raise StudyError(f"{place}: step={step:g}", expected="a step above 0, and no :log")
    return ParameterRecord(low=low, high=high, log=log, is_int=is_int, step=step, place=place)


def _choice(values: Sequence[Any], place: str) -> ParameterRecord:
    if not isinstance(values, list | tuple) or not values:
        raise StudyError(place, expected="one value or more")
    for number, value in enumerate(values):
        if not isinstance(value, bool | int | float | str | None):
            raise StudyError(
                f"{place}: {type_name(value)}", expected="numbers, texts, true, false or None", fix="give it a name"
            )
        if value in values[:number] and type(value) is type(values[values.index(value)]):
            raise StudyError(f"{place}: {value!r} is there twice", expected="different values")
    return ParameterRecord(choices=list(values), place=place)


def _literal(text: str) -> Value:
    """Returns a number, true, false or None where the text spells one."""
    names: dict[str, Value] = {"true": True, "false": False, "none": None}
    if text.lower() in names:
        return names[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def as_text(value: Value) -> str:
    """Returns a value as `hotloop train -p` takes it, without loss."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def check_names(space: Space, arguments: Sequence[str], whole: Collection[str]) -> Space:
    """Returns the space with whole numbers for parameters of that type, in the order of the conditions.

    Args:
        arguments: parameters of `task(...)`.
        whole: parameters that take whole numbers.

    Raises:
        StudyError: an unknown name, or a condition on an unknown or circular name.
    """
    known = list(dict.fromkeys([*arguments, *TASK_FIELDS]))
    for name, parameter in space.items():
        if name not in known:
            raise StudyError(
                f"{parameter.place}: task() has no parameter {name!r}",
                expected="one of " + ", ".join(known),
                fix=did_you_mean(name, known),
            )
        if name in TASK_FIELDS and name not in arguments:
            _check_task_field(name, parameter)
        for other in parameter.when:
            if other not in space:
                raise StudyError(f"{parameter.place}: when names {other!r}", expected="one of " + ", ".join(space))
    ordered: Space = {}
    waiting = dict(space)
    while waiting:
        ready = [name for name, parameter in waiting.items() if set(parameter.when) <= set(ordered)]
        if not ready:
            raise StudyError(f"{next(iter(waiting.values())).place}: the conditions are circular")
        ordered |= {name: waiting.pop(name) for name in ready}
    return {name: _with_kind(name, parameter, name in whole) for name, parameter in ordered.items()}


def check_same_space(given: Space, own: Space) -> None:
    """Raises StudyError if a space differs from that of a study."""
    for name in [*given, *own]:
        one, other = given.get(name), own.get(name)
        if one is None or other is None or _form(one, other.is_int) != _form(other, other.is_int):
            has, wanted = (parameter.place if parameter else f"no {name!r}" for parameter in (one, other))
            raise StudyError(
                f"{has}, and the study has {wanted}",
                expected="the space of the study",
                fix="leave the space out, or start a new study",
            )


def _form(parameter: ParameterRecord, is_int: bool) -> dict[str, Any]:
    """Returns what a study samples from; `int` parameters have whole numbers without `:int`."""
    return parameter.model_dump(exclude={"place", "is_int"}) | {"is_int": parameter.is_int or is_int}


def _check_task_field(name: str, parameter: ParameterRecord) -> None:
    least = 0 if name == "seed" else 1
    values = parameter.choices or [parameter.low, parameter.high]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least or value != int(value):
            raise StudyError(f"{parameter.place}: {name} is {value!r}", expected=f"whole numbers from {least} on")


def _with_kind(name: str, parameter: ParameterRecord, is_whole: bool) -> ParameterRecord:
    if not is_whole or parameter.low is None or parameter.is_int:
        return parameter
    assert parameter.high is not None
    if all(number.is_integer() for number in (parameter.low, parameter.high, parameter.step or 1.0)):
        return parameter.model_copy(update={"is_int": True})
    raise StudyError(f"{parameter.place}: {name} takes whole numbers", expected="whole ends and steps, such as 16..256")


def sample(trial: Trial, space: Space) -> None:
    """Samples all parameters of a trial that are searched and whose conditions are met."""
    params: dict[str, Value] = {}
    for name, parameter in space.items():
        if _is_active(parameter, params):
            params[name] = parameter.choices[0] if parameter.is_fixed else _suggest(trial, name, parameter)


def _suggest(trial: Trial, name: str, parameter: ParameterRecord) -> Value:
    if parameter.choices:
        return trial.suggest_categorical(name, parameter.choices)
    assert parameter.low is not None and parameter.high is not None
    if parameter.is_int:
        step = int(parameter.step or 1)
        return trial.suggest_int(name, int(parameter.low), int(parameter.high), step=step, log=parameter.log)
    return trial.suggest_float(name, parameter.low, parameter.high, step=parameter.step, log=parameter.log)


def all_params(space: Space, searched: Mapping[str, Value]) -> dict[str, Value]:
    """Returns the values of all parameters of a trial, in the order of the space."""
    params: dict[str, Value] = {}
    for name, parameter in space.items():
        if _is_active(parameter, params):
            params[name] = parameter.choices[0] if parameter.is_fixed else searched[name]
    return params


def first_values(space: Space) -> dict[str, Value]:
    """Returns one value for each parameter: the first choice, or the low end."""
    return {name: parameter.choices[0] if parameter.choices else _low(parameter) for name, parameter in space.items()}


def _low(parameter: ParameterRecord) -> Value:
    assert parameter.low is not None
    return int(parameter.low) if parameter.low.is_integer() else parameter.low


def _is_active(parameter: ParameterRecord, params: Mapping[str, Value]) -> bool:
    return all(name in params and _is_one_of(params[name], values) for name, values in parameter.when.items())


def _is_one_of(value: Value, values: Sequence[Value]) -> bool:
    """Returns whether a value equals one of the others; a text in a TOML file may stand for none, true or a number."""
    return value in values or as_text(value) in map(as_text, values)


def largest(space: Space, name: str, default: int) -> int:
    """Returns the largest value of a whole-number parameter."""
    parameter = space.get(name, ParameterRecord())
    numbers = [value for value in (*parameter.choices, parameter.high) if isinstance(value, int | float)]
    return int(max(numbers, default=default))
