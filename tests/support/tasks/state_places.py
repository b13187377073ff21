"""Tasks with a count in one of many places: the loss grows with each call, so a resume that forgets the count differs.

`task(place=...)` makes the Task of one place. `STORES` are values that a loss changes, and `SITES` are parts of a Task
that count by themselves. bench/state_places.py kills and resumes them all.
"""

from __future__ import annotations

import array
import asyncio
import collections
import contextvars
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import gc
import heapq
import io
import itertools
import logging
import mmap
import multiprocessing
import os
import pathlib
import queue
import random
import sqlite3
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import hotloop

Bump = Callable[[], float]
"""Counts one call; returns the count."""

SAMPLES, BATCH = 120, 10


class Own:
    """An object with attributes."""

    count = 0


class Slotted:
    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0


class Described:
    """A descriptor that has a value of its own."""

    def __init__(self) -> None:
        self.value = 0

    def __get__(self, owner: Any, kind: Any = None) -> int:
        return self.value

    def __set__(self, owner: Any, value: int) -> None:
        self.value = value


class Owner:
    count = Described()


class Counting(type):
    """A metaclass that counts."""

    made = 0


class Made(metaclass=Counting):
    pass


class Level(enum.Enum):
    LOW = 1


class Proxy:
    """Passes attributes on to another object."""

    def __init__(self, target: Any) -> None:
        object.__setattr__(self, "_target", target)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_target"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_target"), name, value)


class Rows(list):
    count = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    count: int = 0


@dataclasses.dataclass
class Nested:
    inner: list[dict[str, int]] = dataclasses.field(default_factory=lambda: [{"count": 0}])


Named = collections.namedtuple("Named", "count")
GLOBAL = 0
MODULE = types.ModuleType("counting_helper")
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("count", default=0)
FOLDER = os.environ.get("HOTLOOP_TEST_FOLDER", ".")


def attribute(target: Any, name: str = "count", of: Callable[[Any], float] = float, add: Any = 1) -> Bump:
    """Counts in an attribute."""

    def bump() -> float:
        setattr(target, name, getattr(target, name) + add)
        return of(getattr(target, name))

    return bump


def item(target: Any, key: Any = 0, of: Callable[[Any], float] = float, add: Any = 1) -> Bump:
    """Counts in an item."""

    def bump() -> float:
        target[key] = target[key] + add
        return of(target[key])

    return bump


def growing(target: Any, grow: Callable[[Any], Any], size: Callable[[Any], float] = len) -> Bump:
    """Counts by the size of what grows."""

    def bump() -> float:
        grow(target)
        return float(size(target))

    return bump


def drawing(draw: Callable[[], Any]) -> Bump:
    """Draws a number instead of a count."""
    return lambda: 20 * float(draw())


def in_global() -> float:
    global GLOBAL
    GLOBAL += 1
    return float(GLOBAL)


def in_default(count: list[int] = [0]) -> float:  # noqa: B006
    count[0] += 1
    return float(count[0])


def in_function() -> float:
    in_function.count = getattr(in_function, "count", 0) + 1  # type: ignore[attr-defined]
    return float(in_function.count)  # type: ignore[attr-defined]


def of_closure() -> Bump:
    count = 0

    def bump() -> float:
        nonlocal count
        count += 1
        return float(count)

    return bump


def of_generator() -> Bump:
    def numbers() -> Iterator[int]:
        count = 0
        while True:
            count += 1
            yield count

    made = numbers()
    return lambda: float(next(made))


