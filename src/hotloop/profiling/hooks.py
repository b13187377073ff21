"""Where torch and Python are listened to: in all steps that are watched, and more closely in some."""

from __future__ import annotations

import builtins
import functools
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hotloop.parallel.summing import Around
from hotloop.patches import Patches
from hotloop.profiles import Phase
from hotloop.profiling.phases import Clock, HostClock, Timeline
from hotloop.profiling.unseen import unseen

_CALLS, _REPEATS = 100, 3

Began = Callable[[tuple, dict], Any]
Ended = Callable[[Any, tuple, dict, Any, bool], None]


def around(mine: Callable[[], bool], began: Began, ended: Ended) -> Callable[[Any], Any]:
    """What makes a function tell when it begins and ends; nobody who calls it sees a difference.

    Args:
        mine: whether this thread is watched.
        began: gets the arguments; what it returns goes to `ended`.
        ended: gets that, the arguments, the result, and whether there is one.
    """

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not mine():
                return original(*args, **kwargs)
            token, result, done = began(args, kwargs), None, False
            try:
                result = original(*args, **kwargs)
                done = True
                return result
            finally:
                ended(token, args, kwargs, result, done)

        return unseen(call)

    return make


AMONG_RANKS: tuple[Phase, ...] = ("waiting", "communication")


def among_ranks(mine: Callable[[], bool], timeline: Timeline, phase: Phase) -> Callable[[Any], Any]:
    """Puts a function that sends, receives or waits into a phase, unless it is a part of another one that does."""

    def began(args: tuple, kwargs: dict) -> None:
        timeline.enter(timeline.current if timeline.current in AMONG_RANKS else phase)

    return around(mine, began, lambda *ended: timeline.leave())


def mark_ms(clock: Clock) -> float:
    """What it takes to leave a mark of a function that begins or ends: measured on one that does nothing, in 2 ms."""
    if not isinstance(clock, HostClock):
        return 0.0
    timeline = Timeline(clock)
    nothing = partial(int)
    heard = around(lambda: True, lambda args, kwargs: timeline.enter("copy"), lambda *ended: timeline.leave())(nothing)
    timeline.begin("python")
    spent = [_calls_ms(heard) - _calls_ms(nothing) for _ in range(_REPEATS)]
    return max(0.0, min(spent)) / _CALLS / 2


