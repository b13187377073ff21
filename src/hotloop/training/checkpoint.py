"""Checkpoints: a State with its history in one safetensors file, written atomically.

A file's name ends in the SHA-256 of its content: one rename publishes file and checksum, and damage is detected. Loading
reads numbers and JSON; no code in the file can run.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, get_type_hints

import numpy as np
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter
from safetensors import SafetensorError
from torch import Tensor

from hotloop.core.files.atomic_files import open_regular, read_regular, write_named
from hotloop.core.files.run_folder import Count
from hotloop.core.records.training import EpochRecord
from hotloop.core.state import Position, State
from hotloop.errors import CheckpointError, RunError, shorten, type_name

_FILE_NAME = re.compile(r"step-(\d{9,})-([0-9a-f]{64})\.safetensors")
_VERSION = "2"
"""Form of the file. A file of another form is refused."""

_DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip
"""Formats that every version of safetensors reads; tensors of other formats are stored as bytes."""

_NUMPY_NUMBERS = {
    name: np.dtype(name).type
    for name in ("bool", "float16", "float32", "float64", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)))
}
"""NumPy types that Python numbers represent without loss; a learning rate may have such a type."""


@dataclass(frozen=True)
class BestEpoch:
    """The best epoch so far: its number, its monitored figure, and the file in `best/` that holds its weights."""

    epoch: int
    figure: float
    file: str


@dataclass(frozen=True)
class Checkpoint:
    """A State with the completed epochs and their best; `epoch_s` is the training time of the epoch under way."""

    state: State
    history: list[EpochRecord] = field(default_factory=list)
    best: BestEpoch | None = None
    epoch_s: float = 0.0


def encode(checkpoint: Checkpoint) -> list[bytes | memoryview]:
    """Returns a checkpoint's file in pieces; tensors are not copied, since memory may be short.

    Raises:
        CheckpointError: the State has a value that is no number, text or tensor.
    """
    tensors: dict[str, Tensor] = {}
    tree = {name: _pack(value, name, tensors) for name, value in vars(checkpoint.state).items() if name != "position"}
    document = {
        "state": tree,
        "position": asdict(checkpoint.state.position),
        "history": [record.model_dump() for record in checkpoint.history],
        "best": asdict(checkpoint.best) if checkpoint.best else None,
        "epoch_s": checkpoint.epoch_s,
    }
    return _safetensors_pieces(tensors, {"format": "hotloop", "version": _VERSION, "document": json.dumps(document)})


def check_storable(tree: Any, path: str) -> None:
    """Raises CheckpointError if a checkpoint can't store the part of the State at `path`."""
    _pack(tree, path, {})


def _safetensors_pieces(tensors: dict[str, Tensor], metadata: dict[str, str]) -> list[bytes | memoryview]:
    """Returns the file in pieces: safetensors' library would assemble it in memory, or choose its temporary name."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at, names = (
        0,
        sorted(tensors, key=lambda name: -tensors[name].itemsize),
    )  # wide types first, so that each tensor is aligned
    for name in names:
        tensor, end = tensors[name], at + tensors[name].nbytes
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *(_tensor_bytes(tensors[name]) for name in names)]


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes in little-endian order."""
    content = tensor.reshape(-1).view(torch.uint8)
    if sys.byteorder == "big":
        content = content.reshape(tensor.numel(), tensor.itemsize).flip(1).reshape(-1)
    return content.numpy().data