def of_cache() -> Bump:
    @functools.lru_cache(maxsize=4)
    def draw(_: int) -> float:
        return random.random()

    calls = itertools.count()
    return lambda: 20 * draw(next(calls) // 5)


def of_partial() -> Bump:
    holder = {"call": functools.partial(float, 0)}

    def bump() -> float:
        holder["call"] = functools.partial(float, holder["call"]() + 1)
        return holder["call"]()

    return bump


def of_environment() -> float:
    os.environ["HOTLOOP_TEST_COUNT"] = str(int(os.environ.get("HOTLOOP_TEST_COUNT", 0)) + 1)
    return float(os.environ["HOTLOOP_TEST_COUNT"])


def of_weak_keys() -> Bump:
    key, counts = Own(), weakref.WeakKeyDictionary[Any, int]()
    counts[key] = 0
    return item(counts, key)


def of_weak_reference() -> Bump:
    target = Own()
    reference = weakref.ref(target)
    in_weak.kept = target  # type: ignore[attr-defined]
    return lambda: attribute(reference())()


def in_weak() -> None: ...


def of_thread_local() -> Bump:
    local = threading.local()
    local.count = 0
    return attribute(local)


def of_context() -> float:
    CONTEXT.set(CONTEXT.get() + 1)
    return float(CONTEXT.get())


def of_database() -> Bump:
    base = sqlite3.connect(":memory:", check_same_thread=False)
    base.execute("create table counts (x int)")
    return growing(
        base,
        lambda b: b.execute("insert into counts values (1)"),
        lambda b: float(b.execute("select count(*) from counts").fetchone()[0]),
    )


def of_map() -> Bump:
    memory = mmap.mmap(-1, 8)
    return lambda: (memory.seek(0), memory.write_byte((memory[0] + 1) % 256), float(memory[0]))[2]


def of_file() -> float:
    path = pathlib.Path(FOLDER) / "count.txt"
    path.write_text(str(int(path.read_text()) + 1 if path.exists() else 1))
    return float(path.read_text())


def of_thread() -> Bump:
    given: queue.Queue[int] = queue.Queue()
    back: queue.Queue[int] = queue.Queue()

    def count() -> None:
        number = 0
        while True:
            number += given.get()
            back.put(number)

    threading.Thread(target=count, daemon=True).start()
    return lambda: (given.put(1), float(back.get()))[1]


def of_coroutine() -> Bump:
    async def count(state: list[int]) -> int:
        state[0] += 1
        return state[0]

    loop, state = asyncio.new_event_loop(), [0]
    return lambda: float(loop.run_until_complete(count(state)))


def of_heap() -> Bump:
    heap = [0]

    def bump() -> float:
        return float(heapq.heapreplace(heap, heap[0] + 1) + 1)

    return bump


def of_queue(made: Any) -> Bump:
    made.put(0)

    def bump() -> float:
        count = made.get() + 1
        made.put(count)
        return float(count)

    return bump


def of_text(buffer: Any, mark: Any) -> Bump:
    return growing(buffer, lambda b: b.write(mark), lambda b: b.tell())


def of_number_type() -> Bump:
    """The next number format, of those in a cycle."""
    types_ = [torch.float32, torch.float64, torch.bfloat16]
    holder = Own()
    holder.dtype = types_[0]  # type: ignore[attr-defined]

    def bump() -> float:
        holder.dtype = types_[(types_.index(holder.dtype) + 1) % 3]  # type: ignore[attr-defined]
        return 7.0 * types_.index(holder.dtype)  # type: ignore[attr-defined]

    return bump


def of_size() -> Bump:
    holder = [torch.Size([1])]

    def bump() -> float:
        holder[0] = torch.Size([holder[0][0] + 1])
        return float(holder[0][0])

    return bump


def of_sparse() -> Bump:
    holder = [torch.zeros(2).to_sparse()]

    def bump() -> float:
        holder[0] = (holder[0].to_dense() + 1).to_sparse()
        return float(holder[0].to_dense()[0])

    return bump


def of_quantized() -> Bump:
    holder = [torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.qint32)]

    def bump() -> float:
        holder[0] = torch.quantize_per_tensor(holder[0].dequantize() + 1, 1.0, 0, torch.qint32)
        return float(holder[0].dequantize()[0])

    return bump


def of_records() -> Bump:
    rows = np.zeros(1, dtype=[("count", "i8"), ("other", "f4")])
    return item(rows["count"])


