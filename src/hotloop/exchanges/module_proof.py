"""Proof of a module exchange, in a fork of the script's process: one recorded call computed in four forms.

The forms are the script's own module, the compiled module, the own module with harmless changes as `hotloop check` has
them, and a float64 copy. All have the same random state. The fork may change the module; the script's objects stay as
they are.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hotloop.core.hardware.machine import find_compiler
from hotloop.core.tensor_distance import difference_norm
from hotloop.data.dataset_changes import reachable_values, value_summary
from hotloop.exchanges.module_call import RecordedCall
from hotloop.exchanges.part import first_line
from hotloop.exchanges.update_proof import error_ratio
from hotloop.lowering.compile.dynamo_backend import NO_COMPILER

Results = dict[str, Tensor]
"""Outputs, gradients of inputs and parameters, and buffers after the call, by name."""

_MOST_RELATIVE_ERROR = 0.05
"""Relative error of an output against float64 from which both can't be compared, such as after other random numbers."""

_HARMLESS_ERROR = 1e-3
"""Relative error of an output from which a change of the own module wasn't harmless."""

_PAIRS, _TIMED_S = 12, 10.0
"""Most pairs of timed passes, and seconds after which no further pair begins."""

_LOWEST_PRIORITY = 19


def compile_and_prove(call: RecordedCall, compiled: Callable[..., Any], threads: int) -> dict[str, Any]:
    """Returns the fields of `prove`, with `compile_s` and `ratio`: seconds of a pass of the module over the compiled module's."""
    os.nice(_LOWEST_PRIORITY)
    if find_compiler() is None:
        return {"failure": NO_COMPILER}
    torch.set_num_threads(threads)
    began = time.perf_counter()
    try:
        _run_pass(call, compiled, call.module)  # a graph break raises before any code of the script runs
    except Exception as error:
        return {"failure": f"it can't be compiled: {first_line(error)}"}
    compile_s = time.perf_counter() - began
    if changed := _changed_attributes(call):
        return {"failure": changed}
    proof = prove(call, compiled, threads)
    if proof.get("failure"):
        return proof
    return {**proof, "compile_s": compile_s, **_measure(call, compiled)}


def prove(call: RecordedCall, compiled: Callable[..., Any], threads: int) -> dict[str, Any]:
    """Returns `errors`, each in multiples of the noise floor; `numbers`, 0 if nothing could be compared; `is_bitwise`.

    A `failure` says why the call can't be compared at all.
    """
    torch.set_num_threads(threads)
    module = call.module
    try:
        wide_module = copy.deepcopy(module).double()
        own = _run_pass(call, module._call_impl, module)
        exchanged = _run_pass(call, compiled, module)
    except Exception as error:
        return {"failure": f"its copy raised {first_line(error)}"}
    try:
        wide = _run_pass(call, wide_module._call_impl, wide_module, _widen)
    except Exception as error:
        return {"failure": f"its float64 copy raised {first_line(error)}"}
    return compare_results(own, exchanged, _harmless_passes(call), wide)


def _harmless_passes(call: RecordedCall) -> list[Results]:
    """Computes the call with changes that only round otherwise; changes the module's parameters."""
    from hotloop.lowering.task_facts import has_batch_normalization  # these imports are slow, and the fork's alone
    from hotloop.parity.references import SequentialSums

    module = call.module
    with SequentialSums():
        found = [_run_pass(call, module._call_impl, module)]
    is_image = any(isinstance(leaf, Tensor) and leaf.ndim == 4 for leaf in pytree.tree_leaves(call.arguments))
    if has_batch_normalization(module) and is_image:
        with torch.backends.mkldnn.flags(enabled=False):
            found.append(_run_pass(call, module._call_impl, module))
        other = copy.deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch 2.13 has no such overload
        found.append(_run_pass(call, other._call_impl, other, _to_channels_last))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in module.parameters():
            signs = torch.randint(-1, 2, value.shape, generator=generator)
            value.add_(value * signs * torch.finfo(value.dtype).eps)
    return [*found, _run_pass(call, module._call_impl, module)]


def compare_results(own: Results, exchanged: Results, harmless: Sequence[Results], wide: Results) -> dict[str, Any]:
    """Returns the fields of `prove`."""
    harmless = [results for results in harmless if _is_near(results, wide)]
    if own.keys() != exchanged.keys():
        other = sorted(own.keys() ^ exchanged.keys())[0]
        return {"errors": {other: float("inf")}, "numbers": 1, "is_bitwise": False}
    if own.keys() != wide.keys() or any(wide[name].shape != value.shape for name, value in own.items()):
        return {"failure": "its float64 copy has other results"}
    if not all(bool(value.isfinite().all()) for value in wide.values()):
        return {"errors": {}, "numbers": 0, "is_bitwise": False}
    errors = dict[str, float]()
    for name, true in wide.items():
        if true.dtype != torch.float64 and own[name].is_floating_point():
            return {"failure": f"its float64 copy computes {name} in a fixed dtype"}
        is_output = name.startswith("output")
        if is_output and difference_norm(own[name], true) > _MOST_RELATIVE_ERROR * float(true.norm().double()):
            return {"failure": f"{name} differs altogether from that in float64, so nothing can be compared"}
        errors[name] = error_ratio([results[name] for results in (own, *harmless)], exchanged[name], true)
    return {
        "errors": errors,
        "numbers": sum(value.numel() for value in own.values()),
        "is_bitwise": all(torch.equal(value, exchanged[name]) for name, value in own.items()),
    }


