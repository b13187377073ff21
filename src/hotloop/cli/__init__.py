"""The `hotloop` command: parses arguments, calls `hotloop.api`, prints results.

Each command is a function in the file of its name, which imports slow modules inside the function, so that help and
usage errors are immediate.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from hotloop.cli.options import run_app

# in the order of the help
COMMANDS = (
    "devices",
    "advise",
    "train",
    "run",
    "plan",
    "race",
    "check",
    "tune",
    "study",
    "profile",
    "summary",
    "explain",
    "evaluate",
    "predict",
    "export",
    "report",
    "list",
    "compare",
    "watch",
)

# \b: no line wrapping in the paragraph
HELP = """\
Trains your PyTorch network as fast as your hardware allows, and proves it.

You write what to train as a Task in a Python file; hotloop decides how to run the Task.

\b
  hotloop devices                               what this machine has
  hotloop advise task.py                        which hardware it needs: time, memory and cost elsewhere
  hotloop train task.py                         train the Task in task.py, into a new run folder
  hotloop train task.py --epochs 3 --run runs/first
  hotloop run train.py -- --lr 0.1              run any PyTorch script, unmodified, faster where proven
  hotloop plan task.py                          how --plan auto would run it here, and why
  hotloop race task.py                          which plan finishes this run first
  hotloop check task.py                         does a plan give the same result as the baseline?
  hotloop tune task.py                          find the fastest plan with that result, and store it
  hotloop study task.py -p lr=1e-4..1e-1:log    search hyper-parameters, exactly repeatable
  hotloop profile task.py                       where a step's time goes, and what would help
  hotloop profile train.py -- --lr 0.1          the same for any PyTorch script with its own arguments
  hotloop summary task.py                       its layers: shapes, parameters, FLOPs, memory
  hotloop explain task.py                       each layer's forward and backward as matrices
  hotloop evaluate runs/first                   its metrics on the test data
  hotloop predict runs/first images.npy         the trained network's output for new inputs
  hotloop export runs/first --to model.onnx     the network for use elsewhere
  hotloop report runs/first                     everything about a run as one HTML file
  hotloop list runs                             runs with state, best figure, plan and time
  hotloop compare runs/first runs/second        what differs in settings and figures
  hotloop watch runs                            a page that updates while runs train

`hotloop COMMAND --help` explains a command. With --json a command prints one JSON document on stdout.
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
    """Returns the application with all commands."""
    app = typer.Typer(
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help is faster and leaves square brackets unchanged
    )
    app.callback(help=HELP)(_options)
    for name in COMMANDS:
        app.command(name)(getattr(import_module(f"hotloop.cli.{name}"), name))
    return app


def main() -> None:
    """The entry point of the `hotloop` command and of `python -m hotloop`."""
    run_app(build())