def of_shared_memory() -> Bump:
    from multiprocessing import shared_memory

    block = shared_memory.SharedMemory(create=True, size=8)
    block.buf[0] = 0
    return lambda: (block.buf.__setitem__(0, (block.buf[0] + 1) % 256), float(block.buf[0]))[1]


def of_logger() -> Bump:
    logger = logging.getLogger("hotloop.tests.counting")
    logger.setLevel(1)
    return lambda: (logger.setLevel(logger.level + 1), float(logger.level))[1]


def of_decimal_context() -> float:
    decimal.getcontext().prec += 1
    return float(decimal.getcontext().prec)


def of_recursion_limit() -> float:
    sys.setrecursionlimit(sys.getrecursionlimit() + 1)
    return float(sys.getrecursionlimit() % 1000)


def of_class_made_anew() -> Bump:
    holder = [type("Made0", (), {"count": 0})]

    def bump() -> float:
        holder[0] = type("Made", (), {"count": holder[0].count + 1})
        return float(holder[0].count)

    return bump


def of_dispatch() -> Bump:
    @functools.singledispatch
    def call(value: Any) -> float:
        return 0.0

    kinds: Any = itertools.count()

    def bump() -> float:
        call.register(type(f"Kind{next(kinds)}", (), {}), lambda value: 1.0)
        return float(len(call.registry))

    return bump


def of_warnings() -> Bump:
    registry: dict[Any, Any] = globals().setdefault("__warningregistry__", {})
    return growing(registry, lambda r: r.update({("count", len(r)): True}))


def of_objects() -> Bump:
    """Objects that the garbage collector knows."""
    rows = Rows()
    return growing(rows, lambda r: r.append(Own()), lambda r: float(sum(isinstance(o, Own) for o in gc.get_objects())))


def of_seeded_python() -> Bump:
    source = random.Random(3)
    return drawing(source.random)


def of_list_iterator() -> Bump:
    numbers = iter([0.5 * number for number in range(10_000)])
    return lambda: next(numbers)


def of_dates() -> Bump:
    return attribute(
        types.SimpleNamespace(count=datetime.date(2020, 1, 1)),
        of=lambda day: float(day.toordinal() % 1000),
        add=datetime.timedelta(1),
    )


def of_masked() -> Bump:
    return item(np.ma.masked_array(np.zeros(2), mask=[False, True]))


def of_time() -> float:
    return 20 * (time.time() % 1)


def of_path() -> Bump:
    holder = [pathlib.PurePath("0")]

    def bump() -> float:
        holder[0] = pathlib.PurePath(str(int(str(holder[0])) + 1))
        return float(str(holder[0]))

    return bump


def of_frozen() -> Bump:
    holder = [Frozen()]
    return lambda: (holder.__setitem__(0, Frozen(holder[0].count + 1)), float(holder[0].count))[1]


def of_named() -> Bump:
    holder = [Named(0)]
    return lambda: (holder.__setitem__(0, Named(holder[0].count + 1)), float(holder[0].count))[1]


def of_view() -> Bump:
    memory = memoryview(bytearray(8))
    return lambda: (memory.__setitem__(0, (memory[0] + 1) % 256), float(memory[0]))[1]


def of_proxy_of_dict() -> Bump:
    inner = {"count": 0}
    shown = types.MappingProxyType(inner)
    return lambda: (inner.__setitem__("count", inner["count"] + 1), float(shown["count"]))[1]


def of_chain() -> Bump:
    return item(collections.ChainMap({"count": 0}, {}), "count")


def of_user_dict() -> Bump:
    return item(collections.UserDict(count=0), "count")


def of_parent_class() -> Bump:
    class Child(Own):
        pass

    child = Child()
    return lambda: (setattr(type(child).__mro__[1], "count", Own.count + 1), float(child.count))[1]


