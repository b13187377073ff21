"""`hotloop report`: everything about a run as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotloop.cli.options import JsonOption, exit_on_error, print_json, say


@exit_on_error
def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run's folder, or a result of `profile`, `race`, `check` or `evaluate` --json.", show_default=False
        ),
    ],
    results: Annotated[
        list[Path] | None, typer.Argument(help="Further results to show in the report.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The HTML file to write.", show_default="RUN/report.html, or RESULT.html")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a report of a run as one HTML file that needs no network and no other file.

    \b
    hotloop report runs/first
    hotloop report runs/first --out first.html
    hotloop report runs/first profile.json race.json     with results of --json
    hotloop report profile.json                          a profile alone

    The report reads the run's folder and executes nothing in it. Runs that go on, failed or were killed have reports,
    too.
    """
    from hotloop.core.files.atomic_files import check_writable, write_atomic
    from hotloop.core.files.run_folder import StoredRun
    from hotloop.report.run_report import document_report, read_document, run_report

    path = out or (run.with_suffix(".html") if run.is_file() else run / "report.html")
    if out is not None:
        check_writable(out, "--out")
    documents = [read_document(result) for result in results or []]
    damages: list[str] = []
    if run.is_file():
        page = document_report([read_document(run), *documents])
    else:
        stored = StoredRun.read(run)
        damages = stored.damages
        page = run_report(stored, documents)
    write_atomic(path, page, "--out")
    for damage in damages:
        say(damage)
    if as_json:
        print_json({"report": str(path), "size_bytes": len(page.encode()), "damages": damages})
    else:
        say(f"written: {path}")
