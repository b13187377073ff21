"""A script under watch does what it does alone, and what was seen of it arrives however it ends."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from hotloop.errors import TaskError
from hotloop.profiler.base.steps import ProfileFacts, ProfileSettings, StepFact
from hotloop.profiler.profile import record_script
from hotloop.profiler.script_child import PlainLineSampler
from hotloop.profiler.summary import summarize
from hotloop.scripts import script_process as host
from hotloop.scripts.child import ImportHook

SCRIPTS = Path(__file__).parents[1] / "support/scripts"


def line_that(script: str, says: str) -> int:
    lines = (SCRIPTS / script).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {says}"))


def line_that_ends_a_step(script: str) -> int:
    return line_that(script, "ends the step")


@pytest.fixture
def alone(capfd, monkeypatch):
    """Runs a script alone and under watch; the two must look the same from outside. Returns the profile."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def compared(script: str, *arguments: str):
        command = [sys.executable, str(SCRIPTS / script), *arguments]
        plain = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=dict(os.environ))
        capfd.readouterr()
        profile = record_script(SCRIPTS / script, arguments)
        watched = capfd.readouterr()
        assert (watched.out, watched.err, profile.exit_code) == (plain.stdout, plain.stderr, plain.returncode)
        return profile

    return compared


def test_workers_evaluation_and_checkpoints(alone) -> None:
    """What it prints holds its weights to the bit, and the random numbers that are drawn next."""
    profile = alone("gradient_accumulation.py", "2")
    assert profile.step_where.endswith(f"gradient_accumulation.py:{line_that_ends_a_step('gradient_accumulation.py')}")
    assert profile.steps == 60 and profile.samples_per_step == 40
    assert sum(profile.phases.values()) == pytest.approx(profile.step_ms)
    assert profile.apart.evaluation_s > 0 and profile.apart.checkpoint_s > 0
    assert profile.loaders[0].workers == 2 and profile.loaders[0].batch_size == 10
    assert profile.optimizers[0].kind == "SGD" and profile.optimizers[0].implementation == "forloop"
    assert profile.stopped == "enough steps were recorded"
    assert {"0", "3"} <= {module.name for module in profile.modules}


@pytest.mark.parametrize("how", [pytest.param("forward", marks=pytest.mark.more), "backward"])
def test_an_error_in_a_step_that_is_watched_closely(alone, how) -> None:
    profile = alone("failing_loop.py", how, "9")  # an instrumented step
    assert profile.exit_code == 1 and profile.steps > 0 and profile.stopped == ""


@pytest.mark.more
def test_warnings_and_tracebacks_name_the_scripts_own_lines(alone) -> None:
    assert alone("warnings_each_step.py", "120").steps > 20


@pytest.mark.more
def test_an_error_that_is_caught_before_steps_are_known(alone) -> None:
    alone("warnings_each_step.py", "2")


@pytest.mark.more
def test_variables_that_a_function_keeps_and_functions_that_are_pickled(alone) -> None:
    assert alone("pickled_variables.py").steps > 20


@pytest.mark.more
def test_a_script_that_waits_for_all_threads_in_its_own_folder(alone, monkeypatch) -> None:
    """Modules that are built into Python have no file, and none of them lies there."""
    monkeypatch.chdir(SCRIPTS)
    assert alone("thread_join.py").steps > 0


@pytest.mark.more
def test_a_loss_in_a_compiled_function_is_not_compiled_again(alone) -> None:
    assert alone("repeated_compilation.py").steps > 20


@pytest.mark.more
@pytest.mark.parametrize("how", ["before", "after", "never"])
def test_files_beside_a_script_that_have_names_of_pythons_modules(how, tmp_path, alone) -> None:
    for name in ("statistics", "resource"):
        (tmp_path / f"{name}.py").write_text("print('run', __name__)\nmedian = own = 7\n")
    (tmp_path / "beside.py").write_text((SCRIPTS / "module_name_clash.py").read_text(encoding="utf-8"))
    assert alone(str(tmp_path / "beside.py"), how).steps > 0


