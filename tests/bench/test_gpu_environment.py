"""The environment of `make gpu` and the wheelhouse: real venvs and a real pip, with tiny wheels in place of an index."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.gpu.environment import folders_of_packages, is_made
from bench.gpu.needs import name_of, requirements
from bench.gpu.setting import ROOT

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"

pytestmark = pytest.mark.slow


def wheel(folder: Path, name: str, version: str = "99.0", needs: tuple[str, ...] = (), size: int = 0) -> Path:
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {one}" for one in needs),
    ]
    files = {
        f"{module}.py": f"__version__ = {version!r}\n".encode() + b"#" + os.urandom(size),
        f"{info}/METADATA": ("\n".join(lines) + "\n").encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    records = []
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        records.append(f"{path},sha256={digest},{len(content)}")
    files[f"{info}/RECORD"] = ("\n".join([*records, f"{info}/RECORD,,"]) + "\n").encode()
    made = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return made


def all_wheels(folder: Path, without: tuple[str, ...] = ()) -> Path:
    """A folder with a wheel of each requirement, in a version that its range allows."""
    folder.mkdir()
    for one in requirements():
        name = name_of(one)
        if name not in without:
            wheel(folder, name, "2.9" if "<3" in one else "99.0")
    return folder


def bare(folder: Path, torch: str | None = "2.11.0+cu128") -> str:
    """A Python without pip, and with a torch if asked for; its interpreter."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    packages = folder / "lib" / f"python{VERSION}" / "site-packages"
    if torch is not None:
        installed(packages, "torch", torch)
    return str(folder / "bin" / "python")


def installed(packages: Path, name: str, version: str) -> None:
    info = packages / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").touch()
    (packages / f"{name}.py").write_text(f"__version__ = {version!r}\n")


@pytest.fixture
def pip_wheel() -> Iterator[Path]:
    if importlib.util.find_spec("ensurepip") is None:
        pytest.skip("this Python has no ensurepip, whose pip these tests take")
    from importlib.resources import as_file, files

    (found,) = [one for one in (files("ensurepip") / "_bundled").iterdir() if one.name.startswith("pip-")]
    with as_file(found) as path:
        yield path


