"""A CUDA device for tests on a machine that has none: its tensors report `cuda:0` and have their numbers in CPU memory.

A process calls `install` before it imports torch. Then torch's CPU build accepts tensors of `cuda:0` in autograd and
autocast, and within `cuda_device` operations compute. An operation on tensors of both devices fails as on a real GPU.
torch's FakeTensorMode has the same checks and no numbers: a training step that reads a value would stop there.

Written for torch 2.13, whose CPU build has no guard of CUDA devices (`ensureCUDADeviceGuardSet` returns early).
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.fake_device import SecondDevice

DEVICE = "cuda:0"


def install(folder: Path) -> None:
    """Compiles and loads the device's guard; torch asks for it once, so torch must not be imported yet."""
    assert "torch" not in sys.modules
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch_folder, library = Path(spec.origin).parent, folder / "fake_cuda.so"
    includes = [f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include"]
    libraries = [f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder}/lib"]
    source = Path(__file__).with_suffix(".cpp")
    command = ["g++", "-std=c++20", "-shared", "-fPIC", *includes, str(source), "-o", str(library), *libraries]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library))


class Stream:
    """A stream whose work is done at once."""

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace()

    def wait_event(self, event: SimpleNamespace) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...


@contextmanager
def cuda_device() -> Iterator[SecondDevice]:
    """Within it torch has the device `cuda:0`, for the rest of the process also by its `torch.cuda`."""
    import torch
    from torch._dispatch.python import enable_python_dispatcher

    from tests.support.fake_device import Far, SecondDevice

    to_list = torch.Tensor.tolist
    device, gigabyte = torch.device(DEVICE), 1 << 30
    machine = SecondDevice(device)
    facts = SimpleNamespace(
        name="a GPU of tests", major=9, minor=0, total_memory=80 * gigabyte, multi_processor_count=132
    )
    stand_ins: dict[Any, dict[str, Any]] = {
        torch.cuda: dict(
            _lazy_init=lambda: None,
            is_initialized=lambda: True,
            is_available=lambda: True,
            is_bf16_supported=lambda *args, **options: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            set_device=lambda device: None,
            synchronize=lambda device=None: None,
            empty_cache=lambda: None,
            default_generators=(machine,),
            get_rng_state=lambda device=None: None,
            set_rng_state=lambda state, device=None: None,
            get_device_properties=lambda device=None: facts,
            get_device_capability=lambda device=None: (facts.major, facts.minor),
            mem_get_info=lambda device=None: (70 * gigabyte, 80 * gigabyte),
            max_memory_allocated=lambda device=None: 0,
            memory_allocated=lambda device=None: 0,
            reset_peak_memory_stats=lambda device=None: None,
            Stream=Stream,
            current_stream=Stream,
            stream=lambda stream: nullcontext(),
        ),
        torch.cuda.amp.common: dict(amp_definitely_not_available=lambda: False),
        torch.accelerator: dict(
            is_available=lambda: True,
            current_accelerator=lambda check_available=False: torch.device("cuda"),
            device_count=lambda: 1,
            current_device_index=lambda: 0,
            synchronize=lambda device=None: None,
        ),
        torch.Tensor: dict(
            is_pinned=lambda self, device=None: False,
            pin_memory=lambda self, device=None: self,
            record_stream=lambda self, stream: None,
            tolist=lambda self: to_list(self.held if isinstance(self, Far) else self),
        ),
    }
    for owner, values in stand_ins.items():
        for name, value in values.items():
            setattr(owner, name, value)
    torch.__future__.set_swap_module_params_on_conversion(True)  # a wrapper can't be changed in place
    with machine, enable_python_dispatcher():  # LSTMs and GRUs in single operations: a CPU has no kernel of GPUs' cells
        yield machine
