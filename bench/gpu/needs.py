"""What the checks need beside an installed torch, read from pyproject.toml. Standard library alone."""

from __future__ import annotations

import re
import tomllib

from bench.gpu.setting import ROOT

TESTS = ("pytest", "hypothesis")
"""Of the `dev` extra, for `tests/gpu`."""

FITS = ((3, 11), (3, 13))
"""The first and the last Python that hotloop runs on."""


def name_of(requirement: str) -> str:
    """The distribution that a requirement, or a wheel's file name, is of, in the form that compares equal."""
    found = re.match(r"[A-Za-z0-9._]+(?:-(?!\d)[A-Za-z0-9._]+)*", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def requirements(*, with_torch: bool = False) -> list[str]:
    """hotloop's requirements, and those of `tests/gpu`; torch is there already unless asked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = [one for one in project["dependencies"] if with_torch or name_of(one) != "torch"]
    return own + [one for one in project["optional-dependencies"]["dev"] if name_of(one) in TESTS]