def called(python: str, module: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    return subprocess.run(
        [python, "-m", f"bench.gpu.{module}", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


def seen(python: str, name: str) -> str:
    asked = f"import {name}; print({name}.__file__, getattr({name}, '__version__', ''))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    found = subprocess.run([python, "-c", asked], cwd="/", env=environment, capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.more
def test_without_network_or_pip_only_what_is_lacking_comes_from_the_wheelhouse(tmp_path: Path, pip_wheel: Path) -> None:
    python = bare(tmp_path / "bare")
    packages = tmp_path / "bare" / "lib" / f"python{VERSION}" / "site-packages"
    installed(packages, "numpy", "2.1.0")
    before = sorted(path.name for path in packages.rglob("*") if "__pycache__" not in path.parts)
    wheels = all_wheels(tmp_path / "wheels", without=("numpy",))
    wheel(wheels, "torch", "99.0")  # is newer, and must stay where it is
    (wheels / pip_wheel.name).write_bytes(pip_wheel.read_bytes())
    done = called(python, "environment", tmp_path / "made", "--wheelhouse", wheels)
    assert done.returncode == 0, done.stderr
    made = str(tmp_path / "made" / "bin" / "python")
    assert seen(made, "torch") == f"{packages / 'torch.py'} 2.11.0+cu128"
    assert seen(made, "numpy") == f"{packages / 'numpy.py'} 2.1.0"
    assert seen(made, "scipy").startswith(str(tmp_path / "made"))
    assert seen(made, "hotloop").startswith(str(ROOT / "src" / "hotloop"))
    assert sorted(path.name for path in packages.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.mark.more
def test_the_same_call_again_makes_nothing(tmp_path: Path, pip_wheel: Path) -> None:
    python, wheels = bare(tmp_path / "bare"), all_wheels(tmp_path / "wheels")
    (wheels / pip_wheel.name).write_bytes(pip_wheel.read_bytes())
    assert called(python, "environment", tmp_path / "made", "--wheelhouse", wheels).returncode == 0
    mark = tmp_path / "made" / "mark"
    mark.touch()
    assert called(python, "environment", tmp_path / "made", "--wheelhouse", wheels).returncode == 0
    assert mark.exists()
    (tmp_path / "made" / "made-of.json").write_text("{")  # cut off while it was written
    assert not is_made(tmp_path / "made", "2.11.0")


@pytest.mark.more
def test_what_is_missing_is_one_line(tmp_path: Path, pip_wheel: Path) -> None:
    wheels = all_wheels(tmp_path / "wheels", without=("scipy",))
    (wheels / pip_wheel.name).write_bytes(pip_wheel.read_bytes())
    (tmp_path / "empty").mkdir()
    cases = {
        "old": (bare(tmp_path / "old", "2.6.0"), [], "has torch 2.6.0; hotloop needs 2.11 or newer"),
        "none": (bare(tmp_path / "none", None), ["--wheelhouse", wheels], "has no torch, which no wheelhouse holds"),
        "empty": (bare(tmp_path / "some"), ["--wheelhouse", tmp_path / "empty"], "has no wheels"),
        "short": (bare(tmp_path / "short"), ["--wheelhouse", wheels], f"pip can't install from {wheels}"),
    }
    for name, (python, options, said) in cases.items():
        done = called(python, "environment", tmp_path / "made" / name, *options)
        assert done.returncode == 2 and said in done.stderr.splitlines()[-1], done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.more
def test_no_torch_is_downloaded_where_there_is_no_gpu(tmp_path: Path) -> None:
    if Path("/dev/nvidia0").exists() or sys.platform == "darwin":
        pytest.skip("there may be a GPU here")
    done = called(bare(tmp_path / "bare", None), "environment", tmp_path / "made", PATH="/nowhere")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no GPU")
    assert not (tmp_path / "made").exists()


@pytest.mark.more
def test_packages_of_another_venv_are_seen_too(tmp_path: Path) -> None:
    assert any("site-packages" in path or "dist-packages" in path for path in folders_of_packages())
    python = bare(tmp_path / "bare")
    asked = "from bench.gpu.environment import folders_of_packages; print(*folders_of_packages(), sep='\\n')"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    found = subprocess.run([python, "-c", asked], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [str(tmp_path / "bare" / "lib" / f"python{VERSION}" / "site-packages")]


def collected(folder: Path, index: Path, *options: str) -> subprocess.CompletedProcess[str]:
    where = dict(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(index), PIP_CONSTRAINT="", PIP_CONFIG_FILE=os.devnull)
    return called(sys.executable, "wheelhouse", folder, "--python-version", "3.12", *options, **where)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with the versions of constraints.txt; plotly needs a package of its own, and scipy is large."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this Python has no pip")
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
    versions = {name_of(name): version for name, version in pinned.items()}
    folder = tmp_path / "index"
    folder.mkdir()
    for one in requirements():
        name = name_of(one)
        needs = {"plotly": ("narwhals",), "scipy": ("numpy",)}.get(name, ())
        wheel(folder, name, versions[name], needs, 41_000_000 if name == "scipy" else 0)
    wheel(folder, "narwhals", versions["narwhals"])
    wheel(folder, "pip", "26.0")
    wheel(folder, "torch", versions["torch"])
    return folder


@pytest.mark.more
def test_a_wheelhouse_leaves_out_torch_and_what_is_there(tmp_path: Path, index: Path) -> None:
    folder = tmp_path / "wheels"
    done = collected(folder, index, "--have", "NumPy,scipy,scikit_learn,unheard")
    assert done.returncode == 0, done.stderr
    names = {name_of(path.name) for path in folder.glob("*.whl")}
    assert {"plotly", "narwhals", "pip", "pytest", "pydantic"} <= names
    assert not names & {"torch", "numpy", "scipy", "scikit-learn"}
    assert "HAVE names unheard" in done.stderr
    assert f"{len(names)} wheels" in done.stdout
    assert {path.suffix for path in folder.iterdir()} == {".whl"}


@pytest.mark.more
def test_a_large_wheelhouse_beside_what_is_there_is_an_error_that_names_the_largest(
    tmp_path: Path, index: Path
) -> None:
    assert collected(tmp_path / "all", index).returncode == 0
    done = collected(tmp_path / "large", index, "--have", "numpy")
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert "more than 40 MB" in line and "scipy" in line


@pytest.mark.more
def test_a_wheelhouse_of_an_unknown_python_is_refused(tmp_path: Path) -> None:
    done = called(sys.executable, "wheelhouse", tmp_path, "--python-version", "3.9")
    assert done.returncode == 2 and "expected 3.11, 3.12 or 3.13" in done.stderr
