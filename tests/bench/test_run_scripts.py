"""The bench of scripts pairs runs, compares output and exit codes, and prepares public scripts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.public_scripts import sources
from bench.public_scripts.sources import STAND_INS, Length, Measured, PublicScript, prepare, read_list
from bench.run_scripts import calibrate, compare_numbers, differences, geometric_mean, measure, own_case, public_case


@pytest.mark.parametrize(
    ("plain", "hosted", "expected"),
    [
        ("loss 1.50\n", "loss 1.50\n", (True, 0.0, 0.0)),
        ("loss 1.50 2\n", "loss 1.20 2\n", (True, pytest.approx(0.2), pytest.approx(0.2 / math.sqrt(2)))),
        ("loss 9.99\n", "loss 10.01\n", (True, pytest.approx(0.02 / 10.01), pytest.approx(0.02 / 10.01))),
        ("loss  9.99\n", "loss 10.01\n", (True, pytest.approx(0.02 / 10.01), pytest.approx(0.02 / 10.01))),
        ("loss 1.50\n", "error 1.50\n", (False, math.inf, math.inf)),
        ("loss 1.50\n", "loss 1.50 1\n", (False, math.inf, math.inf)),
        ("loss nan\n", "loss 1.50\n", (False, math.inf, math.inf)),
    ],
)
def test_differences_of_text_and_of_numbers(plain: str, hosted: str, expected: tuple[bool, float, float]) -> None:
    assert differences(plain, hosted) == expected


def test_printed_times_are_left_out() -> None:
    assert differences("loss 1 in 20 ms\n", "loss 1 in 30 ms\n", [r"in \d+ ms"]) == (True, 0.0, 0.0)


def test_the_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0) and geometric_mean([]) is None


@pytest.mark.parametrize("beside", [False, True])
def test_a_pair_of_runs(tmp_path: Path, beside: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print('loss', 0.5, len(sys.argv)); sys.exit(3)")
    row = measure(own_case(script), 1, [], beside=beside)
    assert row["exit_codes"] == [3] and row["exit_codes_equal"] and row["stdout_equal"] and row["text_equal"]
    assert row["largest_difference"] == 0.0 and row["low"] is None and row["ratio"] > 0 and row["exchanged"] == []
    assert len(row["python_s"]) == len(row["hotloop_s"]) == (2 if beside else 1)


def test_cpu_time_of_a_run_and_of_its_late_updates(tmp_path: Path) -> None:
    """Under hotloop the planted script takes twice the CPU time in its late updates."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, torch\n"
        "late_s = 2 * float(sys.argv[1]) if 'hotloop' in sys.modules else float(sys.argv[1])\n"
        "optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)\n"
        "for update in range(90):\n"
        "    began = time.process_time()\n"
        "    while time.process_time() - began < (late_s if update >= 50 else 0): pass\n"
        "    optimizer.step()\n"
    )
    row = measure(own_case(f"{script} 0.02"), 1, [])
    assert row["script"] == "script 0.02" and row["exit_codes"] == [0]
    assert row["late_ratio"]["median"] < 0.7 and row["python_late_cpu_s"][0] >= 0.02
    assert row["cpu_ratio"]["median"] < 1 and row["python_cpu_s"][0] > 40 * 0.02 and row["cpu_ratio"]["low"] is None