STORES: dict[str, Callable[[], Bump]] = {
    "a global number": lambda: in_global,
    "a default argument": lambda: in_default,
    "an attribute of the function": lambda: in_function,
    "a closure": of_closure,
    "a class attribute": lambda: attribute(Own),
    "an attribute of a parent class": of_parent_class,
    "an instance attribute": lambda: attribute(Own()),
    "a slot": lambda: attribute(Slotted(), "_count"),
    "a descriptor": lambda: attribute(Owner()),
    "a metaclass": lambda: attribute(Counting, "made"),
    "a proxy": lambda: attribute(Proxy(Own())),
    "an enumeration's class": lambda: attribute(type("Mode", (), {"level": Level.LOW, "count": 0})),
    "an enumeration's member": lambda: (setattr(Level.LOW, "count", 0), attribute(Level.LOW))[1],
    "a dict": lambda: item({"count": 0}, "count"),
    "a list": lambda: item([0]),
    "a nested data class": lambda: item(Nested().inner[0], "count"),
    "a frozen data class": of_frozen,
    "a named tuple": of_named,
    "a namespace": lambda: attribute(types.SimpleNamespace(count=0)),
    "a set": lambda: growing(set(), lambda s: s.add(len(s))),
    "a deque": lambda: growing(collections.deque(), lambda d: d.append(0)),
    "a deque of limited length": lambda: item(collections.deque([0], maxlen=1)),
    "a Counter": lambda: item(collections.Counter(count=0), "count"),
    "a defaultdict": lambda: item(collections.defaultdict(int), "count"),
    "an OrderedDict": lambda: item(collections.OrderedDict(count=0), "count"),
    "a ChainMap": of_chain,
    "a UserDict": of_user_dict,
    "a list's subclass": lambda: attribute(Rows()),
    "a mapping proxy": of_proxy_of_dict,
    "an array": lambda: item(array.array("l", [0])),
    "a bytearray": lambda: growing(bytearray(), lambda b: b.append(0)),
    "a memoryview": of_view,
    "a ctypes number": lambda: attribute(ctypes.c_long(0), "value"),
    "a ctypes array": lambda: item((ctypes.c_long * 2)()),
    "a ctypes structure": lambda: attribute(type("S", (ctypes.Structure,), {"_fields_": [("count", ctypes.c_long)]})()),
    "a multiprocessing value": lambda: attribute(multiprocessing.Value("l", 0), "value"),
    "a multiprocessing array": lambda: item(multiprocessing.Array("l", 2)),
    "shared memory": of_shared_memory,
    "an anonymous map": of_map,
    "a queue": lambda: of_queue(queue.Queue()),
    "a simple queue": lambda: of_queue(queue.SimpleQueue()),
    "a heap": of_heap,
    "a text buffer": lambda: of_text(io.StringIO(), "."),
    "a byte buffer": lambda: of_text(io.BytesIO(), b"."),
    "a set in a dict": lambda: growing(
        {"seen": set()}, lambda d: d["seen"].add(len(d["seen"])), lambda d: len(d["seen"])
    ),
    "a Counter in a list": lambda: growing([collections.Counter()], lambda c: c[0].update("a"), lambda c: c[0]["a"]),
    "a deque in a dict": lambda: growing({"d": collections.deque()}, lambda d: d["d"].append(0), lambda d: len(d["d"])),
    "a Fraction": lambda: attribute(types.SimpleNamespace(count=fractions.Fraction(0)), add=fractions.Fraction(1, 2)),
    "a Decimal": lambda: attribute(types.SimpleNamespace(count=decimal.Decimal(0)), add=decimal.Decimal("0.5")),
    "a complex number": lambda: attribute(types.SimpleNamespace(count=0j), of=abs, add=1j),
    "a date": of_dates,
    "a path": of_path,
    "a text": lambda: attribute(types.SimpleNamespace(count=""), of=len, add="."),
    "bytes": lambda: attribute(types.SimpleNamespace(count=b""), of=len, add=b"."),
    "a tuple": lambda: attribute(types.SimpleNamespace(count=()), of=len, add=(0,)),
    "a weak dictionary": of_weak_keys,
    "a weak reference": of_weak_reference,
    "a cache of draws": of_cache,
    "a partial": of_partial,
    "itertools.count": lambda: (lambda made: lambda: float(next(made)))(itertools.count(1)),
    "itertools.cycle": lambda: (lambda made: lambda: float(next(made)))(
        itertools.cycle([0.0, 3.0, 9.0, 4.0, 1.0, 7.0, 2.0])
    ),
    "a generator": of_generator,
    "a list's iterator": of_list_iterator,
    "Python's generator": of_seeded_python,
    "NumPy's generator": lambda: drawing(np.random.default_rng(3).random),
    "NumPy's old generator": lambda: drawing(np.random.RandomState(3).rand),
    "torch's generator": lambda: drawing(functools.partial(torch.rand, (), generator=torch.Generator().manual_seed(3))),
    "a NumPy array": lambda: item(np.zeros(2)),
    "a NumPy array of no dimensions": lambda: item(np.zeros(()), ()),
    "a NumPy record array": of_records,
    "a NumPy object array": lambda: item(np.array([0, None], dtype=object)),
    "a masked NumPy array": of_masked,
    "a NumPy number": lambda: attribute(types.SimpleNamespace(count=np.float32(0))),
    "a tensor": lambda: item(torch.zeros(2)),
    "a tensor in a tuple in a dict": lambda: item({"a": (torch.zeros(2), 0)}["a"][0]),
    "a tensor with a gradient": lambda: (lambda t: growing(t, lambda t: t.data.add_(1), lambda t: float(t.detach())))(
        torch.zeros((), requires_grad=True)
    ),
    "a sparse tensor": of_sparse,
    "a quantized tensor": of_quantized,
    "a number format": of_number_type,
    "a torch.Size": of_size,
    "a helper module": lambda: (setattr(MODULE, "count", 0), attribute(MODULE))[1],
    "a module in sys.modules": lambda: (
        sys.modules.setdefault("counting_helper", MODULE),
        setattr(MODULE, "count", 0),
        attribute(sys.modules["counting_helper"]),
    )[2],
    "torch's own module": lambda: (setattr(torch, "hotloop_count", 0), attribute(torch, "hotloop_count"))[1],
    "the environment": lambda: of_environment,
    "a thread's values": of_thread_local,
    "a thread": of_thread,
    "a context variable": lambda: of_context,
    "a coroutine": of_coroutine,
    "a database in memory": of_database,
    "a file": lambda: of_file,
    "a logger's level": of_logger,
    "the decimal context": lambda: of_decimal_context,
    "the recursion limit": lambda: of_recursion_limit,
    "the time of day": lambda: of_time,
    "a class made anew": of_class_made_anew,
    "a dispatching function": of_dispatch,
    "the registry of warnings": of_warnings,
    "live objects": of_objects,
}