def decode(content: bytes, path: Path) -> Checkpoint:
    try:
        tensors = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = header.get("__metadata__", {})
        document = json.loads(metadata["document"])
        if metadata["version"] != _VERSION:
            raise CheckpointError(
                f"{path} is a checkpoint of form {shorten(metadata['version'])}",
                expected=f"form {_VERSION!r}, which this version of hotloop writes",
                fix="start a new run",
            )
        state = {name: _unpack(value, tensors) for name, value in document["state"].items()}
        meta = _Metadata.model_validate(document)
        best = BestEpoch(**meta.best.model_dump()) if meta.best else None
        position = Position(**meta.position.model_dump())
        return Checkpoint(State(**_check_state(state), position=position), meta.history, best, meta.epoch_s)
    except (SafetensorError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of hotloop", fix="take one from a run folder") from error


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Returns `value` as JSON with marked containers and NumPy numbers; tensors go to `tensors`."""
    if isinstance(value, Tensor):
        return _pack_tensor(value, path, tensors)
    if isinstance(value, dict):
        _check_keys(value, path)
        mark = "counter" if isinstance(value, Counter) else "dict"
        return {mark: [[key, _pack(item, f"{path}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        mark = "tuple" if isinstance(value, tuple) else "list"
        return {mark: [_pack(item, f"{path}/{place}", tensors) for place, item in enumerate(value)]}
    if isinstance(value, np.generic) and value.dtype.name in _NUMPY_NUMBERS:
        return {"numpy": [value.dtype.name, value.item()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise _unstorable_error(path, type_name(value))


def _pack_tensor(value: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if value.layout is not torch.strided or value.is_quantized:
        raise _unstorable_error(path, "a sparse or quantized tensor")
    while path in tensors:  # `c` in `a/b` and `b/c` in `a` have the same path
        path += "'"
    value = value.detach().contiguous()
    if value.dtype in _DTYPE_NAMES:
        tensors[path] = value
        return {"tensor": path}
    tensors[path] = value.reshape(-1).view(torch.uint8)
    return {"bytes": [path, str(value.dtype).removeprefix("torch."), list(value.shape)]}


def _check_keys(value: dict, path: str) -> None:
    for key in value:
        if not (key is None or isinstance(key, bool | int | float | str)):
            raise _unstorable_error(path, f"a dict with {type_name(key)} as a key")


def _unstorable_error(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is {what}, which no checkpoint can hold",
        expected="numbers, texts, dense tensors, and lists, tuples or dicts of them",
        fix="keep other things out of the optimizer's, scheduler's and modules' state",
    )


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((mark, content),) = value.items()
    match mark:
        case "tensor":
            return tensors[content]
        case "bytes":
            path, dtype, shape = content
            return tensors[path].view(getattr(torch, dtype)).reshape(shape)
        case "numpy":
            return _NUMPY_NUMBERS[content[0]](content[1])
        case "dict":
            return {key: _unpack(item, tensors) for key, item in content}
        case "counter":
            return Counter({key: _unpack(item, tensors) for key, item in content})
        case "list" | "tuple":
            items = [_unpack(item, tensors) for item in content]
            return tuple(items) if mark == "tuple" else items
    raise ValueError(f"no value is marked {mark}")


def load(path: Path) -> Checkpoint:
    """Loads the checkpoint in `path` after a check of its checksum.

    Raises:
        CheckpointError: the file is absent, incomplete, changed, or no checkpoint.
    """
    name = _FILE_NAME.fullmatch(path.name)
    if name is None:
        raise CheckpointError(f"{path} is not named like a checkpoint", expected="step-<number>-<sha256>.safetensors")
    try:
        content = read_regular(path)
    except RunError as error:
        raise CheckpointError(error.given, fix="use the checkpoint before it") from error
    if content is None:
        raise CheckpointError(f"{path.name} can't be read (it is gone)", fix="use the checkpoint before it")
    if hashlib.sha256(content).hexdigest() != name[2]:
        raise CheckpointError(
            f"{path.name} is incomplete or was changed: its checksum differs", fix="use the checkpoint before it"
        )
    return decode(content, path)


class CheckpointFolder:
    """The checkpoints of one run: the last `keep` in `folder`, the best epoch's weights in `folder/best`."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.best_folder, self.keep = folder, folder / "best", keep
        self._bad: set[Path] = set()

    def files(self) -> list[Path]:
        """Returns the checkpoints' files, newest first."""
        found = [path for path in self.folder.glob("step-*.safetensors") if _FILE_NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: (_step_of(path), _written_ns(path)), reverse=True)

    def save(self, checkpoint: Checkpoint) -> Path:
        """Writes a checkpoint, then removes older ones."""
        path = _write(self.folder, checkpoint)
        self._prune(path)
        return path

    def save_best(self, state: State, history: list[EpochRecord]) -> str:
        """Writes the weights of the best epoch; returns the file's name, to which checkpoints refer."""
        return _write(self.best_folder, Checkpoint(state, history)).name

    def newest(
        self, say: Callable[[str], None] = lambda line: None, *, best_needed: bool = True
    ) -> tuple[Checkpoint, Path] | None:
        """Returns the newest valid checkpoint with a valid best epoch, and reports those that are skipped.

        Without any valid best epoch, returns the newest valid State without one unless `best_needed`.
        """
        without_best: tuple[Checkpoint, Path] | None = None
        for path in self.files():
            try:
                checkpoint = load(path)
                if why := _position_contradiction(asdict(checkpoint.state.position), checkpoint.history):
                    raise CheckpointError(f"{path.name} is damaged: {why}")
            except CheckpointError as error:
                self._bad.add(path)
                say(f"skipping the checkpoint of step {_step_of(path)}: {error.given}")
                continue
            try:
                if checkpoint.best is not None:
                    self.load_best(checkpoint.best)
                return checkpoint, path
            except CheckpointError as error:
                say(f"skipping the checkpoint of step {_step_of(path)}, whose best epoch is lost: {error.given}")
                without_best = without_best or (replace(checkpoint, best=None), path)
        if best_needed or without_best is None:
            return None
        say(f"using the checkpoint of step {_step_of(without_best[1])} without its best epoch")
        return without_best

    def load_best(self, best: BestEpoch) -> Checkpoint:
        return load(self.best_folder / best.file)

    def _prune(self, newest: Path) -> None:
        older = [path for path in self.files() if _step_of(path) < _step_of(newest) and path not in self._bad]
        kept = [newest, *older][: self.keep]
        for path in self.files():
            if path not in kept and not path.is_dir():
                path.unlink()
        referred = {best_file(path) for path in kept}
        for path in self.best_folder.glob("step-*.safetensors"):
            if path.name not in referred:
                path.unlink()


def best_file(path: Path) -> str | None:
    """Returns the file of a checkpoint's best epoch, read from the header; None without one, or if that is invalid."""
    try:
        with open(open_regular(path), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, path.stat().st_size)))
        best = json.loads(header["__metadata__"]["document"])["best"]
        return best["file"] if best else None
    except (OSError, RunError, LookupError, TypeError, ValueError, RecursionError):
        return None


