"""The pages of the reference that are generated from the source are current."""

from __future__ import annotations

from typing import get_args

import pytest

from docs.generators import command_line, json_fields
from hotloop.plan import Plan


@pytest.mark.parametrize("generator", [command_line, json_fields], ids=lambda module: module.__name__)
def test_the_page_is_current(generator) -> None:
    command = f"python -m {generator.__name__}"
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), f"write the page again with: {command}"


def test_each_field_of_a_record_is_on_the_page() -> None:
    page = json_fields.page()
    for record in json_fields.DOCUMENTS:
        _, _, part = page.partition(f"### {record.__name__}\n")
        listed = part.partition("\n### ")[0]
        assert [name for name in json_fields.fields(record) if f"| `{name}` |" not in listed] == []


def test_each_command_is_on_the_page() -> None:
    page = command_line.page()
    assert [name for name in command_line.COMMANDS if f"## hotloop {name}\n" not in page] == []


def test_each_axis_of_a_plan_has_its_values_on_the_page() -> None:
    page = (json_fields.PAGE.parent / "plan-axes.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(("| `", "| | `"))]
    for axis, field in Plan.model_fields.items():
        assert any(f"`{axis}`" in row.split("|")[1] for row in rows), axis
        values = [value for part in (field.annotation, *get_args(field.annotation)) for value in get_args(part)]
        for value in (value for value in values if isinstance(value, str) and axis != "rewrites"):
            assert any(f"`{value}`" in row for row in rows), f"{axis}={value}"
