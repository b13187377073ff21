"""Machines and terminals that are not as one expects: no home, no room, no threads, nobody who reads."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from hotloop.core.format import parse_seconds
from hotloop.core.plan_request import PlanRequest
from hotloop.core.processes import StopSignals, signal_handlers
from hotloop.core.terminal import Bar, Terminal
from hotloop.errors import DataError, PlanError
from hotloop.inference.npy import read_arrays
from hotloop.plan import Plan
from hotloop.training.cadence import CheckpointCadence
from tests.support.processes.in_process_command import SMALL, Hotloop, commands
from tests.support.tasks.task_sources import put

TASK = "task = make(epochs=2)\n"


@pytest.fixture
def hotloop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Hotloop]:
    with commands(tmp_path, monkeypatch, capfd) as run:
        put(tmp_path, TASK)
        yield run


def one_error(err: str) -> str:
    assert "Traceback" not in err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    return errors[0]


# ---------------------------------------------------------------- no home


def without_a_home(folder: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
    return kept | {"TMPDIR": str(folder)}


NOBODY = """
import pwd, sys
def unknown(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")
pwd.getpwuid = unknown
sys.argv[0] = "hotloop"
from hotloop.cli import main
main()
"""


@pytest.mark.more
def test_without_a_home_and_a_name_it_trains_and_evaluates(tmp_path: Path) -> None:
    put(tmp_path, TASK)

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", NOBODY, *args]
        return subprocess.run(
            command, cwd=tmp_path, env=without_a_home(tmp_path), capture_output=True, text=True, timeout=300
        )

    done = run("train", "task.py", "--device", "cpu", "--run", "run")
    assert done.returncode == 0, done.stderr
    assert "you have no home folder" in done.stderr
    done = run("evaluate", "run", "--on", "train", "--device", "cpu", "--trust")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "~").exists()


# ---------------------------------------------------------------- names and numbers


LONG = "n" * 300


@pytest.mark.parametrize(
    "args",
    [
        ("train", "task.py", "--run", LONG),
        ("train", "--resume", LONG),
        ("train", "task.py", "--plan", LONG),
        ("train", f"{LONG}.py"),
        ("evaluate", LONG),
        ("predict", LONG, "x.npy"),
        ("export", LONG, "--to", "x.pt"),
        ("profile", f"{LONG}.py"),
    ],
    ids=lambda args: " ".join(args)[:24],
)
def test_a_name_that_is_too_long_is_one_line(hotloop: Hotloop, args: tuple[str, ...]) -> None:
    done = hotloop(*args, *(["--device", "cpu"] if args[:2] == ("train", "task.py") else []))
    assert done.code == 1, done.err
    one_error(done.err)


@pytest.mark.parametrize("number", [4 * (psutil.cpu_count() or 1) + 1, 1_000_000, 2**63, 10**30])
def test_so_many_threads_are_refused_and_none_is_started(
    hotloop: Hotloop, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    done = hotloop("train", "task.py", "--device", "cpu", "--set", f"threads={number}")
    assert done.code == 1
    assert "logical core" in one_error(done.err)
    assert max(asked, default=0) < 1_000
    assert not Path("runs").exists()


def test_so_many_workers_are_refused(hotloop: Hotloop) -> None:
    done = hotloop("train", "task.py", "--device", "cpu", "--workers", "1000000")
    assert done.code == 1
    assert "workers=1000000 can't be run here" in one_error(done.err)


def test_four_threads_for_each_core_are_not(hotloop: Hotloop) -> None:
    assert hotloop("train", "task.py", "--device", "cpu", "--set", "threads=2").code == 0


@pytest.mark.parametrize("text", ["²", "9" * 5_000, "-1", "0", "1e400s", "٣s٣", "nan", ""])
def test_what_is_no_time_is_one_line(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        CheckpointCadence.parse(text)
    assert len(str(caught.value)) < 400
    with pytest.raises(PlanError):
        parse_seconds(text.replace("9" * 5_000, "x" * 5_000), "stop-after")


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 5_000 + "]" * 5_000, "x." * 5_000 + "x = 1", f"placement.{'a.' * 5_000}a = 'cpu'"]
)
def test_toml_that_is_nested_deep_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(text)
    with pytest.raises(PlanError) as caught:
        PlanRequest.from_value(tmp_path / "deep.toml")
    assert len(str(caught.value)) < 3_000


def test_a_long_value_is_cut_in_its_error() -> None:
    with pytest.raises(PlanError) as caught:
        Plan(device="cpu", precision="x" * 100_000)
    assert len(str(caught.value)) < 400


# ---------------------------------------------------------------- archives


def archive(path: Path, members: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", kind) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def array(value: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value)
    return stream.getvalue()


def declaring(gigabytes: float) -> bytes:
    stream = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (int(gigabytes * 1e9 / 4),)}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue() + bytes(16)


def encrypted(path: Path) -> Path:
    content = bytearray(archive(path, {"x.npy": array(np.ones(3))}).read_bytes())
    content[6] |= 1
    content[content.rindex(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    return path


def unknown_compression(path: Path) -> Path:
    content = bytearray(archive(path, {"x.npy": array(np.ones(3))}).read_bytes())
    content[8] = content[content.rindex(b"PK\x01\x02") + 10] = 99
    path.write_bytes(content)
    return path


ARCHIVES: dict[str, Callable[[Path], Path]] = {
    "another member": lambda path: archive(path, {"x.npy": array(np.ones(3)), "notes.txt": b"mine"}),
    "a member in a folder": lambda path: archive(path, {"../x.npy": b"no array"}),
    "encrypted": encrypted,
    "unknown compression": unknown_compression,
    "lzma": lambda path: archive(path, {"x.npy": array(np.ones(3))}, zipfile.ZIP_LZMA),
    "37 GB": lambda path: archive(path, {"x.npy": declaring(37)}),
    "cut off": lambda path: archive(path, {"x.npy": array(np.ones(3))[:-4]}),
    "a false header": lambda path: archive(path, {"x.npy": b"\x93NUMPY\x01\x00\x05\x00{1:2}"}),
    "nothing": lambda path: archive(path, {"x.npy": b""}),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_is_none_of_numpys_is_one_line(name: str, tmp_path: Path) -> None:
    path = ARCHIVES[name](tmp_path / "x.npz")
    with pytest.raises(DataError) as caught:
        read_arrays(path)
    assert "\n" not in str(caught.value)


def test_numpys_own_archives_are_read(tmp_path: Path) -> None:
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", a=np.zeros((1000, 1000)), b=np.arange(3))
        found = read_arrays(tmp_path / "x.npz")
        assert isinstance(found, dict)
        assert found["a"].shape == (1000, 1000)
        assert found["b"].tolist() == [0, 1, 2]


# ---------------------------------------------------------------- streams


FULL = Path("/dev/full")
STREAMS = ["stderr", "both", "closed stdout", "all closed"]


@pytest.mark.more
@pytest.mark.skipif(not FULL.exists(), reason="Linux has a file that is always full")
@pytest.mark.parametrize(
    "stream",
    ["stdout", "closed stderr", *(pytest.param(more, marks=pytest.mark.more) for more in STREAMS)],
)
def test_where_nobody_can_read_the_work_is_done(tmp_path: Path, stream: str) -> None:
    put(tmp_path, TASK)
    shell = {
        "stdout": "> /dev/full",
        "stderr": "2> /dev/full",
        "both": "> /dev/full 2>&1",
        "closed stdout": ">&-",
        "closed stderr": "2>&-",
        "all closed": "<&- >&- 2>&-",
    }[stream]
    command = f'exec "{sys.executable}" -m hotloop train task.py --device cpu --run run --json {shell}'
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    journal = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert journal[-1]["event"] == "final", "the training was lost"
    if stream in ("stdout", "closed stdout"):
        assert done.returncode == 1
        assert "stdout" in one_error(done.stderr)
    if stream in ("stderr", "closed stderr"):
        assert done.returncode == 0
        assert json.loads(done.stdout)["reason"] == "finished"


class Broken(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.EIO])
def test_a_console_that_can_not_write_never_raises(number: int) -> None:
    console = Terminal(file=Broken(number))
    console.print("one")
    console.print("two")


def test_a_bar_that_can_start_no_thread_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    file = io.StringIO()
    monkeypatch.setattr(threading.Thread, "start", start)
    bar = Bar(console=Terminal(file=file, force_terminal=True))
    with bar:
        work = bar.add_task("", total=2)
        bar.update(work, completed=1)
    bar.start()
    bar.stop()


# ---------------------------------------------------------------- signals

SLOW = """
import time
def slowly(model, batch):
    time.sleep(0.01)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
task = make(epochs=100000, loss=None, step=slowly)
"""
HANGING = SMALL + "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"


def begun(folder: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(3000):
        path = folder / "run" / "reached"
        if path.exists() and path.read_bytes() > b"%020d" % 3:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise TimeoutError


def training(folder: Path, ignored: bool = False) -> subprocess.Popen[str]:
    put(folder, SLOW)

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-m", "hotloop", "train", "task.py", "--device", "cpu", "--run", "run"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
        start_new_session=True,
    )


@pytest.mark.more
def test_a_terminal_that_is_closed_saves_and_stops_the_training(tmp_path: Path) -> None:
    process = training(tmp_path)
    try:
        begun(tmp_path, process)
        process.send_signal(signal.SIGHUP)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGHUP
    assert "stopped (SIGHUP) at step" in err
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.more
def test_under_nohup_it_goes_on(tmp_path: Path) -> None:
    process = training(tmp_path, ignored=True)
    try:
        begun(tmp_path, process)
        process.send_signal(signal.SIGHUP)
        before = (tmp_path / "run" / "reached").read_bytes()
        for _ in range(3000):
            if (tmp_path / "run" / "reached").read_bytes() > before:
                break
            time.sleep(0.02)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert "stopped (SIGTERM)" in err


@pytest.mark.more
@pytest.mark.parametrize("at", ["loading", "training"])
def test_ctrl_c_ten_times_in_a_moment_prints_no_traceback(tmp_path: Path, at: str) -> None:
    if at == "training":
        process = training(tmp_path)
    else:
        (tmp_path / "task.py").write_text(HANGING)
        process = subprocess.Popen(
            [sys.executable, "-m", "hotloop", "train", "task.py", "--device", "cpu"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
            start_new_session=True,
        )
    try:
        if at == "training":
            begun(tmp_path, process)
        else:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
        for _ in range(10):
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "KeyboardInterrupt" not in err


FINALIZED = """
import os, signal, sys
class Slow:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
class Broken:
    def __del__(self):
        raise ValueError("not hidden")
Slow(); Broken()
raise SystemExit
"""


@pytest.mark.more
def test_an_interrupt_of_a_finalizer_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(FINALIZED)
    done = subprocess.run(
        [sys.executable, "-m", "hotloop", "train", "task.py", "--device", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "KeyboardInterrupt" not in done.stderr
    assert "not hidden" in done.stderr


def test_a_signal_that_somebody_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals().listen():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with signal_handlers(lambda number, frame: None, signal.SIGTERM, signal.SIGHUP):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a parent's death")
def test_a_killed_profile_leaves_no_script_behind(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\nwhile True: time.sleep(0.05)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "hotloop", "profile", "script.py"], cwd=tmp_path, start_new_session=True
    )
    try:
        for _ in range(3000):
            if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
                break
            assert process.poll() is None
            time.sleep(0.02)
        script = psutil.Process(int((tmp_path / "pid").read_text()))
        process.kill()
        process.wait()
        psutil.wait_procs([script], timeout=30)
        assert not script.is_running() or script.status() == psutil.STATUS_ZOMBIE
    finally:
        process.kill()
