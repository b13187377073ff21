"""`hotloop devices`: this machine's devices and their speed."""

from __future__ import annotations

from typing import Annotated

import typer

from hotloop.cli.options import JsonOption, console, exit_on_error, print_result


@exit_on_error
def devices(
    device: Annotated[
        str | None,
        typer.Option(help="Show this device alone, such as cpu or cuda:0.", show_default="all of them"),
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again in spite of stored results.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show this machine's devices: memory, precisions, measured speed; and its cores, compiler and versions.

    The measurement takes a few seconds. Its result is stored in your cache folder.
    """
    from rich.progress import BarColumn, TextColumn

    from hotloop.core.hardware.probe import measure_hardware
    from hotloop.core.terminal import Bar
    from hotloop.report.hardware import advice, hardware_page

    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.description}", markup=False))
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", visible=False)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, visible=True)

        hardware = measure_hardware(device, refresh=refresh, progress=progress)

    print_result(as_json, hardware.to_dict() | {"advice": advice(hardware)}, lambda: hardware_page(hardware))
