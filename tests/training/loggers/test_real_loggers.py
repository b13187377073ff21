"""Loggers with their real libraries and real processes: figures, a kill and a resume, a server, failures."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from hotloop.training.run import Run
from tests.support.processes.in_process_command import SMALL

LIBRARIES = ("tensorboard", "mlflow", "wandb", "trackio")

TASK = f"""{SMALL}
import json
import os
import signal
import time
from pathlib import Path


def kill_in_epoch_4(view):
    if view.event != "epoch" or view.epoch != 4 or "KILL" not in os.environ:
        return
    names = os.environ["KILL"].split()
    while True:
        known = json.loads((view.run / "loggers.json").read_text())
        if all(known.get(name, {{}}).get("step") == 12 for name in names):
            break
        time.sleep(0.05)
    time.sleep(float(os.environ.get("KILL_AFTER_S", 0)))
    os.kill(os.getpid(), signal.SIGKILL)


task = make(epochs=6, test=(X, Y), callbacks=[kill_in_epoch_4], loggers=["csv"])
"""

pytestmark = pytest.mark.more


def is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if not is_installed(name)]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}, which make test-all installs")


def assert_same(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6)


@pytest.fixture
def surroundings(tmp_path: Path) -> dict[str, str]:
    """Local stores of all libraries in the test's folder.

    Without WANDB_SERVICE, the address of the service that an earlier test of this process has started: each training
    starts a service of its own, as from a shell.
    """
    (tmp_path / "task.py").write_text(TASK)
    given = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return given | {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }


def hotloop(folder: Path, surroundings: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hotloop", "train", *arguments]
    return subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True, timeout=600)


def train(folder: Path, surroundings: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return hotloop(folder, surroundings, "task.py", "--run", "run", "--plan", "baseline", *arguments)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["train_loss"]) for row in Run.open(folder / "run").epochs]


def from_csv(folder: Path, name: str = "train_loss") -> list[tuple[int, float]]:
    with (folder / "run" / "figures.csv").open() as file:
        return [(int(row["step"]), float(row["value"])) for row in csv.DictReader(file) if row["figure"] == name]


def from_mlflow(folder: Path, name: str = "train_loss", address: str = "") -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(address or f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("hotloop")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["batch_size"] == "5"
    return sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))


def from_trackio(folder: Path, name: str = "train_loss") -> list[tuple[int, float]]:
    """Reads in a process of its own, since Trackio reads TRACKIO_DIR when it is imported."""
    code = (
        "import json\nfrom trackio.sqlite_storage import SQLiteStorage as S\n"
        "(name,) = S.get_runs('hotloop')\nprint(json.dumps(S.get_logs('hotloop', name)))"
    )
    surroundings = os.environ | {"TRACKIO_DIR": str(folder / "trackio")}
    done = subprocess.run([sys.executable, "-c", code], env=surroundings, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])
    return [(row["step"], row[name]) for row in rows if name in row]


def from_tensorboard(folder: Path, name: str = "loss/train") -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run" / "tensorboard"))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(name)]


def from_wandb(path: Path, name: str = "train_loss") -> list[tuple[int, float]]:
    """Reads an offline folder's file of records, which Weights & Biases would send."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    (file,) = path.glob("run-*.wandb")
    for content in leveldb_records(file.read_bytes()[7:]):
        record = Record()
        record.ParseFromString(content)
        items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        if name in items:
            found.append((record.history.step.num, float(items[name])))
    return found


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """Yields the records of LevelDB's log format: blocks of 32 kB, each part with checksum, length and type.

    The file's first block has a header of 7 bytes, which `content` lacks.
    """
    at, parts = 0, b""
    while at + 7 <= len(content):
        left_in_block = 32768 - (at + 7) % 32768
        if left_in_block < 7:
            at += left_in_block
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part
            yield parts
            parts = b""


READERS: dict[str, Callable[[Path], list[tuple[int, float]]]] = {
    "csv": from_csv,
    "tensorboard": from_tensorboard,
    "mlflow": from_mlflow,
    "trackio": from_trackio,
}


