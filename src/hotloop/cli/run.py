"""`hotloop run`: runs any PyTorch script, unmodified, with faster equal parts where these are proven."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from hotloop.cli.options import JsonOption, console, exit_if_failed, exit_on_error, print_json, say, try_write
from hotloop.core.files.atomic_files import check_writable, write_atomic


@exit_on_error
def run(
    file: Annotated[str, typer.Argument(help="A PyTorch script.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, after --.", show_default=False)
    ] = None,
    as_module: Annotated[
        bool, typer.Option("-m", help="FILE is the name of a module to run as a script, as with python -m.")
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Use only exchanges that compute the same bits as the script's own parts.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Try the exchanges during the run, report their gain, and use none.")
    ] = False,
    accept: Annotated[
        str | None,
        typer.Option(help="reduced-precision: allow products of fp32 numbers in TF32 or bf16.", show_default=False),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Write the summary as JSON into this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run any PyTorch script, unmodified, and exchange its slow parts for proven equal faster ones.

    \b
    hotloop run train.py                            as python train.py
    hotloop run train.py -- --epochs 3 --lr 0.1     with arguments of the script
    hotloop run -m package.train -- --epochs 3      a module, as under python -m
    hotloop run train.py --exact                    every bit as under python
    hotloop run train.py --accept reduced-precision products in TF32 or bf16, where the machine has them
    hotloop run train.py --dry-run                  what would be exchanged, and what is gained

    Output, files and exit code are those of the script. A summary follows on stderr: what was exchanged, the gain, the
    proof, and why other parts stay as they are.
    """
    _check_accept(accept, exact=exact)
    if record is not None:
        check_writable(record, "--record")  # before the run

    from hotloop.exchanges.script_run import run_with_exchanges

    source: Path | str = file if as_module else Path(file)
    stdout = sys.stderr.fileno() if as_json else None
    found = run_with_exchanges(source, arguments or [], exact=exact, dry_run=dry_run, accept=accept, stdout=stdout)
    unwritten = None
    if record is not None:
        text = found.model_dump_json(indent=2) + "\n"
        unwritten = try_write(lambda: write_atomic(record, text))[1]
    if as_json:
        print_json(found.model_dump())
    else:
        from hotloop.report.script_run_page import script_run_page

        console.print(script_run_page(found), markup=False, highlight=False, soft_wrap=True)
    if unwritten is not None and found.exit_code:
        say(f"error: {unwritten}")
    if found.exit_code < 0:
        _end_by_signal(-found.exit_code)
    if found.exit_code:
        raise typer.Exit(found.exit_code)
    exit_if_failed(unwritten)


def _check_accept(accept: str | None, *, exact: bool) -> None:
    """Raises a PlanError if --accept has another value, or contradicts --exact."""
    from hotloop.errors import PlanError

    if accept not in (None, "reduced-precision"):
        raise PlanError(f"--accept is {accept!r}", expected="reduced-precision", fix="correct the option")
    if accept and exact:
        raise PlanError(
            "--accept reduced-precision and --exact are both given",
            expected="one of them: reduced precision changes results",
            fix="leave one of them out",
        )


def _end_by_signal(number: int) -> NoReturn:
    """Ends this process by the signal that ended the script, so that a caller gets the same exit code."""
    if hasattr(signal, "SIGKILL"):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the script's own core file is the useful one
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    raise typer.Exit(128 + number)
