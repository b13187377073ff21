"""The tests that need a GPU, the error for tensors on mixed devices, and a training of two ranks."""

from __future__ import annotations

import importlib.util
import math
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu.commands import ended, started, within
from bench.gpu.setting import ROOT, Result, Setting, Skipped

AGREES = 1e-3
"""By how much the loss of two ranks may differ from that of one process, as a share: they add up in another order."""


def run(part: str, setting: Setting) -> Result:
    return {"mixed-devices": mixed_devices, "suite": suite, "ranks": ranks}[part](setting)


def mixed_devices(setting: Setting) -> Result:
    """A tensor on another device is refused in one line that names both devices."""
    other = "meta" if setting.device == "cpu" else "cpu"
    folder = _emptied(setting, "mixed")
    command = ["train", "bench/gpu/mixed.py", "-p", f"other={other}", "--device", setting.device]
    done = within(*command, "--plan", "baseline", "--run", str(folder / "run"), codes=(1,))
    errors = [line for line in done.err.splitlines() if "error: " in line]
    line = errors[-1] if errors else ""
    is_clear = other in line and setting.device in line and "Traceback" not in done.err
    wrong = "" if is_clear else f"expected one line that names {setting.device} and {other}: {line or 'no error'}"
    return Result(line, {"line": line}, wrong)


def suite(setting: Setting) -> Result:
    """`tests/gpu` by pytest, each test that fails with its name."""
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest isn't installed here")
    report = _emptied(setting, "suite") / "junit.xml"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
    if not report.is_file():
        raise RuntimeError(f"pytest ended with {code} before its report")
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [_name(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [_name(case) for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    figure = f"{passed} of {len(cases)} tests passed, {len(skipped)} skipped"
    wrong = f"{len(failed)} of {len(cases)} tests failed: {', '.join(failed[:5])}" if failed else ""
    if not failed and code:
        wrong = f"pytest ended with {code}: {figure}"
    if not failed and setting.device == "cuda" and not passed:
        wrong = "no test of tests/gpu ran"
    return Result(figure, {"failed": failed, "skipped": skipped, "passed": passed}, wrong)


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"


def ranks(setting: Setting) -> Result:
    """Two ranks that share each batch come to the loss of one process."""
    if setting.device == "cuda":
        import torch

        if torch.cuda.device_count() < 2:
            raise Skipped("one GPU: ranks=2 needs two")
    folder = _emptied(setting, "ranks")
    losses = [trained(number, folder, setting) for number in (1, 2)]
    figure = f"train loss of one process {losses[0]:.6f}, of two ranks {losses[1]:.6f}"
    wrong = "" if math.isclose(*losses, rel_tol=AGREES) else f"they differ: {figure}"
    return Result(figure, {"losses": losses}, wrong)


def trained(number: int, folder: Path, setting: Setting) -> float:
    """The training loss after an epoch."""
    options = ["--ranks", str(number)] if number > 1 else []
    command = ["train", *setting.task("W4"), "--plan", "baseline", "--device", setting.device, *options]
    command += ["--run", str(folder / str(number)), "--json"]
    if number == 1:
        done = within(*command)
    else:
        done = ended(started(*command, cache=setting.scratch / "cache"))
    return float(done.document["epochs"][-1]["train_loss"])


def _emptied(setting: Setting, name: str) -> Path:
    folder = setting.scratch / "tests" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
