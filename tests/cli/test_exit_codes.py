"""How commands fail: one line, one document, one exit code."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from hotloop.cli.options import JsonOption, exit_on_error, print_json
from hotloop.core.processes import Terminated
from hotloop.distributed.join import LAUNCH_ID_PREFIX
from hotloop.errors import DataError, DiskError

DATA_ERROR = DataError("x has 10 rows and y has 9", expected="the same number", fix="pip install hotloop[onnx]")


def run(raises: BaseException, *args: str):
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    @exit_on_error
    def command(as_json: JsonOption = False) -> None:
        raise raises

    return CliRunner().invoke(app, args)


def test_an_error_is_one_line_with_its_brackets_and_exit_code_1() -> None:
    result = run(DATA_ERROR)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"error: {DATA_ERROR}\n")


def test_a_long_error_is_not_broken_into_lines() -> None:
    assert run(DiskError("no space left " * 40)).stderr.count("\n") == 1


def test_with_json_an_error_is_also_the_one_document() -> None:
    result = run(DATA_ERROR, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"error": {"kind": "DataError", "message": str(DATA_ERROR)}}


def test_ctrl_c_is_one_line_and_130() -> None:
    result = run(KeyboardInterrupt(), "--json")
    assert (result.exit_code, result.stderr) == (130, "error: stopped by Ctrl-C\n")
    assert json.loads(result.stdout)["error"]["kind"] == "Interrupted"


def test_sigterm_is_one_line_and_143_and_none_of_a_rank_whose_launcher_tells_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = run(Terminated())
    assert (result.exit_code, result.stderr) == (143, "error: stopped by SIGTERM\n")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", LAUNCH_ID_PREFIX + "1")
    result = run(Terminated())
    assert (result.exit_code, result.stderr) == (143, "")


def test_a_bug_keeps_its_traceback() -> None:
    assert isinstance(run(ZeroDivisionError()).exception, ZeroDivisionError)


def test_a_command_without_the_json_option_is_refused() -> None:
    with pytest.raises(TypeError, match="as_json"):
        exit_on_error(lambda: None)


def test_numbers_that_json_has_not_become_null(capsys) -> None:
    print_json({"loss": float("nan"), "all": [1.5, (float("inf"), -float("inf"))]})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "all": [1.5, [None, None]]}


REAL_PROCESS = """
import os, signal, sys, typer
from hotloop.cli.options import JsonOption, exit_on_error, print_json

@exit_on_error
def command(what: str, as_json: JsonOption = False) -> None:
    if what == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    sys.stdin.readline()
    for _ in range(100):
        print_json({"text": "x" * 10_000})

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(command)
app()
"""


def test_a_signal_ends_a_real_process_with_130() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REAL_PROCESS, "interrupt"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: stopped by Ctrl-C\n")


def test_a_reader_that_leaves_is_no_failure_to_talk_about() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", REAL_PROCESS, "write"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    process.stdin.write("go\n")
    process.stdin.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141
