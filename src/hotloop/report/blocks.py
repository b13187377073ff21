"""What a page, a terminal and a notebook show of a record: blocks of text, tables and figures; and pages of HTML.

A page is one file with its own script, style and figures, by Jinja2 templates.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from rich.table import Table
from rich.text import Text

from hotloop import __version__

Block = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading.

    Attributes:
        id: of the HTML element.
        blocks: each with its `kind`, as the functions of this module return them.
    """

    id: str
    title: str
    blocks: list[Block] = field(default_factory=list)


def text(line: str) -> Block:
    return {"kind": "text", "text": line}


def heading(line: str) -> Block:
    return {"kind": "heading", "text": line}


def lines(items: Sequence[str]) -> list[Block]:
    """Returns a list; no block for no lines."""
    return [{"kind": "list", "lines": list(items)}] if items else []


def facts(pairs: Sequence[tuple[str, Any]]) -> Block:
    """Returns names and values, without those that are None or empty."""
    return {"kind": "facts", "pairs": [(name, value) for name, value in pairs if value not in (None, "", [], {})]}


def tiles(pairs: Sequence[tuple[str, str]]) -> list[Block]:
    return [{"kind": "tiles", "pairs": list(pairs)}] if pairs else []


def table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    numbers: Sequence[int] = (),
    marked: Sequence[int] = (),
) -> Block:
    """Returns a table; `numbers` are columns aligned to the right, `marked` are emphasized rows."""
    return {
        "kind": "table",
        "caption": caption,
        "columns": list(columns),
        "rows": [list(row) for row in rows],
        "numbers": list(numbers),
        "marked": list(marked),
    }


def details(summary: str, shown: Block) -> Block:
    return {"kind": "details", "summary": summary, "table": shown}


def figures(shown: Sequence[dict[str, Any]], size: str = "") -> list[Block]:
    """Returns the figures; each is a dict with `title`, `label`, `data` and `layout`."""
    return [{"kind": "figures", "figures": list(shown), "size": size}] if shown else []


def figure_of(plotly_figure: Any, title: str, label: str) -> dict[str, Any]:
    """Returns a plotly figure as a block's figure; the page's style replaces its own."""
    document = json.loads(plotly_figure.to_json())
    layout = {
        key: value
        for key, value in document["layout"].items()
        if key not in ("template", "title", "margin", "font", "height", "width", "plot_bgcolor", "paper_bgcolor")
    }
    return {"title": title, "label": label, "data": document["data"], "layout": layout}


def terminal_table(block: Block, **options: Any) -> Table:
    """Returns a table block for a terminal; the options are those of `rich.table.Table`."""
    shown = Table(title=block["caption"], title_justify="left", title_style="bold", **options)
    for number, column in enumerate(block["columns"]):
        shown.add_column(Text(column), justify="right" if number in block["numbers"] else "left", overflow="fold")
    for row in block["rows"]:
        shown.add_row(*(Text(cell) for cell in row))
    return shown


def render(template: str, sections: Sequence[Section] = (), **values: Any) -> str:
    """Returns the HTML of a template; figures of the sections are numbered and written once, as JSON."""
    from markupsafe import Markup

    specs: dict[str, Any] = {}
    for figure in _figures_in(sections):
        figure["id"] = f"figure-{len(specs)}"
        specs[figure["id"]] = {"data": figure["data"], "layout": figure["layout"]}
    return (
        _environment()
        .get_template(template)
        .render(
            sections=sections,
            css=Markup(asset("page.css")),
            script=Markup(asset("page.js")),
            live_script=Markup(asset("live.js")),
            plotly=_Plotly(),
            figures_json=Markup(script_json(specs)),
            version=__version__,
            written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            **values,
        )
    )


def report_page(
    sections: Sequence[Section],
    heading: str,
    subtitle: str,
    *,
    title: str | None = None,
    state: str = "",
    failure: dict[str, str] | None = None,
    next_step: dict[str, str] | None = None,
    damages: Sequence[str] = (),
) -> str:
    """Returns the HTML of a page with sections below a heading."""
    head: dict[str, Any] = dict(title=title or heading, heading=heading, subtitle=subtitle, state=state)
    return render("report.html.j2", sections, **head, failure=failure, next_step=next_step, damages=damages)


def script_json(value: Any) -> str:
    """Returns JSON that can stand in a script element: no text in it can end the element."""
    written = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def asset(name: str) -> str:
    return resources.files("hotloop.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def plotly_script() -> str:
    """Returns plotly's script from the installed package, without importing plotly, which takes half a second."""
    return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")


class _Plotly:
    """Is read only where a template asks for it."""

    def __html__(self) -> str:
        return plotly_script()


def _figures_in(sections: Sequence[Section]) -> Iterator[dict[str, Any]]:
    for section in sections:
        for block in section.blocks:
            yield from block.get("figures", ()) if block["kind"] == "figures" else ()


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # takes long to import

    return Environment(
        loader=PackageLoader("hotloop.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
