"""The `hotloop` command: parses, calls `hotloop.api`, prints.

Each command is one function, in the file of its name. Those files import what is heavy inside the function,
so that help and mistakes answer at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from hotloop.cli.options import run_app

COMMANDS = (
    "devices",
    "train",
    "plan",
    "race",
    "check",
    "tune",
    "profile",
    "explain",
    "evaluate",
    "predict",
    "export",
)  # in the order of the help

# \b keeps the lines of a paragraph as they are.
HELP = """\
Trains your PyTorch network as fast as your hardware allows, and proves it.

You write what to train, as a Task in a Python file; hotloop decides how to run it.

\b
  hotloop devices                               what this machine has
  hotloop train task.py                         train the Task in task.py, into a new run folder
  hotloop train task.py --epochs 3 --run runs/first
  hotloop plan task.py                          how --plan auto would run it here, and why
  hotloop race task.py                          which plan finishes this run first
  hotloop check task.py                         does that give the same result as the baseline?
  hotloop tune task.py                          find the fastest plan that does, and remember it
  hotloop profile task.py                       where a step's time goes, and what would help
  hotloop profile train.py -- --lr 0.1          the same for any PyTorch script with its own arguments
  hotloop explain task.py                       each layer's forward and backward as matrices
  hotloop evaluate runs/first                   its metrics on the test data
  hotloop predict runs/first images.npy         what the trained network says
  hotloop export runs/first --to model.onnx     the network for use elsewhere

`hotloop COMMAND --help` explains a command. With --json each prints one JSON document on stdout.
"""


def _show_version(wanted: bool) -> None:
    if wanted:
        from hotloop import __version__

        typer.echo(f"hotloop {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def build() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help: quicker, and square brackets stay what they are
    )
    app.callback(help=HELP)(_options)
    for name in COMMANDS:
        app.command(name)(getattr(import_module(f"hotloop.cli.{name}"), name))
    return app


def main() -> None:
    """Entry point of the `hotloop` command and of `python -m hotloop`."""
    run_app(build())
