"""The top of the command line: help, version, and what a wrong call says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hotloop import __version__
from hotloop.cli import COMMANDS

HEAVY = ("torch", "plotly", "numpy", "scipy", "sklearn", "pydantic")
TYPER_ITSELF = ("pydantic",)  # which typer imports, from some version on, for the options of a command


@pytest.mark.few("args0-*", "args5-*", "args9-*", "args15-*")
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


@pytest.mark.few("race")
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


def table_of_help(text: str) -> list[list[str]]:
    """The cells of the table of plans in a help text; a cell may have several lines."""
    lines = text.partition("Which plan does a run use?\n")[2].partition("\n\n")[0].splitlines()
    begins = [lines[0].index(name) for name in ("option", "plan", "compiles", "searches first", "proven")]
    rows: list[list[str]] = []
    for line in lines[1:]:
        cells = [line[begin:end].strip() for begin, end in zip(begins, [*begins[1:], None], strict=True)]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)]
    return rows


def test_the_page_about_plans_has_the_table_of_the_help(run_cli) -> None:
    page = Path(__file__).parents[2] / "docs" / "concepts" / "task-and-plan.md"
    rows = table_of_help(run_cli("train", "--help").stdout)
    assert [row[0] for row in rows] == ["(none)", "--plan auto", "--tune"]
    for option, *cells in rows:
        name = option if option == "(none)" else f"`{option}`"
        assert f"| {' | '.join([name, *cells])} |" in page.read_text(encoding="utf-8")


def test_version(run_cli) -> None:
    done = run_cli("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"hotloop {__version__}\n", "")


@pytest.mark.few("args0-*", "args3-*")
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
