"""Of how many networks that nobody here had in mind can the training step be captured as one graph? Those of transformers and
timm, one of each kind, made small, on the CPU.

    .venv-bench/bin/python -m bench.captures                     half an hour on two cores
    .venv-bench/bin/python -m bench.captures timm --record

Each is built with random weights and trained for a step as PyTorch does it. Those that run so are captured with Adam's update, but
not compiled: that is `bench.auto_models`'. What can't be captured is named with what hotloop says of it, and what isn't tried, or
doesn't run as small as it was made here, is counted.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from bench.claim import circumstances, write_claim
from bench.speed.table import rows as table
from bench.without_torchvision import imported_timm
from bench.zoo import CLASSES, adamw, of_logits, of_text
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.hardware import machine
from hotloop.core.processes import time_limit
from hotloop.errors import HotloopError, describe_error
from hotloop.plan import Plan

Row = dict[str, Any]

LARGEST = 100_000_000
"""Parameters of a network that is tried."""

LIMIT_S = 300
"""For one network."""

_WORDS, _LENGTH, _SAMPLES = 1000, 32, 4

_SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "n_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "moe_intermediate_size"), 64),
    **dict(vocab_size=_WORDS, pad_token_id=0, bos_token_id=1, eos_token_id=2, num_labels=CLASSES),
}
"""What configurations of transformers call their sizes."""

_SIZES = ("nano", "atto", "tiny", "small", "_xs", "_xxs", "_s_", "pico", "femto", "_t0", "_m0", "_0", "050", "18", "26")
"""What the smaller networks of timm have in their names."""


class TooLarge(Exception):
    """A network that isn't tried."""


def _of_transformers(table_name: str) -> dict[str, Callable[[], nn.Module]]:
    from transformers.models.auto import modeling_auto

    return {
        name: lambda kind=kind: _made_small(kind)
        for name, kind in sorted(getattr(modeling_auto, table_name).items())
        if isinstance(kind, str)
    }


def _made_small(kind: str) -> nn.Module:
    """A network of transformers by the name of its class."""
    import transformers

    network = getattr(transformers, kind)
    plain = network.config_class()
    known = {name for name in _SMALL if hasattr(plain, name) and isinstance(getattr(plain, name), int | None)}
    config = network.config_class(**{name: _SMALL[name] for name in known})
    with torch.device("meta"):
        _check_size(network(config))
    return network(config)


def _check_size(model: nn.Module) -> None:
    if (size := sum(value.numel() for value in model.parameters())) > LARGEST:
        raise TooLarge(f"{size / 1e6:,.0f} million parameters")


def _of_timm() -> dict[str, Callable[[], nn.Module]]:
    """The first small one of each module."""
    timm = imported_timm()
    kinds = {module: timm.list_models(module=module) for module in timm.list_modules()}
    small = {
        module: [name for name in names if any(word in name for word in _SIZES)] for module, names in kinds.items()
    }
    return {
        name: lambda name=name: _drawn(name)
        for module, names in kinds.items()
        if names
        for name in (small[module] or names)[:1]
    }


def _drawn(name: str) -> nn.Module:
    timm = imported_timm()
    options = dict(num_classes=CLASSES)
    try:
        with torch.device("meta"):
            _check_size(timm.create_model(name, img_size=64, **options))
        options["img_size"] = 64
    except TypeError:  # it takes images of any size, or of its own
        with torch.device("meta"):
            _check_size(timm.create_model(name, **options))
    return timm.create_model(name, **options)  # type: ignore[no-any-return]


