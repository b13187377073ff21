"""A training that ends before its first step leaves nothing behind: neither an error, nor Ctrl-C, nor SIGTERM."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.processes.forked_server import Server
from tests.support.processes.in_process_command import SMALL, Hotloop
from tests.support.processes.resumed_training import until

FAILING = """
class Failing(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.calls == AT:
                raise ValueError("planted")
        return super().forward(x)


task = make(model=Failing, epochs=1)
"""


def test_an_error_in_the_first_step_leaves_no_folder_in_the_way(hotloop: Hotloop) -> None:
    Path("task.py").write_text(SMALL + FAILING.replace("AT", "1"))
    failed = hotloop("train", "task.py", "--run", "run", "--device", "cpu")
    assert failed.code == 1 and "planted" in failed.err and "nothing was trained yet" in failed.err
    assert not Path("run").exists()

    Path("mended.py").write_text(SMALL + FAILING.replace("AT", "-1"))
    assert hotloop("train", "mended.py", "--run", "run", "--device", "cpu").code == 0


def test_an_error_after_a_step_keeps_the_run(hotloop: Hotloop) -> None:
    Path("task.py").write_text(SMALL + FAILING.replace("AT", "3"))
    failed = hotloop("train", "task.py", "--run", "run", "--device", "cpu")
    assert failed.code == 1 and "planted" in failed.err
    assert Path("run", "run.json").is_file()
    assert hotloop("train", "--resume", "run").code == 1
    assert Path("run", "run.json").is_file()


def test_an_error_in_the_first_step_of_a_resumed_run_keeps_it(hotloop: Hotloop) -> None:
    Path("task.py").write_text(SMALL + "task = make(epochs=1)\n")
    assert hotloop("train", "task.py", "--run", "run", "--device", "cpu").code == 0
    copy = Path("run", "source", "task.py")
    copy.write_text(SMALL + FAILING.replace("AT", "1"))
    failed = hotloop("train", "--resume", "run", "--epochs", "2")
    assert failed.code == 1
    assert Path("run", "run.json").is_file() and list(Path("run", "checkpoints").glob("*"))


SLOW = """
import time
from pathlib import Path


def slowly(parameters):
    Path("waiting").touch()
    for _ in range(1200):  # not in one go: Python hears a signal that comes just before a sleep only after it
        time.sleep(0.1)


task = make(optimizer=slowly)
"""


@pytest.mark.parametrize(
    ("number", "code", "says"), [(signal.SIGINT, 130, "stopped by Ctrl-C"), (signal.SIGTERM, 143, "stopped by SIGTERM")]
)
def test_a_signal_before_the_first_step_is_one_line_and_no_run(
    number: signal.Signals, code: int, says: str, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(SMALL + SLOW)
    process = server.start("train", "task.py", "--run", "run", cwd=tmp_path)
    try:
        assert until(process, (tmp_path / "waiting").exists)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (code, "", f"error: {says}\n")
    assert not (tmp_path / "run").exists()