@pytest.mark.more
def test_a_watch_that_fails_to_begin_is_none_of_the_scripts(tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "psutil.py").write_text("raise ValueError('planted')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    profile = record_script(SCRIPTS / "failing_loop.py", ["exit", "3"])
    assert (profile.exit_code, *capfd.readouterr()) == (3, "", "")
    assert profile.notes == ["recording could not start by an internal error of hotloop: ValueError: planted"]


@pytest.mark.more
def test_a_script_that_trains_in_other_processes_is_told_so(alone) -> None:
    assert "started 2 other processes" in alone("spawned_training.py", "2").notes[-1]


@pytest.mark.more
def test_an_exit_with_a_code_and_one_without_a_goodbye(capfd, tmp_path) -> None:
    profile = record_script(SCRIPTS / "failing_loop.py", ["exit", "30"])
    assert profile.exit_code == 3 and profile.steps > 0
    trace = tmp_path / "trace.json"
    profile = record_script(SCRIPTS / "failing_loop.py", ["os._exit", "400"], ProfileSettings(20, str(trace)))
    assert profile.exit_code == 4 and profile.steps == 20
    assert profile.trace == str(trace) and trace.is_file()
    assert capfd.readouterr() == ("", "")


@pytest.mark.more
@pytest.mark.parametrize(
    ("how", "code"),
    [pytest.param("interrupted", -signal.SIGINT, marks=pytest.mark.more), ("interrupted, then a text", 1)],
)
def test_an_interrupted_script_ends_with_the_exit_code_that_it_has_alone(alone, how: str, code: int) -> None:
    assert alone("failing_loop.py", how, "200").exit_code == code


@pytest.mark.parametrize(("text", "code"), [("", -signal.SIGINT), ("atexit.register(lambda: exec('pass'))", 1)])
def test_so_does_one_without_torch(alone, tmp_path, text: str, code: int) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(f"import atexit\n{text}\nraise KeyboardInterrupt\n")
    assert alone(str(script)).exit_code == code


@pytest.mark.more
def test_what_a_script_can_see_and_that_it_never_trains(alone, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    profile = alone("process_surroundings.py", "--flag", "a b")
    assert profile.steps == 0 and "never trained" in profile.notes[-1]


@pytest.mark.more
def test_a_script_without_torch(alone) -> None:
    profile = alone("numpy_network.py")
    assert "never imported torch" in profile.notes[-1]
    slow = next(one for one in profile.functions if one.function == "slow")
    step = next(one for one in profile.functions if one.function == "step")
    assert slow.where.endswith("numpy_network.py:9") and step.ms >= slow.ms
    for function in profile.functions:  # of those that were seen at work; of some only what they called was
        own = [line.own_ms for line in profile.lines if line.function == function.function]
        assert sum(own) in (0.0, pytest.approx(function.own_ms))


@pytest.mark.more
def test_a_network_by_hand_on_tensors_without_autograd(alone) -> None:
    profile = alone("manual_backward.py", "40")
    assert "never trained" in profile.notes[-1] and not profile.functions
    longest = max((one for one in profile.lines if one.function == "pool_backward"), key=lambda one: one.own_ms)
    assert longest.where.endswith(f":{line_that('manual_backward.py', 'the scatter')}")
    loop = next(one for one in profile.lines if one.where.endswith(f":{line_that('manual_backward.py', 'the loop')}"))
    assert loop.own_ms < longest.own_ms <= loop.ms


def test_a_stack_gives_functions_too() -> None:
    """From Python 3.12 on by this alone."""
    looks = PlainLineSampler()
    looks.begin()
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        os.waitpid(pid, 0) if (pid := os.fork()) else os._exit(0)  # a fork ends the thread and begins it anew
        time.sleep(0.01)
    looks.stop()
    looks.stop()
    here = test_a_stack_gives_functions_too.__code__
    found = next(one for one in looks.functions() if one["function"] == here.co_qualname)
    assert found["where"].endswith(f":{here.co_firstlineno}") and found["ms"] > 20
    assert max(one["own_ms"] for one in looks.lines() if one["function"] == here.co_qualname) <= found["ms"]


@pytest.mark.parametrize("own_s", [None, 0.001])
def test_how_often_threads_take_turns_is_the_scripts_own_afterwards(own_s: float | None) -> None:
    before, looks = sys.getswitchinterval(), PlainLineSampler()
    try:
        looks.begin()
        assert sys.getswitchinterval() < before
        if own_s is not None:
            sys.setswitchinterval(own_s)
        looks.stop()
        assert sys.getswitchinterval() == pytest.approx(own_s or before)
    finally:
        looks.stop()
        sys.setswitchinterval(before)


@pytest.mark.more
def test_lines_of_the_whole_run_are_looked_at_until_something_trains(alone, tmp_path) -> None:
    """By a thread, which the script counts: alone there is no other."""
    script = tmp_path / "counts.py"
    script.write_text(
        "import sys, torch\nx = torch.ones(2, requires_grad=True)\nx.sum().backward()\nprint(len(sys._current_frames()))\n"
    )
    alone(str(script))


@pytest.mark.more
def test_a_script_that_asks_for_torch_before_it_imports_it(alone) -> None:
    assert alone("torch_lookup.py").steps > 0


def test_what_is_only_looked_for_or_cannot_be_executed_is_waited_for(tmp_path, monkeypatch) -> None:
    (tmp_path / "awaited").mkdir()
    (tmp_path / "awaited" / "part.py").write_text("import os\nos.environ['AWAITED']\n")
    monkeypatch.syspath_prepend(tmp_path)
    said: list[str] = []
    waiting = ImportHook({"awaited.part"}, before=said.append, then=lambda: said.append("then"))
    waiting.begin()
    found = importlib.util.find_spec("awaited.part")
    assert found is not None and said == [] and waiting in sys.meta_path
    with pytest.raises(KeyError):
        importlib.import_module("awaited.part")
    monkeypatch.setenv("AWAITED", "1")
    module = importlib.import_module("awaited.part")
    assert said == ["awaited.part", "awaited.part", "then"] and waiting not in sys.meta_path
    assert "exec_module" not in vars(module.__spec__.loader)
    found.loader.exec_module(module)  # of a spec that was found meanwhile
    assert len(said) == 3 and "exec_module" not in vars(found.loader)


def test_torch_that_fails_to_be_imported_fails_as_it_does_alone(alone, tmp_path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('a library is missing')\n")
    assert alone("broken_torch.py", str(tmp_path)).exit_code == 1


def test_a_script_that_asks_for_another_profiler_is_profiled_on(tmp_path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        "import importlib.util\nimportlib.util.find_spec('cProfile')\n"
        "def slow():\n    return sum(range(1_000_000))\nslow()\n"
    )
    profile = record_script(script)
    assert [one.function for one in profile.functions if one.where.endswith("asks.py:3")] == ["slow"]
    assert not any("cProfile" in note for note in profile.notes)


@pytest.mark.parametrize("follows", ["", "import cProfile\n"])
def test_a_profile_function_that_a_script_sets_itself_stays(alone, tmp_path, follows: str) -> None:
    script = tmp_path / "profiles.py"
    script.write_text(
        "import sys\ndef heard(frame, event, argument): ...\nsys.setprofile(heard)\n"
        f"{follows}print(sys.getprofile() is heard)\n"
    )
    notes = alone(str(script)).notes
    if not hasattr(sys, "monitoring"):  # from Python 3.12 on, both are heard until the end
        assert any(f"the script uses {'cProfile' if follows else 'sys.setprofile'} itself" in note for note in notes)


def test_a_profiler_written_in_c_is_left_alone(alone, tmp_path) -> None:
    """It needn't ask Python whether somebody profiles, and takes the place."""
    (tmp_path / "yappi.py").write_text("import _lsprof\none = _lsprof.Profiler()\none.enable()\n")
    script = tmp_path / "profiles.py"
    script.write_text(
        "import yappi, cProfile\ndef counted(): ...\nfor _ in range(3): counted()\n"
        "print([one.callcount for one in yappi.one.getstats() if getattr(one.code, 'co_name', '') == 'counted'])\n"
    )
    assert any("the script uses yappi itself" in note for note in alone(str(script)).notes)


@pytest.mark.more
def test_torch_that_came_with_the_machines_sitecustomize(tmp_path, monkeypatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import torch\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert record_script(SCRIPTS / "failing_loop.py", ["exit", "30"]).steps > 0


@pytest.mark.more
@pytest.mark.skipif(os.name == "nt", reason="Windows has no fork")
def test_a_child_that_imports_torch_is_not_taken_for_the_script(tmp_path) -> None:
    script = tmp_path / "forks.py"
    script.write_text("import os\nif not os.fork():\n    import torch\nelse:\n    os.wait()\nos._exit(0)\n")
    assert record_script(script).notes == ["the script ended before anything was recorded"]


@pytest.mark.more
def test_memory_of_a_script_is_its_own_and_not_that_of_who_started_it() -> None:
    held = bytearray(b"x") * (1 << 30)
    profile = record_script(SCRIPTS / "failing_loop.py", ["exit", "30"])
    assert 0 < profile.peak_memory_bytes < len(held)


COUNTS = """
import signal, time
heard = []
signal.signal(signal.SIGINT, lambda *signal: heard.append(signal))
print("ready", flush=True)
while not heard:
    time.sleep(0.001)
time.sleep(0.3)  # another one would come right after
print(len(heard), flush=True)
"""

IN_A_TERMINAL = """
import fcntl, sys, termios
from pathlib import Path
from hotloop.profiler.profile import record_script
fcntl.ioctl(sys.stderr, termios.TIOCSCTTY, 0)
sys.exit(record_script(Path(sys.argv[1])).exit_code)
"""


@pytest.mark.more
@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals of this kind")
def test_ctrl_c_arrives_once_where_standard_input_is_not_the_terminal(tmp_path) -> None:
    import pty

    script = tmp_path / "counts.py"
    script.write_text(COUNTS)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        start_new_session=True,
    )
    os.close(theirs)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    os.write(ours, b"\x03")
    assert process.communicate(timeout=60)[0] == "1\n"
    assert process.returncode == 0
    os.close(ours)


@pytest.mark.more
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.more)])
def test_a_signal_goes_to_the_script_and_what_was_seen_arrives(number, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(host, "_is_in_foreground", lambda: False)  # no terminal sends this one, wherever tests run
    out = tmp_path / "out"

    def send() -> None:
        while "waiting" not in out.read_text():
            time.sleep(0.05)
        time.sleep(1.5)  # what was seen is written each second
        os.kill(os.getpid(), number)

    with out.open("w") as file:
        sender = threading.Thread(target=send)
        sender.start()
        profile = record_script(SCRIPTS / "failing_loop.py", ["wait"], ProfileSettings(40), stdout=file.fileno())
        sender.join()
    assert profile.exit_code == -number and profile.steps > 10


def test_a_script_is_stopped_when_its_time_is_up(tmp_path: Path, capfd) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import time\ntime.sleep(60)\n")
    profile = record_script(script, stop_after_s=0.5)
    assert profile.exit_code == -signal.SIGINT
    assert profile.stopped == "the script was stopped after 0.5 s, as asked for"
    assert capfd.readouterr().err == ""  # hotloop has stopped it, so the traceback says nothing


HOGWILD = """
import multiprocessing, os, sys, time
def train(): os.write(1, f"trains {os.getpid()}\\n".encode()); time.sleep(600)  # at once, since there are two
if __name__ == "__main__":
    others = [multiprocessing.get_context("fork").Process(target=train) for _ in range(2)]
    for one in others: one.start()
    for one in others: one.join()
"""


@pytest.mark.more
@pytest.mark.skipif(os.name == "nt", reason="Windows has no fork")
@pytest.mark.parametrize("ignores", [pytest.param(False, marks=pytest.mark.more), True])
def test_processes_that_a_script_has_started_are_stopped_with_it(tmp_path: Path, monkeypatch, ignores: bool) -> None:
    script, out = tmp_path / "hogwild.py", tmp_path / "out"
    script.write_text(HOGWILD)
    monkeypatch.setattr(host, "GRACE_S", 2.0 if ignores else 60.0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignores else signal.default_int_handler)
    try:
        with out.open("w") as file:
            profile = record_script(script, stop_after_s=2.0, stdout=file.fileno())
    finally:
        signal.signal(signal.SIGINT, before)
    assert ("went on" in profile.stopped) == ignores
    started = [int(line.split()[1]) for line in out.read_text().splitlines()]
    assert len(started) == 2
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in started if psutil.pid_exists(pid)], timeout=10)
    for one in alive:
        one.kill()
    assert not alive