# --- parts of a Task that count by themselves


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def _scaled(value: Any, bump: Bump) -> Any:
    return value * (1 + 0.002 * bump())


def _with_hook(register: str) -> dict[str, Any]:
    bump, hooked = of_closure(), network()

    def model() -> nn.Module:
        made = network()
        calls = {
            "register_forward_hook": lambda module, given, output: _scaled(output, bump),
            "register_forward_pre_hook": lambda module, given: (_scaled(given[0], bump),),
            "register_full_backward_hook": lambda module, grads, out: tuple(
                None if g is None else _scaled(g, bump) for g in grads
            ),
            "register_full_backward_pre_hook": lambda module, grads: tuple(_scaled(g, bump) for g in grads),
        }
        getattr(made[2], register)(calls[register])
        return made

    del hooked
    return {"model": model}


def _gradient_hook(post: bool) -> dict[str, Any]:
    bump = of_closure()

    def model() -> nn.Module:
        made = network()
        if post:
            made[0].weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(1 + 0.002 * bump()), None)[1])
        else:
            made[0].weight.register_hook(lambda grad: _scaled(grad, bump))
        return made

    return {"model": model}


def _optimizer_hook(kind: str) -> dict[str, Any]:
    bump = of_closure()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

        def scale(optimizer: Any, *given: Any) -> None:
            with torch.no_grad():
                next(iter(optimizer.param_groups[0]["params"])).mul_(1 - 1e-4 * bump())

        if kind == "step":
            step = made.step
            made.step = lambda *given, **named: (scale(made), step(*given, **named))[1]  # type: ignore[method-assign]
        else:
            getattr(made, f"register_step_{kind}_hook")(scale)
        return made

    return {"optimizer": optimizer}


