"""Makes the environment that `make gpu` runs in, around the torch that a Python already has. Standard library alone.

    python -m bench.gpu.environment .venv-gpu [--wheelhouse FOLDER] [--arguments ARGS]

The environment is a venv of its own, so nothing is written to where Python's packages are. All folders of packages of
the Python that runs this file are put behind its own: those of the system, of conda, of another venv, of the user. pip
then installs there what is lacking, and never a torch where there is one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib import metadata
from pathlib import Path

from bench.gpu.needs import FITS, requirements
from bench.gpu.setting import ROOT

OLDEST_TORCH = (2, 11)


class Refused(Exception):
    """One line that says what is missing, and what to do."""


def folders_of_packages() -> list[str]:
    """Where this Python finds packages, without its standard library and without the folder it was started in."""
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    found = dict.fromkeys(os.path.abspath(path) for path in sys.path if path and os.path.isdir(path))
    return [path for path in found if path != str(ROOT) and path not in own and Path(path).name != "lib-dynload"]


def check_python() -> None:
    first, last = FITS
    if not first <= sys.version_info[:2] <= last:
        version = ".".join(map(str, sys.version_info[:2]))
        raise Refused(
            f"{sys.executable} is Python {version}; expected 3.{first[1]} to 3.{last[1]}: name one with PYTHON="
        )


def torch_found() -> str | None:
    """The version of the torch that this Python has; None without one.

    Raises:
        Refused: it is too old.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    version = metadata.version("torch")
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if release < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise Refused(f"{sys.executable} has torch {version}; hotloop needs {oldest} or newer")
    return version


def check_worth(arguments: list[str], wheelhouse: Path | None) -> None:
    """That a torch, several GB of it, is downloaded only where there is something to run on.

    Raises:
        Refused: there is no GPU, or there is no torch beside a wheelhouse.
    """
    if wheelhouse is not None:
        raise Refused(
            f"{sys.executable} has no torch, which no wheelhouse holds; name the Python that has one with PYTHON="
        )
    signs = shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()
    if signs or sys.platform == "darwin" or {"--rehearse", "--list", "cpu"} & set(arguments):
        return
    raise Refused("no GPU: this machine has no driver of one; try the list on the CPU with ARGS=--rehearse")


def state(version: str | None) -> dict[str, str | None]:
    """What an environment depends on: the same state needs no new one."""
    return {
        "python": sys.executable,
        "python_version": sys.version,
        "torch": version,
        "packages": os.pathsep.join(folders_of_packages()),
        "requirements": " ".join(requirements(with_torch=version is None)),
    }


def is_made(folder: Path, version: str | None) -> bool:
    """Whether an earlier call made the environment as it should be."""
    try:
        return bool(json.loads((folder / _STATE).read_text(encoding="utf-8")) == state(version))
    except (OSError, ValueError):
        return False


_STATE = "made-of.json"


def made(folder: Path) -> str:
    """A venv without pip that sees this Python's packages behind its own; its interpreter."""
    venv.EnvBuilder(clear=True, symlinks=os.name != "nt", with_pip=False).create(folder)
    python = str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    lines = [str(ROOT / "src"), *(f"import site; site.addsitedir({path!r})" for path in folders_of_packages())]
    (own / "hotloop-gpu.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return python


def pip_of(python: str, wheelhouse: Path | None) -> list[str]:
    """How to call pip for the venv: that of this Python, the wheelhouse's, or the one that Python brings.

    Raises:
        Refused: there is none.
    """
    if importlib.util.find_spec("pip") is not None:
        return [python, "-m", "pip"]
    if wheelhouse is not None and (wheels := sorted(wheelhouse.glob("pip-*.whl"))):
        return [python, str(wheels[-1] / "pip")]
    if importlib.util.find_spec("ensurepip") is not None:
        subprocess.run([python, "-m", "ensurepip", "--default-pip"], check=True, stdout=subprocess.DEVNULL)
        return [python, "-m", "pip"]
    raise Refused(f"{sys.executable} has no pip; collect one with make wheelhouse, and give WHEELHOUSE=")


def install(python: str, version: str | None, wheelhouse: Path | None, options: list[str]) -> None:
    """Installs what is lacking.

    Raises:
        Refused: pip can't.
    """
    needed = requirements(with_torch=version is None)
    where = ["--no-index", "--find-links", str(wheelhouse)] if wheelhouse is not None else []
    with tempfile.TemporaryDirectory() as folder:
        limits = ["-c", str(ROOT / "constraints.txt")]
        if version is not None:
            kept = Path(folder) / "kept.txt"
            kept.write_text(f"torch=={version}\n", encoding="utf-8")
            limits = ["-c", str(kept)]
        command = [*pip_of(python, wheelhouse), "install", "--disable-pip-version-check", "--quiet", "--no-user"]
        code = subprocess.run([*command, *where, *limits, *options, *needed]).returncode
    if code:
        source = f"from {wheelhouse}" if wheelhouse is not None else "from its index"
        raise Refused(f"pip can't install {source} what hotloop needs, as it says above")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheelhouse", type=Path)
    parser.add_argument("--arguments", default="", help="for the checks, in one string")
    parser.add_argument("--pip-options", default="", help="for pip install, in one string")
    given = parser.parse_args()
    try:
        check_python()
        version = torch_found()
        if version is None and not is_made(given.folder, version):
            check_worth(shlex.split(given.arguments), given.wheelhouse)
        if given.wheelhouse is not None and not any(given.wheelhouse.glob("*.whl")):
            raise Refused(f"WHEELHOUSE={given.wheelhouse} has no wheels; collect some with make wheelhouse")
        if is_made(given.folder, version):
            return 0
        python = made(given.folder)
        install(python, version, given.wheelhouse, shlex.split(given.pip_options))
        (given.folder / _STATE).write_text(json.dumps(state(version)), encoding="utf-8")
    except Refused as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    print(f"{given.folder}: torch {version or 'newly installed'}, {sys.executable}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
