"""Names of devices: which there are, and that a name that isn't among them is refused with a hint.

Machines with accelerators are played by fakes of what torch says.
"""

from __future__ import annotations

import pytest
import torch

from hotloop.core.hardware.devices import check_device, device_names
from hotloop.errors import DeviceError


def accelerators(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int, current: int = 0) -> None:
    """Makes torch say that it has that many accelerators of a kind."""
    found = torch.device(kind) if kind else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)


@pytest.fixture(autouse=True)
def only_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first each test sees the CPU alone, on a machine with accelerators too."""
    accelerators(monkeypatch, None, 0)


def test_the_cpu_is_there_under_its_names() -> None:
    assert check_device("cpu") == check_device("cpu:0") == check_device(torch.device("cpu"))


ABSENT = ("cpu:1", "cuda", "cuda:0", "cuda:99999999", "mps", "xpu", "tpu", "xla:1", "meta", "npu")
NONSENSE = ("gpu", "banana", "CPU", "cuda:-1", "cuda:x", "", " cpu")


@pytest.mark.parametrize("bad", [*ABSENT, *NONSENSE])
def test_any_other_name_is_refused_and_what_is_there_is_named(bad: str) -> None:
    with pytest.raises(DeviceError) as caught:
        check_device(bad)
    assert repr(bad) in str(caught.value)
    assert "expected one of: cpu." in str(caught.value)


def test_a_missing_gpu_says_what_to_do() -> None:
    with pytest.raises(DeviceError) as caught:
        check_device("cuda")
    if torch.version.cuda is None and torch.version.hip is None:
        assert str(caught.value) == (
            "device 'cuda' isn't on this machine; expected one of: cpu. "
            "Use --device cpu, or install a CUDA build of torch if there's an NVIDIA GPU"
        )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpu", "cuda for a GPU of NVIDIA or AMD, mps for Apple's"),
        ("tpu", "is a TPU"),
        ("xla:0", "is a TPU"),
        ("rocm", "cuda for a GPU of AMD too"),
        ("metal", "mps for Apple's GPU"),
        ("meta", "nothing can be trained"),
        ("CPU", "Did you mean cpu?"),
        ("cdua", "Did you mean cuda?"),
        ("mps", "Mac"),
        ("xpu", "Intel"),
    ],
)
def test_a_wrong_name_gets_a_hint(name: str, says: str) -> None:
    with pytest.raises(DeviceError, match="expected one of: cpu") as caught:
        check_device(name)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("builds", "says"),
    [
        ({"cuda": "13.0", "hip": None}, "CUDA_VISIBLE_DEVICES"),
        ({"cuda": None, "hip": "7.0"}, "HIP_VISIBLE_DEVICES"),
    ],
)
def test_a_gpu_build_that_sees_no_gpu_says_where_to_look(
    builds: dict[str, str | None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in builds.items():
        monkeypatch.setattr(torch.version, name, version)
    with pytest.raises(DeviceError, match=says):
        check_device("cuda:0")


def test_with_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(monkeypatch, "cuda", 2, current=1)
    assert device_names() == ["cpu", "cuda:0", "cuda:1"]
    assert check_device("cuda:0") == torch.device("cuda", 0)
    assert check_device("cuda") == torch.device("cuda", 1), "without a number: torch's current one"
    with pytest.raises(DeviceError) as caught:
        check_device("cuda:7")
    assert "expected one of: cpu, cuda:0, cuda:1. Use --device cuda:0" in str(caught.value)
    with pytest.raises(DeviceError, match="Use --device cuda:0"):
        check_device("gpu")


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_with_another_kind_of_accelerator(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(monkeypatch, kind, 1)
    (_, name) = device_names()
    assert check_device(kind) == check_device(f"{kind}:0") == torch.device(name)
    for missing in (f"{kind}:1", "cuda"):
        with pytest.raises(DeviceError, match=f"one of: cpu, {name}"):
            check_device(missing)


def test_an_accelerator_that_hotloop_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(monkeypatch, "hpu", 8)
    assert device_names() == ["cpu"]
    with pytest.raises(DeviceError):
        check_device("hpu")
