"""`hotloop devices`: what this machine has, and how fast it is."""

from __future__ import annotations

from typing import Annotated

import typer

from hotloop.cli.options import JsonOption, console, exit_on_error, print_json


@exit_on_error
def devices(
    device: Annotated[
        str | None,
        typer.Option(help="Show this device alone, such as cpu or cuda:0.", show_default="all of them"),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure anew, in place of what was measured before.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show this machine's devices: memory, precisions, measured speed; and its cores, compiler and versions.

    Measuring takes a few seconds. It's done once, and kept in your cache folder.
    """
    from rich.progress import BarColumn, TextColumn

    from hotloop.core.hardware.probe import measure_hardware
    from hotloop.core.terminal import Bar
    from hotloop.report.hardware import advice, hardware_page

    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.description}", markup=False))
    with Bar(*columns, console=console, transient=True) as bar:
        shown = bar.add_task("", visible=False)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(shown, description=what, completed=done, total=total, visible=True)

        hardware = measure_hardware(device, refresh=refresh, progress=progress)

    if as_json:
        print_json({**hardware.to_dict(), "advice": advice(hardware)})
    else:
        console.print(hardware_page(hardware))
