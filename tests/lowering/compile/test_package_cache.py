"""Packages of compiled steps: kept by what they depend on, the latest used, and done without where there is no room."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental import symbolic_shapes

import hotloop
from hotloop.core.files.package_use import PackageUse
from hotloop.core.files.user_folders import foreign_access
from hotloop.core.hardware import machine
from hotloop.errors import PlanError
from hotloop.lowering.compile import package_cache
from hotloop.lowering.compile.capture import CapturedStep, StepCapture, capture_step
from hotloop.lowering.compile.inductor_patches import inductor_patches
from hotloop.plan import Plan
from tests.support.programs import a_task, advance, labelled

PACKAGE = Plan(compile="package")


def open_to_others(path: Path) -> None:
    path.chmod(0o777)


def given_away(path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, 12345)


def sticky_of_another(path: Path) -> None:
    given_away(path)
    path.chmod(0o1777)


def test_the_owner_of_a_sticky_folder_may_have_written_into_it(tmp_path: Path) -> None:
    (tmp_path / "key.pt2").touch()
    tmp_path.chmod(0o1777)
    assert foreign_access(tmp_path / "key.pt2") is None
    sticky_of_another(tmp_path)
    assert foreign_access(tmp_path / "key.pt2") == f"{tmp_path} belongs to another user"


@pytest.mark.parametrize("what", ["folder", "package"])
@pytest.mark.parametrize("expose", [open_to_others, given_away])
def test_a_package_that_another_user_may_have_written_is_not_loaded(
    what: str, expose: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(package_cache, "_package_key", lambda *given: "key")
    monkeypatch.setattr(package_cache, "_build_package", lambda *given: b"built")
    monkeypatch.setattr(package_cache, "_load_package", Path.read_bytes)
    said: list[str] = []

    def load() -> object:
        return package_cache.load_or_build_package(None, torch.device("cpu"), {}, said.append, PackageUse())  # type: ignore[arg-type]

    assert load() == b"built"
    stored = package_cache.package_folder() / "key.pt2"
    assert stored.parent.stat().st_mode & 0o777 == 0o700
    stored.write_bytes(b"planted")
    assert load() == b"planted" and not said
    expose(stored if what == "package" else stored.parent)
    assert load() == b"built"
    (line,) = said
    assert line.startswith("the package isn't cached for later runs: ") and str(stored.parent) in line


def test_compiled_programs_that_another_user_may_have_written_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "torchinductor_user"
    theirs.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs))
    said: list[str] = []
    with inductor_patches(torch.device("cpu"), said.append):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(theirs) and not said
    theirs.chmod(0o777)
    with inductor_patches(torch.device("cpu"), said.append):
        used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert used == tmp_path / "mine" / "hotloop" / "torchinductor" and used.stat().st_mode & 0o777 == 0o700
    (line,) = said
    assert str(theirs) in line


def test_a_package_is_kept_and_used_where_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    make = package_cache._build_package
    monkeypatch.setattr(
        package_cache, "_build_package", lambda *given: made.append(make(*given) if not made else made[0]) or made[0]
    )
    said: list[str] = []

    def lowered() -> list[str]:
        said.clear()
        advance(hotloop.lower(a_task(), PACKAGE, said.append), 2)
        return [line for line in said if "isn't cached" in line]

    (tmp_path / "file").touch()
    for nowhere in (tmp_path / "file", tmp_path / ("long" * 100)):  # where even root can't write, or look
        monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere))
        assert len(lowered()) == 1

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    others = [package_cache.package_folder() / f"{number}.pt2" for number in range(package_cache._MAX_PACKAGES)]
    package_cache.package_folder().mkdir(parents=True)
    for number, path in enumerate(others):
        path.touch()
        os.utime(path, (number, number))
    assert lowered() == []
    (own,) = set(package_cache.package_folder().glob("*.pt2")) - set(others)
    assert not others[0].exists() and all(path.exists() for path in others[1:])

    os.utime(own, (0, 0))
    assert lowered() == [] and len(made) == 3
    assert own.stat().st_mtime > package_cache._MAX_PACKAGES  # used now, so it stays

    here = machine.read_processor()
    monkeypatch.setattr(machine, "read_processor", lambda: replace(here, model="another"))
    assert lowered() == [] and len(made) == 4  # compiled for another processor, it would end in an illegal instruction


def test_another_package_than_the_expected_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proven = hotloop.lower(a_task(), PACKAGE)
    digest = proven.parts.package.digest
    again = hotloop.lower(a_task(), PACKAGE, package=PackageUse(digest))
    assert again.parts.package.digest == digest != ""
    advance(again, 2)
    with pytest.raises(PlanError, match="isn't the one that was proven"):
        hotloop.lower(a_task(), PACKAGE, package=PackageUse("0" * 64))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(package_cache, "_build_package", lambda *given: pytest.fail("compiled without a proof"))
    for use, reason in (
        (PackageUse(digest), "proven isn't in the cache"),
        (PackageUse(may_build=False), "wouldn't pay"),
    ):
        with pytest.raises(PlanError, match=reason):
            hotloop.lower(a_task(), PACKAGE, package=use)


@pytest.mark.more
def test_a_package_that_can_t_be_loaded_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    make = package_cache._build_package
    monkeypatch.setattr(
        package_cache, "_build_package", lambda *given: made.append(make(*given) if not made else made[0]) or made[0]
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    for count in (1, 2, 2):
        advance(hotloop.lower(a_task(), PACKAGE, said.append), 2)
        assert len(made) == count
        (path,) = package_cache.package_folder().glob("*.pt2")
        if count == 1:
            path.write_bytes(made[0][: len(made[0]) // 2])
    assert path.read_bytes() == made[0]
    assert (
        len([line for line in said if line.startswith("the cached package can't be loaded, and is compiled again: ")])
        == 1
    )


@pytest.mark.more
def test_a_package_that_is_kept_is_loaded_without_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose import takes longer than all else of a start: for embeddings of several threads, and for rewritten products, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(1))
    task = a_task(model=lambda: torch.nn.Linear(128, 128), data=(x, x.argmax(1)), batch_size=128)
    plan = PACKAGE.with_axes(threads=2, rewrites="mm_by_onednn")
    hotloop.lower(task, plan).close()
    (kept,) = package_cache.package_folder().glob("*.pt2")
    for compiler in ("compile_fx", "decomposition", "lowering", "package"):
        monkeypatch.setitem(sys.modules, f"torch._inductor.{compiler}", None)  # an import of it fails
    imports_more = lambda: pytest.fail("torch imports its exporter to find the user's lines")  # noqa: E731
    monkeypatch.setattr(symbolic_shapes, "uninteresting_files", imports_more)
    said: list[str] = []
    program = hotloop.lower(task, plan, said.append)
    advance(program, 2)
    program.close()
    assert program.compiled_steps and not any("made anew" in line for line in said)
    assert list(package_cache.package_folder().glob("*.pt2")) == [kept]


def test_a_package_of_other_options_or_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = tuple(value[:5] for value in labelled())
    captured = capture_step(hotloop.lower(a_task(), Plan())._step, batch, 5, {}, whole=True)
    keys = [
        package_cache._package_key(captured, torch.device("cpu"), options)
        for options in ({}, {}, {"fallback_random": True})
    ]
    monkeypatch.setattr(package_cache, "__version__", "0.0.0")
    keys.append(package_cache._package_key(captured, torch.device("cpu"), {}))
    monkeypatch.setattr(package_cache, "INDUCTOR_PATCH_VERSION", 0)
    keys.append(package_cache._package_key(captured, torch.device("cpu"), {}))
    with torch.backends.mkldnn.flags(enabled=False):
        keys.append(package_cache._package_key(captured, torch.device("cpu"), {}))
    assert keys[0] == keys[1] and len(set(keys)) == 5


def test_a_package_of_an_equal_graph_that_lays_out_otherwise_is_not_used() -> None:
    batch = tuple(value[:5] for value in labelled())
    captured = capture_step(hotloop.lower(a_task(), Plan())._step, batch, 5, {}, whole=True)
    before = package_cache._package_key(captured, torch.device("cpu"), {})
    node = next(one for one in captured.graph.graph.nodes if getattr(one.meta.get("val"), "ndim", 0) == 2)
    node.meta["val"] = node.meta["val"].t().contiguous().t()
    assert package_cache._package_key(captured, torch.device("cpu"), {}) != before


@pytest.fixture
def captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CapturedStep]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen: list[CapturedStep] = []
    once = StepCapture.trace_once

    def noted(self: StepCapture, batch: Any) -> CapturedStep:
        seen.append(once(self, batch))
        return seen[-1]

    monkeypatch.setattr(StepCapture, "trace_once", noted)
    monkeypatch.setattr(package_cache, "_build_package", lambda captured, *others: captured.graph.code.encode())
    monkeypatch.setattr(package_cache, "_load_package", lambda path: lambda flat: seen[-1].graph(*flat))
    return seen


def test_a_step_that_was_seen_to_stay_the_same_is_captured_once_from_then_on(captures: list[CapturedStep]) -> None:
    for width, so_far in ((3, 2), (3, 3), (4, 5), (3, 6)):
        hotloop.lower(a_task(model=lambda width=width: torch.nn.Linear(6, width)), PACKAGE)
        assert len(captures) == so_far, width
    hotloop.lower(a_task(), Plan(compile="step"))
    assert len(captures) == 6 + 2  # what keeps nothing has nothing to go by


@pytest.mark.more
def test_after_a_change_of_its_file_it_is_captured_twice(captures: list[CapturedStep], tmp_path: Path) -> None:
    path = tmp_path / "network_of_a_file.py"
    path.write_text("import torch\n\n\nclass Network(torch.nn.Linear):\n    pass\n")
    sys.path.insert(0, str(tmp_path))
    try:
        network = importlib.import_module(path.stem).Network
        for so_far in (2, 3):
            hotloop.lower(a_task(model=lambda: network(6, 3)), PACKAGE)
            assert len(captures) == so_far
        path.write_text(path.read_text() + "\n")
        hotloop.lower(a_task(model=lambda: network(6, 3)), PACKAGE)
        assert len(captures) == 5
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules[path.stem]


def test_one_that_was_seen_to_change_is_refused_each_time(
    captures: list[CapturedStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    once = StepCapture.trace_once

    def turned(self: StepCapture, batch: Any) -> CapturedStep:
        captured = once(self, batch)
        if len(captures) % 2 == 0:
            captured.graph.graph.create_node("call_function", torch.neg, (next(iter(captured.graph.graph.nodes)),))
            captured.graph.recompile()
        return captured

    monkeypatch.setattr(StepCapture, "trace_once", turned)
    for _ in range(2):
        with pytest.raises(PlanError, match="two runs of the step do different operations"):
            hotloop.lower(a_task(), PACKAGE)
    assert len(captures) == 4 and not package_cache.package_folder().exists()


@pytest.mark.more
def test_where_nothing_can_be_kept_it_is_captured_twice(
    captures: list[CapturedStep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for so_far in (2, 4):
        hotloop.lower(a_task(), PACKAGE)
        assert len(captures) == so_far