def _calls_ms(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    for _ in range(_CALLS):
        function()
    return (time.perf_counter() - began) * 1e3


class Listener:
    """What is told of what happens; see `Always`."""

    def mine(self) -> bool:
        return False

    def hears_backwards(self) -> bool:
        return self.mine()

    def backward_began(self, args: tuple, kwargs: dict) -> Any: ...
    def backward_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None: ...
    def backward_over(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None: ...
    def update_began(self, optimizer: Any, args: tuple, kwargs: dict) -> None: ...
    def update_ended(self, optimizer: Any, args: tuple, kwargs: dict) -> None: ...
    def loading_began(self, args: tuple, kwargs: dict) -> Any: ...
    def loading_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None: ...
    def saving_began(self, args: tuple, kwargs: dict) -> Any: ...
    def saving_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None: ...
    def mode_began(self, args: tuple, kwargs: dict) -> Any: ...
    def mode_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None: ...
    def no_grad_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None: ...
    def forward_began(self, args: tuple, kwargs: dict) -> Any: ...
    def forward_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None: ...


class Always:
    """Tells a listener of backwards, updates, batches, checkpoints and changes between training and evaluation."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._patches, self._outermost = Patches(), Patches()
        self._handles: list[Any] = []

    def install(self) -> None:
        heard, patches = self._listener, self._patches
        loading = around(heard.mine, heard.loading_began, heard.loading_ended)
        backward = around(heard.hears_backwards, heard.backward_began, heard.backward_ended)
        patches.put(torch.autograd, "_engine_run_backward", backward)
        patches.put(_BaseDataLoaderIter, "__next__", loading)
        patches.put(DataLoader, "__iter__", loading)
        patches.put(torch, "save", around(heard.mine, heard.saving_began, heard.saving_ended))
        patches.put(nn.Module, "train", around(heard.mine, heard.mode_began, heard.mode_ended))
        self._handles = [
            register_optimizer_step_pre_hook(heard.update_began),
            register_optimizer_step_post_hook(heard.update_ended),
        ]
        self.wrap_backward()

    def wrap_backward(self) -> None:
        """From here on, `backward_over` is told when a backward is done for everyone else who listens by now."""
        over = around(self._listener.mine, lambda args, kwargs: None, self._listener.backward_over)
        self._outermost.undo()
        self._outermost.put(torch.autograd, "_engine_run_backward", over)

    def unwrap_backward(self) -> None:
        """Others may come and go."""
        self._outermost.undo()

    def remove(self) -> None:
        """Takes everything away; not to be called from an optimizer's hook, since torch is walking through these then."""
        self._outermost.undo()
        self._patches.undo()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def remove_later(self) -> None:
        """Takes everything away at once but the hooks of optimizers, which go at the next backward."""
        self._outermost.undo()
        self._patches.undo()

        def before(args: tuple, kwargs: dict) -> None:
            self.remove()

        last = around(lambda: True, before, lambda *ended: None)
        self._patches.put(torch.autograd, "_engine_run_backward", last)


_SYNCHRONISING = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__")
_COPYING = ("to", "cpu", "cuda", "copy_")
_UPDATING = (
    ("torch.optim.optimizer", "Optimizer", "zero_grad"),
    ("torch.optim.lr_scheduler", "LRScheduler", "step"),
    ("torch.optim.lr_scheduler", "ReduceLROnPlateau", "step"),
    ("torch.optim.swa_utils", "AveragedModel", "update_parameters"),
    ("torch.amp.grad_scaler", "GradScaler", "unscale_"),
    ("torch.amp.grad_scaler", "GradScaler", "step"),
    ("torch.amp.grad_scaler", "GradScaler", "update"),
    ("torch.nn.utils.clip_grad", "", "_get_total_norm"),
    ("torch.nn.utils.clip_grad", "", "_clip_grads_with_norm_"),
)
_LOGGING = (
    ("matplotlib.figure", "Figure", "savefig"),
    ("matplotlib.figure", "Figure", "draw"),
    ("PIL.Image", "Image", "save"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_scalar"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_scalars"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_image"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_images"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_figure"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "add_histogram"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", "flush"),
    ("tqdm.std", "tqdm", "update"),
    ("tqdm.std", "tqdm", "refresh"),
    ("tqdm.std", "tqdm", "set_postfix"),
    ("tqdm.std", "tqdm", "set_description"),
)
_LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
)
_COMMUNICATING = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier")


class Closely:
    """Puts what happens into the phases of a timeline, in the steps that are watched closely."""

    def __init__(self, listener: Listener, timeline: Timeline) -> None:
        self._listener, self._timeline = listener, timeline
        self._patches = Patches()

    def install(self) -> None:
        heard, patches = self._listener, self._patches
        patches.put(nn.Module, "__call__", self._forwards())
        nothing = around(heard.mine, lambda args, kwargs: None, heard.no_grad_ended)
        patches.put(torch.no_grad, "__exit__", nothing)
        for name in _LOSSES:
            patches.put(nn.functional, name, self._in("loss"))
        for name in _SYNCHRONISING:
            patches.put(Tensor, name, self._in("synchronisation"))
        for name in _COPYING:
            patches.put(Tensor, name, self._copying(name))
        patches.put(builtins, "print", self._in("logging"))
        patches.put(logging.Logger, "handle", self._in("logging"))
        for table, phase in ((_UPDATING, "update"), (_LOGGING, "logging")):
            for module, owner, name in table:
                self._put(module, owner, name, phase)  # type: ignore[arg-type]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for name in _COMMUNICATING:
                patches.put(torch.distributed, name, among_ranks(heard.mine, self._timeline, "communication"))
        if torch.accelerator.is_available():
            patches.put(torch.accelerator, "synchronize", self._in("synchronisation"))
            if torch.cuda.is_available():
                patches.put(torch.cuda, "synchronize", self._in("synchronisation"))

    def remove(self) -> None:
        self._patches.undo()

    def _put(self, module: str, owner: str, name: str, phase: Phase) -> None:
        """Only what the script has imported itself can be called."""
        if (there := sys.modules.get(module)) is None:
            return
        holder = getattr(there, owner, None) if owner else there
        if holder is not None and hasattr(holder, name):
            self._patches.put(holder, name, self._in(phase))

    def _forwards(self) -> Callable[[Any], Any]:
        """What stands around a model that ranks share runs forward, too, and computes the loss after it."""
        heard, timeline = self._listener, self._timeline

        def began(args: tuple, kwargs: dict) -> Any:
            return timeline.enter("forward") if isinstance(args[0], Around) else heard.forward_began(args, kwargs)

        def ended(token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
            if not isinstance(args[0], Around):
                heard.forward_ended(token, args, kwargs, result, done)
                return
            timeline.leave()
            timeline.turn("loss")

        return around(heard.mine, began, ended)

    def _in(self, phase: Phase) -> Callable[[Any], Any]:
        timeline = self._timeline
        return around(
            self._listener.mine,
            lambda args, kwargs: timeline.enter(phase),
            lambda token, args, kwargs, result, done: timeline.leave(),
        )

    def _copying(self, name: str) -> Callable[[Any], Any]:
        """For what copies from device to device; what only changes the dtype, or nothing, is none."""
        timeline = self._timeline

        def began(args: tuple, kwargs: dict) -> bool:
            copies = _elsewhere(name, args, kwargs)
            if copies:
                timeline.enter("copy")
            return copies

        def ended(copies: bool, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
            if copies:
                timeline.leave()

        return around(self._listener.mine, began, ended)


def _elsewhere(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether a method of a tensor's asks for another device than the tensor is on."""
    here = args[0].device
    if name in ("cpu", "cuda"):
        return here.type != name or bool(args[1:] or kwargs)
    return any(_is_other(value, here) for value in (*args[1:], *kwargs.values()))


def _is_other(value: Any, here: torch.device) -> bool:
    if isinstance(value, Tensor):
        return value.device != here
    if isinstance(value, str | torch.device):
        kind, _, number = str(value).partition(":")
        return kind != here.type or number not in ("", str(here.index))
    return isinstance(value, int) and not isinstance(value, bool) and value != here.index
