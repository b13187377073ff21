"""Collects wheels of what hotloop needs beside an installed torch, for a machine without network. Standard library alone.

    python -m bench.gpu.wheelhouse wheelhouse --python-version 3.12 --have numpy,scipy

Left out are torch, what only torch needs, and what `--have` names.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.gpu.needs import name_of, requirements
from bench.gpu.setting import ROOT

MOST_MB = 40.0
"""Beside packages that are there already; more is an error."""

_GLIBC = range(28, 16, -1)
"""Minor versions of glibc whose wheels run on a machine with glibc 2.28, the oldest that torch runs on."""


class Refused(Exception):
    """One line that says what is wrong, and what to do."""


def target_of(version: str, machine: str) -> list[str]:
    """pip's options for another machine: Linux with that Python and that processor."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBC] + [f"manylinux2014_{machine}"]
    return ["--python-version", version, "--only-binary=:all:"] + [f"--platform={one}" for one in platforms]


def pip(*arguments: str) -> None:
    """Raises `Refused` where pip fails; its own words are above."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    if subprocess.run(command).returncode:
        raise Refused("pip can't collect the wheels, as it says above")


def resolved(target: list[str]) -> dict[str, str]:
    """Name and version of all that hotloop needs without torch."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--report", str(report), "--target", folder, *target]
        pip("install", *options, "-c", str(ROOT / "constraints.txt"), *requirements())
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {name_of(one["metadata"]["name"]): one["metadata"]["version"] for one in found}


def collect(folder: Path, target: list[str], have: list[str]) -> list[Path]:
    """Downloads the wheels, and pip's own, for a Python without pip; older ones of the same packages go."""
    found = resolved(target)
    if unknown := [name for name in have if name not in found]:
        print(f"HAVE names {', '.join(unknown)}, which hotloop doesn't need", file=sys.stderr)
    wanted = [f"{name}=={version}" for name, version in found.items() if name not in {*have, "torch", "pip"}]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as arriving:
        pip("download", "--no-deps", "--dest", arriving, *target, *wanted, "pip")
        arrived = sorted(Path(arriving).iterdir())
        names = {name_of(path.name) for path in arrived}
        for path in folder.glob("*.whl"):
            if name_of(path.name) in names or name_of(path.name) in have:
                path.unlink()
        return [path.rename(folder / path.name) for path in arrived]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python-version", required=True, help="of the other machine, such as 3.12")
    parser.add_argument("--have", default="", help="packages that are installed there, with commas between")
    parser.add_argument("--machine", default="x86_64", help="its processor: x86_64 or aarch64")
    given = parser.parse_args()
    if not re.fullmatch(r"3\.1[123]", given.python_version):
        parser.error(f"--python-version {given.python_version}: expected 3.11, 3.12 or 3.13")
    have = [name_of(name.strip()) for name in given.have.split(",") if name.strip()]
    try:
        wheels = collect(given.folder, target_of(given.python_version, given.machine), have)
    except Refused as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    sizes = {path.name: path.stat().st_size / 1e6 for path in wheels}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    told = ", ".join(f"{name} {sizes[name]:.1f} MB" for name in largest)
    total = sum(sizes.values())
    print(f"{given.folder}: {len(wheels)} wheels, {total:.1f} MB; the largest: {told}")
    if have and total > MOST_MB:
        print(f"error: more than {MOST_MB:.0f} MB; add to HAVE what is installed there: {told}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