def test_a_script_that_goes_on_after_ctrl_c_is_ended_and_that_is_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(host, "GRACE_S", 0.2)
    script = tmp_path / "goes_on.py"
    script.write_text("import time\ntime.sleep(60)\n")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the script inherits
    try:
        profile = record_script(script, stop_after_s=0.5)
    finally:
        signal.signal(signal.SIGINT, before)
    assert profile.exit_code == -signal.SIGTERM
    assert profile.stopped == "the script was stopped after 0.5 s, as asked for; it went on for 0.2 s after SIGINT"


def test_no_such_script() -> None:
    with pytest.raises(TaskError, match="there is no file"):
        record_script(Path("nowhere.py"))


def a_step(kind: str, ms: float, *flags: str, **apart_ms: float) -> StepFact:
    phases = {"forward": ms / 4, "backward": ms / 2, "python": ms / 4} if kind == "instrumented" else {}
    return StepFact(kind=kind, ms=ms, phases=phases, flags=list(flags), apart_ms=apart_ms)


def test_steps_that_are_not_like_the_others_lie_apart() -> None:
    usual = [a_step(kind, ms, "loader 0") for _ in range(10) for kind, ms in (("clean", 10.0), ("instrumented", 11.0))]
    unusual = [
        a_step("clean", 110.0, "loader 0", "evaluation", evaluation=95.0),
        a_step("instrumented", 60.0, "loader 0", "checkpoint", checkpoint=50.0),
        a_step("clean", 40.0, "loader 0"),
        a_step("instrumented", 30.0, "loader 0", "loader 1"),
    ]
    facts = ProfileFacts(torch=True, trained=24, anchor="a.py:1", steps=[*usual, *unusual])
    profile = summarize(facts, "a.py")
    assert profile.step_ms == 10
    assert profile.phases == pytest.approx({"forward": 2.5, "backward": 5.0, "python": 2.5})
    assert profile.apart.evaluation_s == pytest.approx(0.095 + 0.020)
    assert profile.apart.checkpoint_s == pytest.approx(0.050)
    assert profile.apart.other_s == pytest.approx(0.005 + 0.030)
    assert profile.overhead.ratio == pytest.approx(1.1) and profile.overhead.clean == 10
