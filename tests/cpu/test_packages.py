"""Packages of compiled steps: kept by what they depend on, the latest used, and done without where there is no room."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import hotloop
from hotloop.lowering import packages
from hotloop.plan import Plan
from hotloop.probe import machine
from tests.cpu.programs import a_task, advance

PACKAGE = Plan(compile="package")


def test_a_package_is_kept_and_used_where_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    make = packages._made
    monkeypatch.setattr(packages, "_made", lambda *given: made.append(make(*given) if not made else made[0]) or made[0])
    said: list[str] = []

    def lowered() -> list[str]:
        said.clear()
        advance(hotloop.lower(a_task(), PACKAGE, said.append), 2)
        return [line for line in said if "isn't kept" in line]

    (tmp_path / "file").touch()
    for nowhere in (tmp_path / "file", tmp_path / ("long" * 100)):  # where even root can't write, or look
        monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere))
        assert len(lowered()) == 1

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    others = [packages.folder() / f"{number}.pt2" for number in range(packages._KEPT)]
    packages.folder().mkdir(parents=True)
    for number, path in enumerate(others):
        path.touch()
        os.utime(path, (number, number))
    assert lowered() == []
    (own,) = set(packages.folder().iterdir()) - set(others)
    assert not others[0].exists() and all(path.exists() for path in others[1:])

    os.utime(own, (0, 0))
    assert lowered() == [] and len(made) == 3
    assert own.stat().st_mtime > packages._KEPT  # used now, so it stays

    here = machine.processor()
    monkeypatch.setattr(machine, "processor", lambda: replace(here, model="another"))
    assert lowered() == [] and len(made) == 4  # compiled for another processor, it would end in an illegal instruction