class Growing(torch.utils.data.Dataset):
    """Samples that grow with each read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.bump = x, y, of_closure()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] * (1 + 1e-4 * self.bump()), self.y[index]


class Patched(nn.Module):
    """A forward that replaces itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = network(), 1.0
        self.forward = self.first  # type: ignore[assignment]

    def first(self, x: Tensor) -> Tensor:
        self.forward = self.later  # type: ignore[assignment]
        return self.inner(x)  # type: ignore[no-any-return]

    def later(self, x: Tensor) -> Tensor:
        self.scale *= 1.002
        return self.inner(x) * self.scale  # type: ignore[no-any-return]


class Buffered(nn.Module):
    """A buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.inner(x) * (1 + 0.002 * self.count)  # type: ignore[no-any-return]


def _in_groups(key: str) -> dict[str, Any]:
    """A count in the optimizer's groups, state or defaults."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.05)
        made.register_step_pre_hook(lambda optimizer, *given: count(optimizer))
        return made

    def count(optimizer: Any) -> None:
        store = {"groups": optimizer.param_groups[0], "state": optimizer.state, "defaults": optimizer.defaults}[key]
        store["count"] = store.get("count", 0) + 1
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + 0.002 * store["count"])

    return {"optimizer": optimizer}


def _replaced_samples() -> dict[str, Any]:
    x, y = data()

    def step(model: nn.Module, batch: Any) -> Tensor:
        x[: len(batch[0])] *= 1.002
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return {"data": (x, y), "step": step}


SITES: dict[str, Callable[[], dict[str, Any]]] = {
    "a forward hook": lambda: _with_hook("register_forward_hook"),
    "a forward pre-hook": lambda: _with_hook("register_forward_pre_hook"),
    "a backward hook": lambda: _with_hook("register_full_backward_hook"),
    "a backward pre-hook": lambda: _with_hook("register_full_backward_pre_hook"),
    "a gradient hook": lambda: _gradient_hook(False),
    "a hook after accumulation": lambda: _gradient_hook(True),
    "an optimizer's pre-hook": lambda: _optimizer_hook("pre"),
    "an optimizer's post-hook": lambda: _optimizer_hook("post"),
    "a patched optimizer step": lambda: _optimizer_hook("step"),
    "a value in the optimizer's groups": lambda: _in_groups("groups"),
    "a value in the optimizer's state": lambda: _in_groups("state"),
    "a value in the optimizer's defaults": lambda: _in_groups("defaults"),
    "a schedule's lambda": lambda: {
        "schedule": (lambda bump: lambda optimizer: LambdaLR(optimizer, lambda step: 1 + 0.01 * bump()))(of_closure())
    },
    "a data set that counts reads": lambda: {"data": Growing(*data())},
    "samples that the step replaces": _replaced_samples,
    "a forward that replaces itself": lambda: {"model": Patched},
    "a buffer without a name in files": lambda: {"model": Buffered},
}


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return x, (x[:, :1] * x[:, 1:2]).tanh()


PLACES = (*STORES, *SITES)


def task(place: str, epochs: int = 4, slow_ms: float = 0.0) -> hotloop.Task:
    """The Task of one place; each step waits `slow_ms`, so that a kill finds the training under way."""
    bump = STORES[place]() if place in STORES else None

    def loss(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(slow_ms / 1000)
        error = nn.functional.mse_loss(output, target)
        return error if bump is None else _scaled(error, bump)

    fields: dict[str, Any] = dict(
        model=network,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        data=data(),
        batch_size=BATCH,
        epochs=epochs,
    )
    fields |= SITES[place]() if place in SITES else {}
    return hotloop.Task(**({"loss": loss} if "step" not in fields else {}), **fields)