def _write(folder: Path, checkpoint: Checkpoint) -> Path:
    pieces, stem = encode(checkpoint), f"step-{checkpoint.state.position.step:09d}"

    def write(file: BinaryIO) -> Path:
        digest = hashlib.sha256()
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        return folder / f"{stem}-{digest.hexdigest()}.safetensors"

    return write_named(folder / stem, write)


def _written_ns(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except FileNotFoundError:  # removed by a training under way
        return 0


def _step_of(path: Path) -> int:
    name = _FILE_NAME.fullmatch(path.name)
    return int(name[1]) if name else -1


def has_only_finite_parameters(state: State) -> bool:
    """Whether every trained parameter is finite: other States must not become the last valid checkpoint."""
    trained = [state.parameters[name] for group in state.optimizer["groups"] for name in group["params"]]
    values = [value for value in trained if value.numel() and (value.is_floating_point() or value.is_complex())]
    return bool(torch.isfinite(torch.nn.utils.get_total_norm(values, float("inf")))) if values else True


class _PositionSchema(BaseModel):
    model_config = ConfigDict(extra="forbid")

    step: Count
    epoch: Count
    batch: Count


class _BestSchema(BaseModel):
    model_config = ConfigDict(extra="forbid")

    epoch: Annotated[int, Field(strict=True, ge=1)]
    figure: float
    file: Annotated[str, StringConstraints(pattern=r"^[^/\x00]*$")]


class _Metadata(BaseModel):
    """All fields of the document except the State; the checksum shows that a document is unchanged, this that it is valid."""

    position: _PositionSchema
    history: list[EpochRecord]
    best: _BestSchema | None
    epoch_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _check_state(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of a State unchanged, after each field was checked against its annotation.

    Raises:
        ValueError: a part has another type than its annotation, or parameters or buffers are absent.
    """
    types = _part_types()
    for name, value in given.items():
        if name in types:  # State's constructor rejects unknown names
            types[name].validate_python(value)
    return dict(given)


@cache
def _part_types() -> dict[str, TypeAdapter[Any]]:
    """The type checker of each part of a State."""
    hints = get_type_hints(State)
    arbitrary = ConfigDict(arbitrary_types_allowed=True, strict=True)
    return {
        field.name: TypeAdapter(hints[field.name], config=arbitrary)
        for field in fields(State)
        if field.name != "position"
    }


def _position_contradiction(position: Mapping[str, int], history: Sequence[EpochRecord]) -> str:
    """Returns why the position contradicts the completed epochs; empty if it agrees with them."""
    done = history[-1].step if history else 0
    if position["epoch"] != len(history) or any(record.epoch != n for n, record in enumerate(history, 1)):
        return f"it is in epoch {position['epoch'] + 1}, and has {len(history)} epochs before it"
    if position["step"] != done + position["batch"]:
        return (
            f"it is {position['batch']} batches into an epoch that began at step {done}, and at step {position['step']}"
        )
    return ""