@needs(*LIBRARIES)
def test_each_logger_has_each_figure_once_after_a_kill_and_a_resume(
    tmp_path: Path, surroundings: dict[str, str]
) -> None:
    """One training with all loggers: one in the Task, the others on the command line.

    The checkpoint is before the kill's last epochs, so that the resumed run repeats an epoch which each record has.
    """
    asked = [argument for name in LIBRARIES for argument in ("--log", name)]
    killed = train(
        tmp_path,
        surroundings | {"KILL": "csv mlflow wandb trackio", "KILL_AFTER_S": "2"},
        *asked,
        "--checkpoint-every",
        "10",
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    loggers = tmp_path / "run" / "loggers.json"
    before = json.loads(loggers.read_text())
    assert {name: entry["step"] for name, entry in before.items()} == dict.fromkeys(before, 12)
    # As after a kill between the record of a figure and the note of its step: the record itself knows its last step.
    stale = {name: entry | {"step": -1} if name != "wandb" else entry for name, entry in before.items()}
    loggers.write_text(json.dumps(stale))

    resumed = hotloop(tmp_path, surroundings, "--resume", "run")
    assert resumed.returncode == 0, resumed.stderr
    after = json.loads(loggers.read_text())
    assert {name: entry["id"] for name, entry in after.items()} == {name: entry["id"] for name, entry in before.items()}
    expected = losses(tmp_path)
    assert [step for step, _ in expected] == [4, 8, 12, 16, 20, 24]
    for name, read in READERS.items():
        found = read(tmp_path)
        assert [step for step, _ in found] == [step for step, _ in expected], name
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6), name
    for name in ("csv", "mlflow", "trackio"):
        (point,) = READERS[name](tmp_path, "test_loss")  # type: ignore[call-arg]
        assert point[0] == 24 and point[1] == pytest.approx((Run.open(tmp_path / "run").final or {})["test_loss"])

    folders = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{before['wandb']['id']}"))
    assert len(folders) == 2  # offline, a resumed run has a second folder of the same id, which is complete
    assert_same(from_wandb(folders[-1]), expected)


@needs("trackio")
def test_figures_that_a_kill_took_from_a_logger_are_sent_by_the_resumed_run(
    tmp_path: Path, surroundings: dict[str, str]
) -> None:
    """Trackio writes from a thread of its own: a kill right after a figure may take it."""
    killed = train(tmp_path, surroundings | {"KILL": "trackio"}, "--log", "trackio", "--checkpoint-every", "10")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert hotloop(tmp_path, surroundings, "--resume", "run").returncode == 0
    assert_same(from_trackio(tmp_path), losses(tmp_path))


@needs("mlflow")
def test_a_logger_of_a_resumed_run_alone_gets_the_earlier_epochs(tmp_path: Path, surroundings: dict[str, str]) -> None:
    assert train(tmp_path, surroundings, "--epochs", "2").returncode == 0
    assert hotloop(tmp_path, surroundings, "--resume", "run", "--epochs", "4", "--log", "mlflow").returncode == 0
    assert_same(from_mlflow(tmp_path), losses(tmp_path))
    assert_same(from_csv(tmp_path), losses(tmp_path))


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "files")]
    surroundings = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # its jobs need huey
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen([*command, *store], env=surroundings, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 180
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@needs("mlflow", "flask", "aiohttp")
def test_a_server_of_mlflow_that_ends_and_starts_again(tmp_path: Path, surroundings: dict[str, str]) -> None:
    quick = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
    with mlflow_server(tmp_path) as address:
        remote = surroundings | quick | {"MLFLOW_TRACKING_URI": address}
        assert train(tmp_path, remote, "--log", "mlflow", "--epochs", "2").returncode == 0
        assert_same(from_mlflow(tmp_path, address=address), losses(tmp_path))
    without = hotloop(tmp_path, remote, "--resume", "run", "--epochs", "4")
    assert without.returncode == 0, without.stderr
    said = " ".join(without.stderr.split())
    assert said.count("mlflow failed (") == 1 and "mlflow lacks" in said
    assert len(losses(tmp_path)) == 4 and Run.open(tmp_path / "run").reason == "finished"
    with mlflow_server(tmp_path) as address:
        back = remote | {"MLFLOW_TRACKING_URI": address}
        assert hotloop(tmp_path, back, "--resume", "run", "--epochs", "5").returncode == 0
        assert_same(from_mlflow(tmp_path, address=address), losses(tmp_path))


@needs("trackio", "mlflow")
def test_the_json_of_train_is_alone_on_stdout(tmp_path: Path, surroundings: dict[str, str]) -> None:
    done = train(tmp_path, surroundings, "--log", "trackio", "--log", "mlflow", "--json")
    assert json.loads(done.stdout)["reason"] == "finished"


def test_an_unknown_logger_and_a_missing_library_are_one_line_before_training(
    tmp_path: Path, surroundings: dict[str, str]
) -> None:
    unknown = train(tmp_path, surroundings, "--log", "mlfow")
    assert unknown.returncode == 1 and unknown.stderr.count("\n") == 1, unknown.stderr
    assert "there is no logger 'mlfow'" in unknown.stderr and "Did you mean 'mlflow'" in unknown.stderr
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(
        "import importlib.machinery as m\nreal = m.PathFinder.find_spec\n"
        "m.PathFinder.find_spec = classmethod(lambda cls, name, *rest:"
        " None if name.partition('.')[0] == 'wandb' else real(name, *rest))\n"
    )
    hidden = surroundings | {"PYTHONPATH": f"{tmp_path / 'hidden'}:{surroundings.get('PYTHONPATH', '')}"}
    missing = train(tmp_path, hidden, "--log", "wandb")
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1, missing.stderr
    assert "pip install wandb" in missing.stderr
    assert not (tmp_path / "run").exists()
