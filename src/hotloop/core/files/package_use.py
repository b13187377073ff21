"""Which package a Program uses."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from hotloop.errors import PlanError


@dataclass
class PackageUse:
    """The package of one Program.

    Attributes:
        expected: SHA-256 of the only package that may be used; empty for any package.
        may_build: whether a package that isn't in the cache is compiled.
        digest: SHA-256 of the package in use; empty without a package.
    """

    expected: str = ""
    may_build: bool = True
    digest: str = ""

    def record(self, content: bytes) -> None:
        """Records the package in use.

        Raises:
            PlanError: the package isn't the expected one.
        """
        self.digest = hashlib.sha256(content).hexdigest()
        if self.expected and self.digest != self.expected:
            raise _not_proven("the package in the cache isn't the one that was proven")

    def check_build(self) -> None:
        """Checks that a new package may be used.

        Raises:
            PlanError: another package is expected, or none may be compiled.
        """
        if self.expected:
            raise _not_proven("the package that was proven isn't in the cache")
        if not self.may_build:
            given = "the step's package isn't in the cache, and compiling it wouldn't pay"
            raise PlanError(given, expected="a package in the cache", fix="choose compile=none")


def _not_proven(given: str) -> PlanError:
    return PlanError(given, expected="the same graph and package as in the proof", fix="choose compile=none")