def _is_near(results: Results, wide: Results) -> bool:
    """Whether a change was harmless: in another layout, dropout may draw other numbers."""
    return results.keys() == wide.keys() and all(
        difference_norm(results[name], true) <= _HARMLESS_ERROR * float(true.norm())
        for name, true in wide.items()
        if name.startswith("output") and true.is_floating_point()
    )


def _run_pass(
    call: RecordedCall,
    run: Callable[..., Any],
    module: nn.Module,
    convert: Callable[[Tensor], Tensor] = lambda value: value,
) -> Results:
    """Runs forward and backward from the recorded state; returns results and leaves no gradients in the module."""
    _restore_buffers(module, call.buffers, convert)
    torch.set_rng_state(call.random)
    args, kwargs = pytree.tree_map(lambda leaf: _input(leaf, convert), call.arguments)
    with torch.enable_grad():
        result = run(*args, **kwargs)
    results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    found = {f"output {place}": value.detach().clone() for place, value in enumerate(results)}
    leaves = pytree.tree_leaves(result)
    reached = {place: leaves[place] for place in call.gradients}
    inputs = {
        f"gradient of input {place}": leaf
        for place, leaf in enumerate(pytree.tree_leaves((args, kwargs)))
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    trained = {f"gradient of {name}": value for name, value in module.named_parameters() if value.requires_grad}
    wanted = {**inputs, **trained}
    gradients = torch.autograd.grad(
        list(reached.values()),
        list(wanted.values()),
        [
            convert(call.gradients[place]) if leaf.is_floating_point() else call.gradients[place]
            for place, leaf in reached.items()
        ],
        allow_unused=True,
    )
    found |= {name: value.detach() for name, value in zip(wanted, gradients, strict=True) if value is not None}
    return found | {f"buffer {name}": value.detach().clone() for name, value in module.named_buffers()}


def _restore_buffers(module: nn.Module, buffers: Mapping[str, Tensor], convert: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad():
        for name, value in module.named_buffers():
            before = buffers[name]
            value.copy_(convert(before) if before.is_floating_point() else before)


def _input(leaf: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    value = leaf.detach().clone(memory_format=torch.preserve_format)
    if value.is_floating_point():
        value = convert(value)
    if not leaf.requires_grad:
        return value
    # The gradient of an input that other code computed reaches it as a value that isn't a leaf.
    return value.requires_grad_()


def _widen(value: Tensor) -> Tensor:
    return value.double()


def _to_channels_last(value: Tensor) -> Tensor:
    return value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value


def _changed_attributes(call: RecordedCall) -> str:
    """Returns what the module's forward changes, besides parameters and buffers; empty if nothing."""
    before = {name: _attributes(part) for name, part in call.module.named_modules()}
    outside = _outside_state(call.module)
    _run_pass(call, call.module._call_impl, call.module)
    for name, part in call.module.named_modules():
        after = _attributes(part)
        changed = {key for key in before.get(name, {}).keys() | after if _differs(before.get(name, {}), after, key)}
        if changed:
            return f"its forward changes {'.'.join(filter(None, (name, min(changed))))}"
    if _outside_state(call.module) != outside:
        return "its forward changes an object or a tensor that is neither parameter nor buffer"
    return ""


def _outside_state(module: nn.Module) -> list[Any]:
    """Returns the state of what the module's attributes and code refer to, without parameters and buffers."""
    tensors = {id(value) for value in (*module.parameters(), *module.buffers())}
    return [value_summary(value) for value in reachable_values(module) if id(value) not in tensors]


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
    return {
        key: (value, copy.copy(value) if isinstance(value, list | dict | set) else value) for key, value in own.items()
    }


def _differs(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> bool:
    if key not in before or key not in after or before[key][0] is not after[key][0]:
        return True
    one, other = before[key][1], after[key][1]
    if isinstance(one, list | dict | set):
        return len(one) != len(other) or any(a is not b for a, b in zip(one, other, strict=True))
    return False


def _measure(call: RecordedCall, compiled: Callable[..., Any]) -> dict[str, Any]:
    """Times passes of both forms in pairs."""
    times: dict[bool, list[float]] = {False: [], True: []}
    until = time.perf_counter() + _TIMED_S
    while len(times[True]) < _PAIRS and (len(times[True]) < 3 or time.perf_counter() < until):
        for is_exchanged in (False, True):
            began = time.perf_counter()
            _run_pass(call, compiled if is_exchanged else call.module._call_impl, call.module)
            times[is_exchanged].append(time.perf_counter() - began)
    own, exchanged = statistics.median(times[False]), statistics.median(times[True])
    return {"own_s": own, "ratio": own / exchanged}
