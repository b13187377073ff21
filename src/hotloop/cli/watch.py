"""`hotloop watch`: a live page of runs."""

from __future__ import annotations

import os
import socket
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from hotloop.cli.options import JsonOption, exit_on_error, print_json, say

_NICENESS = 10
"""Added to the priority of a training's own page, so that the training's threads go first."""


@exit_on_error
def watch(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or a folder with runs in it or below.")] = Path(
        "runs"
    ),
    host: Annotated[
        str, typer.Option(help="Address to serve on. Other machines can read the page at another one than the default.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port.", show_default="a free one")] = 0,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    idle: Annotated[
        str,
        typer.Option(
            envvar="HOTLOOP_WATCH_IDLE",
            help="End after this time without a training and an open page, such as 60s or 12h.",
        ),
    ] = "60s",
    listener: Annotated[int | None, typer.Option(hidden=True)] = None,
    as_json: JsonOption = False,
) -> None:
    """Show runs on a page that updates while they train.

    \b
    hotloop watch                       the runs in runs/
    hotloop watch runs/first --open

    The printed address has a token, and other addresses are refused. The page only reads run folders. The page ends by
    Ctrl-C, or when no run trains and no page is open for 60 s.
    """
    from hotloop.core.format import parse_seconds
    from hotloop.report.live_server import LiveServer, listen, new_token, page_address
    from hotloop.report.run_list import check_folder

    idle_s = parse_seconds(idle, "idle")
    check_folder(folder)
    if listener is not None:  # of `hotloop train --watch`, which printed the address
        with suppress(OSError):
            os.nice(_NICENESS)
        token = os.environ["HOTLOOP_WATCH_TOKEN"]
        LiveServer(socket.socket(fileno=listener), token, folder, idle_s).serve()
        return
    opened, token = listen(host, port), new_token()
    address = page_address(opened, token)
    if as_json:
        print_json({"address": address})
    else:
        say(f"watching {folder}: {address}")
    if open_page:
        webbrowser.open(address)
    LiveServer(opened, token, folder, idle_s).serve()
    say("no run trains and no page is open: ended")
