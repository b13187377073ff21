"""`hotloop run script.py -- args` is `python script.py args` from outside: streams, exit code, signals, processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "support/scripts"

RUN = [sys.executable, "-m", "hotloop", "run"]


def outcome(command: list[str], *, given: str = "", cwd: Path | None = None) -> tuple[int, str, str]:
    """Returns exit code, stdout, and stderr without the summary."""
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, cwd=cwd)
    stderr, _, _ = done.stderr.partition("hotloop: ")
    return done.returncode, done.stdout, stderr


def assert_same(script: Path, *arguments: str, given: str = "", cwd: Path | None = None) -> tuple[int, str, str]:
    plain = outcome([sys.executable, str(script), *arguments], given=given, cwd=cwd)
    hosted = outcome([*RUN, str(script), "--", *arguments], given=given, cwd=cwd)
    assert hosted == plain
    return plain


ENDS = {
    "exit code": ("import sys; print('out'); sys.exit(7)", 7),
    "exit text": ("import sys; sys.exit('no data')", 1),
    "error": ("def f():\n    raise ValueError('planted')\nprint('out', flush=True)\nf()", 1),
    "os._exit": ("import os; print('out', flush=True); os._exit(4)", 4),
    "interrupted": ("raise KeyboardInterrupt", -signal.SIGINT),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "aborted": ("import os; os.abort()", -signal.SIGABRT),
    "closed pipe": ("import os, sys; os.close(1); print('out'); sys.stdout.flush()", 1),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_script_ends_as_under_python(end: str, tmp_path: Path) -> None:
    text, code = ENDS[end]
    script = tmp_path / "script.py"
    script.write_text(text)
    assert assert_same(script)[0] == code


def test_surroundings_are_those_of_python(tmp_path: Path) -> None:
    script = tmp_path / "folder" / "script.py"
    script.parent.mkdir()
    (script.parent / "beside.py").write_text("value = 3\n")
    script.write_text(
        "import argparse, os, sys, beside\n"
        "parser = argparse.ArgumentParser(); parser.add_argument('--lr', type=float); parser.add_argument('name')\n"
        "print(parser.parse_args(), sys.argv, __name__, __file__, os.getcwd(), beside.value, sys.path[0])\n"
        "print(sys.stdin.read().upper(), sys.stdin.isatty(), sorted(os.environ.items()))\n"
    )
    assert_same(script, "--lr", "0.1", "a b", given="text\n", cwd=tmp_path)
    assert assert_same(script, "--unknown", cwd=tmp_path)[0] == 2


CHILDREN = """
import multiprocessing, os, subprocess, sys
def work(queue):
    queue.put(sorted(os.environ.items()) == START or [sys.argv, sorted(os.environ.items())])
START = sorted(os.environ.items())
if __name__ == "__main__":
    for how in ("fork", "spawn"):
        context = multiprocessing.get_context(how)
        queue = context.Queue()
        process = context.Process(target=work, args=(queue,))
        process.start()
        print(how, queue.get(), process.join(), process.exitcode)
    print(subprocess.run([sys.executable, "-c", "import sys; print(sys.path, sorted(sys.modules))"], capture_output=True))
    pid = os.fork()
    if not pid:
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_processes_that_a_script_starts_run_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHILDREN)
    assert "spawn True None 0" in assert_same(script)[1]


