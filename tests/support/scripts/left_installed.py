"""Trains in one of several ways, and prints after each part what of torch is no longer torch's own.

left_installed.py KIND STEPS
"""

import ctypes
import os
import sys
import threading
import time

import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn
from torch.optim import adagrad, adam, sgd
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

KIND, STEPS = sys.argv[1], int(sys.argv[2])
TORCH = os.path.dirname(torch.__file__)
FUNCTIONS = {
    "Module.__call__": lambda: nn.Module.__call__,
    "torch.compile": lambda: torch.compile,
    "adam": lambda: adam.adam,
    "sgd": lambda: sgd.sgd,
    "adagrad": lambda: adagrad.adagrad,
    "fetch": lambda: _MapDatasetFetcher.fetch,
    "_next_data": lambda: _SingleProcessDataLoaderIter._next_data,
}


def show(part, *modules):
    left = [name for name, get in FUNCTIONS.items() if not get().__code__.co_filename.startswith(TORCH)]
    left += [f"hook of {hook.__module__}" for hook in torch_optimizer._global_optimizer_post_hooks.values()]
    left += ["a module" for module in modules if module._compiled_call_impl is not None]
    left += ["excepthook"] if sys.excepthook is not sys.__excepthook__ else []
    print(f"{part}: {', '.join(left) or 'nothing'}", flush=True)


def network(width=32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 4))


def train(model, optimizer, steps, pause_s=0.0, small_from=None):
    for step in range(steps):
        if step == small_from:
            optimizer.add_param_group({"params": [nn.Parameter(torch.full((4,), 1e-39))]})
        inputs = torch.rand(8, 16)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        time.sleep(pause_s)


class Own(torch.optim.Optimizer):
    """An optimizer of the script."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for value in group["params"]:
                value -= 0.01 * value.grad


def second_block_is_mapped():
    """Whether a second block of 16 MB is mapped anew: glibc's own rules keep such blocks after the first one was freed."""
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.free(library.malloc(16 << 20))
    block = library.malloc(15 << 20)
    return bool(ctypes.c_size_t.from_address(block - 8).value & 2)


model = network()
optimizers = {"rmsprop": torch.optim.RMSprop, "own": Own, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
optimizer = optimizers.get(KIND, torch.optim.RMSprop)(model.parameters())
if KIND in optimizers:
    train(model, optimizer, STEPS)
elif KIND == "slow":
    train(model, optimizer, STEPS, pause_s=0.01)
elif KIND.startswith("small from "):
    train(model, optimizer, STEPS, pause_s=0.01, small_from=int(KIND.removeprefix("small from ")))
elif KIND == "late hook":
    train(model, optimizer, 5)
    seen = []
    handle = torch_optimizer.register_optimizer_step_post_hook(lambda *_: seen.append(1))
    train(model, optimizer, STEPS)
    handle.remove()
    print(len(seen))
elif KIND == "loader":
    for _ in DataLoader(TensorDataset(torch.rand(800, 16)), batch_size=8, collate_fn=list):
        train(model, optimizer, STEPS // 100)
elif KIND == "learner":
    learner = threading.Thread(target=train, args=(model, optimizer, STEPS))
    learner.start()
    learner.join()
elif KIND == "fork":
    train(model, optimizer, 5)
    if not os.fork():
        show("child", model)
        os._exit(0)
    os.wait()
elif KIND == "folds":
    train(model, optimizer, STEPS)
    show("first", model)
    model = network(64)
    del optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, STEPS)
elif KIND == "equal folds":
    for fold, width in (("first", 32), ("equal", 32), ("other", 64)):
        model = network(width)
        del optimizer
        optimizer = torch.optim.RMSprop(model.parameters())
        train(model, optimizer, STEPS if fold == "first" else 5)
        show(fold, model)
        train(model, optimizer, STEPS)
show("end", model)
print("mapped" if second_block_is_mapped() else "kept")
