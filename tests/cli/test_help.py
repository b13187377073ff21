"""The top of the command line: help, version, and what a wrong call says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hotloop import __version__
from hotloop.cli import COMMANDS

HEAVY = ("torch", "plotly", "numpy", "scipy", "sklearn", "pydantic")
TYPER_ITSELF = ("pydantic",)  # which typer imports, from some version on, for the options of a command


@pytest.mark.parametrize(
    ("args", "heavy"),
    [
        (("--help",), HEAVY),
        (("--version",), HEAVY),
        *(((name, "--help"), tuple(set(HEAVY) - set(TYPER_ITSELF))) for name in COMMANDS),
    ],
)
def test_help_and_version_import_nothing_heavy(args, heavy) -> None:
    code = (
        "import sys; from hotloop.cli import main\n"
        f"sys.argv[1:] = {list(args)}\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"print('HEAVY', sorted(set({heavy}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_import_of_the_package_imports_nothing_heavy() -> None:
    code = f"import sys, hotloop; sys.exit(', '.join(set({HEAVY}) & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_names_every_command(run_cli) -> None:
    done = run_cli("--help")
    assert (done.returncode, done.stderr) == (0, "")
    listed = [line.split()[0] for line in done.stdout.partition("Commands:")[2].splitlines() if line.strip()]
    assert [word for word in listed if word in COMMANDS] == list(COMMANDS)


@pytest.mark.few("race", "check")
@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command, run_cli) -> None:
    done = run_cli(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"hotloop {command}" in done.stdout
    assert "--json" in done.stdout


def test_train_and_plan_have_the_same_table_of_plans(run_cli) -> None:
    tables = [
        run_cli(command, "--help").stdout.partition("Which plan does a run use?")[2].partition("little was measured")[0]
        for command in ("train", "plan")
    ]
    assert tables[0] == tables[1]
    for option in ("(none)", "--plan auto", "--tune"):
        assert option in tables[0]


def test_version(run_cli) -> None:
    done = run_cli("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"hotloop {__version__}\n", "")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "Usage: hotloop"),
        (("trian",), "'train'"),
        (("--verbos",), "--verbos"),
        (("train", "--no-such-option"), "--no-such-option"),
    ],
)
def test_a_wrong_call_exits_with_2_and_says_why(args, says, run_cli) -> None:
    done = run_cli(*args)
    assert done.returncode == 2
    assert says in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