def test_a_module_runs_as_under_python_m(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys; print(__name__, __package__, sys.argv, sys.path[0]); sys.exit(2)")
    plain = outcome([sys.executable, "-m", "package.train", "--a", "1"], cwd=tmp_path)
    assert outcome([*RUN, "-m", "package.train", "--", "--a", "1"], cwd=tmp_path) == plain
    assert plain[0] == 2


def end_on_interrupt() -> None:
    """A shell's background jobs ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("handled", [True, False])
def test_a_signal_reaches_the_script(name: str, handled: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    handler = f"signal.signal(signal.{name}, lambda *_: sys.exit(9))" if handled else "pass"
    script.write_text(f"import signal, sys, time\n{handler}\nprint('ready', flush=True)\ntime.sleep(60)\n")
    codes = []
    for command in ([sys.executable, str(script)], [*RUN, str(script)]):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=end_on_interrupt
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(getattr(signal, name))
        codes.append(process.wait(60))
        process.stdout.close()
    assert codes[0] == codes[1] == (9 if handled else -getattr(signal, name))


def test_a_killed_command_leaves_no_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen([*RUN, str(script)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait(60)
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_a_missing_script_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run([*RUN, str(tmp_path / "none.py")], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "there is no file" in done.stderr


def test_the_record_of_a_script_without_torch(tmp_path: Path) -> None:
    script, record = tmp_path / "script.py", tmp_path / "record.json"
    script.write_text("import sys; print('out'); sys.exit(3)")
    done = subprocess.run([*RUN, str(script), "--record", str(record)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "out\n")
    found = json.loads(record.read_text())
    assert found["exit_code"] == 3 and found["parts"] == [] and found["ratio"] is None
    assert found["notes"] == ["the script ended before it imported torch"]
    assert "nothing was exchanged" in done.stderr


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("failing_loop.py", ["backward", "9"]), pytest.param("failing_loop.py", ["forward", "9"], marks=pytest.mark.more)],
)
def test_a_training_that_fails_shows_its_own_traceback(script: str, arguments: list[str]) -> None:
    assert assert_same(SCRIPTS / script, *arguments)[0] == 1


def test_the_scripts_process_imports_no_slow_packages(tmp_path: Path) -> None:
    """Each of these packages takes a tenth of a second or more, which a short script would lose."""
    slow = {"pydantic", "scipy", "pooch", "rich", "typer", "torch._dynamo", "hotloop.plan", "hotloop.lowering.program"}
    script = tmp_path / "script.py"
    script.write_text(f"import sys, torch\nprint(sorted({slow!r} & set(sys.modules)))\n")
    done = outcome([*RUN, str(script)])
    assert done[0] == 0 and done[1] == "[]\n"


TRAINING = SCRIPTS / "exchangeable_training.py"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hotloop" / "exchanges"


def record_of(tmp_path: Path, *options: str) -> tuple[dict, tuple[int, str, str]]:
    """Runs the training; returns the record and the outcome."""
    record, checkpoint = tmp_path / "record.json", tmp_path / "checkpoint.pt"
    command = [*RUN, str(TRAINING), "--record", str(record), *options]
    found = outcome([*command, "--", "--epochs", "4", "--checkpoint", str(checkpoint)])
    return json.loads(record.read_text()), found


def test_an_exact_training_has_every_byte_of_the_plain_one(tmp_path: Path, cache: Path) -> None:
    """Two optimizers, accumulation, a gradient scaler, clipping, a schedule, an average of weights, a checkpoint of its own."""
    import torch

    plain = outcome([sys.executable, str(TRAINING), "--epochs", "4", "--checkpoint", str(tmp_path / "plain.pt")])
    record, found = record_of(tmp_path, "--exact")
    assert found == plain and found[0] == 0 and found[2] == "end\n"
    saved = torch.load(tmp_path / "checkpoint.pt")
    own = torch.load(tmp_path / "plain.pt")
    assert saved["optimizer"]["param_groups"] == own["optimizer"]["param_groups"]
    assert all(torch.equal(saved["model"][name], own["model"][name]) for name in own["model"])
    parts = {part["kind"]: part for part in record["parts"]}
    assert parts["data loader"]["proof"] == "bitwise" and parts["data loader"]["proven"] >= 3
    assert record["exact"] and record["steps"] > 50
    sure = [part["used"] and not part["was_busy"] for part in record["parts"]]
    assert bool(list(cache.glob("*.json"))) is any(sure)


def test_a_checkpoint_continues_in_plain_python_and_under_hotloop(tmp_path: Path, cache: Path) -> None:
    """Each of both writes a checkpoint from which the other continues."""
    plain, hosted = [sys.executable, str(TRAINING)], [*RUN, str(TRAINING), "--exact", "--"]
    ends = []
    for first, then in ((plain, hosted), (hosted, plain)):
        checkpoint = str(tmp_path / "checkpoint.pt")
        begun = outcome([*first, "--epochs", "3", "--checkpoint", checkpoint])
        ends.append((begun, outcome([*then, "--epochs", "3", "--resume", checkpoint])))
    assert ends[0] == ends[1] and ends[0][1][0] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_that_the_training_forks_runs_on_without_exchanges(cache: Path) -> None:
    plain = outcome([sys.executable, str(TRAINING), "--fork"])
    found = outcome([*RUN, str(TRAINING), "--exact", "--", "--fork"])
    assert found == plain and found[0] == 0 and "child ended with 5" in found[1]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--accept", "bf8"], "--accept is 'bf8'"),
        (["--accept", "reduced-precision", "--exact"], "reduced precision changes results"),
    ],
)
def test_options_that_can_not_be_are_one_line(options: list[str], line: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('out')")
    done = subprocess.run([*RUN, str(script), *options], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and line in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_an_option_of_the_script_needs_two_hyphens(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('out')")
    done = subprocess.run([*RUN, str(script), "--epochs", "3"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    line = "error: no such option: --epochs. Put the script's own options after --. See: hotloop run --help"
    assert done.stderr.splitlines() == [line]


@pytest.mark.more
def test_a_dry_run_uses_no_exchange(tmp_path: Path, cache: Path) -> None:
    record, found = record_of(tmp_path, "--dry-run")
    assert found[0] == 0 and not any(part["used"] for part in record["parts"])


@pytest.mark.more
def test_a_training_that_fails_with_exchanges(cache: Path) -> None:
    plain = outcome([sys.executable, str(TRAINING), "--fail"])
    found = outcome([*RUN, str(TRAINING), "--", "--fail"])
    assert found[0] == plain[0] == 1 and found[2] == plain[2]