FAMILIES: dict[str, Callable[[], dict[str, Callable[[], nn.Module]]]] = {
    "language": lambda: _of_transformers("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "classifiers": lambda: _of_transformers("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    "timm": _of_timm,
}


def _data(family: str, model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(CLASSES, (_SAMPLES,))
    if family != "timm":
        words = torch.randint(3, _WORDS, (_SAMPLES, _LENGTH))
        return words, words if family == "language" else labels
    side = getattr(model, "default_cfg", {}).get("input_size", (3, 64, 64))[-1]
    fixed = getattr(model, "default_cfg", {}).get("fixed_input_size") and "img_size" not in _takes(model)
    return torch.randn(_SAMPLES, 3, *([side if fixed else 64] * 2)), labels


def _takes(model: nn.Module) -> set[str]:
    return {*inspect.signature(type(model).__init__).parameters}


def tried(family: str, name: str, make: Callable[[], nn.Module]) -> Row:
    """Whether the step of one network is captured, or why not; `eager` where it doesn't train without, either."""
    row: Row = {"family": family, "network": name}
    try:
        with time_limit(LIMIT_S, lambda: TimeoutError(f"{LIMIT_S} s weren't enough")):
            torch.manual_seed(0)
            model = make()
            data, step = _data(family, model), of_logits if family == "timm" else of_text
            half = tuple(value[: _SAMPLES // 2] for value in data)
            step(model.train(), half).backward()
    except (TooLarge, TimeoutError) as error:
        return row | {"outcome": "not tried", "why": str(error)}
    except Exception as error:
        return row | {"outcome": "eager", "why": describe_error(error)[:200]}
    model.zero_grad(set_to_none=True)
    row["parameters"] = sum(value.numel() for value in model.parameters())
    try:
        with time_limit(LIMIT_S, lambda: TimeoutError(f"{LIMIT_S} s weren't enough")):
            _capture(model, data, step)
    except HotloopError as error:
        return row | {"outcome": "refused", "why": str(error.given)[:300]}
    except Exception as error:
        return row | {"outcome": "failed", "why": describe_error(error)[:300]}
    return row | {"outcome": "captured", "why": ""}


def _capture(model: nn.Module, data: Any, step: Any) -> None:
    import hotloop
    from hotloop.lowering.compile.capture import capture_step

    batch_size = _SAMPLES // 2
    task = hotloop.Task(model=lambda: model, step=step, optimizer=adamw, data=data, batch_size=batch_size, epochs=1)
    program = hotloop.lower(task, Plan())
    program.advance(1)
    batch = tuple(value[:batch_size] for value in data)
    program.model.train()
    capture_step(program._step, batch, batch_size, {}, whole=True)


def share(family: str, part: int, parts: int, begun: int) -> Iterator[Row]:
    """Every `parts`-th network of a family behind those that were begun: its name as it begins, and what comes of it."""
    networks = FAMILIES[family]()
    for name in list(networks)[part::parts][begun:]:
        yield {"family": family, "network": name, "outcome": "failed", "why": "its process died"}
        yield tried(family, name, networks[name])


def in_processes(family: str, parts: int) -> list[Row]:
    """The whole family, in so many processes; one that dies is followed by another for what is left."""

    def one(part: int) -> dict[str, Row]:
        found: dict[str, Row] = {}
        while True:
            done = _told(family, f"{part}/{parts}/{len(found)}")
            before = len(found)
            found |= {row["network"]: row for row in done}
            if len(found) == before or done[-1]["why"] != "its process died":
                return found

    with ThreadPoolExecutor(parts) as pool:
        every = [row for found in pool.map(one, range(parts)) for row in found.values()]
    return sorted(every, key=lambda row: str(row["network"]))


def _told(family: str, part: str) -> list[Row]:
    command = [sys.executable, "-m", "bench.captures", family, "--part", part]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=quiet)
    if done.returncode in (-signal.SIGINT, 130):  # it heard Ctrl-C, as this process did
        raise KeyboardInterrupt
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def markdown(found: Sequence[Row]) -> str:
    lines = []
    for family in dict.fromkeys(row["family"] for row in found):
        outcomes = Counter(row["outcome"] for row in found if row["family"] == family)
        captured, refused = outcomes["captured"], outcomes["refused"] + outcomes["failed"]
        aside = f"{outcomes['eager']} don't run as small as this, {outcomes['not tried']} are too large or slow"
        lines.append([family, f"{captured} of {captured + refused}", aside])
    named = [f"- {row['network']}: {row['why']}" for row in found if row["outcome"] in ("refused", "failed")]
    return "\n".join([*table(("family", "captured", "besides"), lines), "", *named]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="some of " + ", ".join(FAMILIES) + "; default all")
    parser.add_argument("--record", action="store_true", help="write a claim")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.families if name not in FAMILIES]:
        parser.error(f"{', '.join(unknown)}: the families are {', '.join(FAMILIES)}")
    warnings.simplefilter("ignore")
    if options.part:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, whatever a library makes of it
        for row in share(options.families[0], *map(int, options.part.split("/"))):
            print(json.dumps(row), flush=True)
        return 0
    found: list[Row] = []
    try:
        for family in options.families or FAMILIES:
            found += in_processes(family, machine.read_processor().allowed_cores)
            print(f"{family}: {len(found)} networks so far", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped; nothing is kept", file=sys.stderr)
        return 130
    text = markdown(found)
    print(text)
    if options.record:
        spoken = " ".join(["python -m bench.captures", *sys.argv[1:]])
        folder = write_claim("captures", spoken, Plan(compile="step"), {"networks": found}, circumstances())
        write_atomic(folder / "README.md", text)
        print(folder, file=sys.stderr)
    return 1 if any(row["outcome"] == "failed" for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