@pytest.mark.parametrize("kind", ["adam", "rmsprop", "acting", "growing"])
def test_the_trainings_with_nothing_to_win_train(kind: str) -> None:
    script = Path(sources.__file__).parents[1] / "small_training.py"
    done = subprocess.run([sys.executable, str(script), kind, "2"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("loss ")


@pytest.mark.parametrize(("under_hotloop", "within"), [("1.001", True), ("1.5", False)])
def test_numbers_beside_pythons_own_spread(tmp_path: Path, under_hotloop: str, within: bool) -> None:
    """The planted script prints another number for each number of threads, and another one under hotloop."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        f"hosted = {under_hotloop} if 'hotloop' in sys.modules else 1.0\n"
        "print('loss', hosted * {'1': 1.0, '2': 1.01}[os.environ['OMP_NUM_THREADS']])\n"
    )
    row = compare_numbers(own_case(script), [], runs=1)
    assert row["spread"] == pytest.approx(0.01 / 1.01) and row["text_equal"] and row["within"] is within


def test_the_list_names_each_script_once_with_its_repository() -> None:
    scripts = read_list()
    assert len(scripts) >= 15 and len({(one.repository, one.folder, one.script, one.arguments) for one in scripts}) > 15
    for one in scripts:
        assert len(one.commit) == 40 and one.per_minute > 0 and (not one.data or hasattr(sources.data, one.data))
        places = [*one.arguments, *(after for _, after in one.edits)]
        assert any("{count}" in place for place in places), one.name


def listed(folder: Path, **fields: object) -> PublicScript:
    (folder / "owner/name/part").mkdir(parents=True)
    (folder / "owner/name/part/train.py").write_text("import sys\nepochs = 5\nprint(epochs, sys.argv[1:])\n")
    base = {"repository": "owner/name", "commit": "0" * 40, "folder": "part", "script": "train.py"}
    return PublicScript("one", **{**base, "arguments": ("--steps", "{count}"), "per_minute": 30, **fields})  # type: ignore[arg-type]


def test_a_public_script_runs_in_a_copy_with_its_length(tmp_path: Path) -> None:
    script = listed(tmp_path, edits=(("epochs = 5", "epochs = {count}"),), seeded=False)
    row = measure(public_case(script, tmp_path, script.length(6)), 1, [])
    assert row["exit_codes"] == [0] and row["stdout_equal"]
    command = prepare(script, tmp_path, tmp_path / "copy", 3)
    assert command == ["train.py", "--steps", "3"] and "epochs = 3" in (tmp_path / "copy/train.py").read_text()
    assert "epochs = 5" in (tmp_path / "owner/name/part/train.py").read_text()


def test_the_length_of_a_run(tmp_path: Path) -> None:
    script = listed(tmp_path)
    assert script.length(60) == Length(30) and script.length(0.1) == Length(1)
    assert script.length(60, Measured(start_s=10, count_s=0.5)) == Length(100)
    pictures = replace(script, pictures=True)
    assert pictures.length(60, Measured(0, 120)) == Length(1, 30_000)
    assert pictures.length(60, Measured(0, 20)) == Length(3)


def test_lengths_are_measured(tmp_path: Path) -> None:
    script = listed(tmp_path, edits=(("epochs = 5", "import time; epochs = time.sleep(0.3 * {count})"),))
    calibrate([script], tmp_path)
    start_s, count_s = json.loads((tmp_path / "lengths.json").read_text())["one"]
    assert start_s >= 0 and count_s > 0


def test_an_edit_without_its_text_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one has no 'epochs = 7'"):
        prepare(listed(tmp_path, edits=(("epochs = 7", ""),)), tmp_path, tmp_path / "copy", 3)


@pytest.mark.parametrize("name", ["citations", "words", "characters", "sine_waves", "photographs"])
def test_generated_data(name: str, tmp_path: Path) -> None:
    getattr(sources.data, name)(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and all(path.stat().st_size > 20 for path in files)


def test_the_stand_in_reads_a_sample_as_torchvision_does() -> None:
    code = (
        "import json; from torchvision import datasets, transforms as t\n"
        "chain = t.Compose([t.Resize(32), t.CenterCrop(32), t.ToTensor(), t.Normalize((0.5,), (0.5,))])\n"
        "data = datasets.FakeData(4, (3, 40, 40), transform=chain)\n"
        "image, label = data[1]\n"
        "print(json.dumps([list(image.shape), float(image.min()) >= -1, float(image.max()) <= 1, label, len(data)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(STAND_INS)}, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[3, 32, 32], True, True, 1, 4]
