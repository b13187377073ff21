"""The calls of one module of the script: plain, recorded for a proof, or by the compiled form.

The module object, its class, hooks, parameters and `state_dict()` stay the script's own. torch calls the attribute
`_compiled_call_impl` of a module if there is one, and leaves the attribute out of copies and pickles.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hotloop.core.processes.compile_process import CompileProcess
from hotloop.errors import describe_error
from hotloop.exchanges.modules.module_call import RecordedCall, call_signature, has_differentiated_input
from hotloop.exchanges.modules.module_limits import (
    is_plain_training_call,
    why_hooked,
    why_short_of_memory,
    why_unfit_leaves,
)
from hotloop.exchanges.modules.module_verdict import ModuleErrors
from hotloop.exchanges.part import RECHECK_CALLS, Part
from hotloop.exchanges.windows.paired_times import Seconds
from hotloop.profiler.base.transparency import hide_from_compiler
from hotloop.scripts.traceback_frames import raise_signal_error, strip_own_frames

_KNOWN_CALLS, _LEAST_SHARE = 10, 0.6
"""Calls after which the most frequent kind of call is known, and its least share."""

_MOST_KINDS = 64

_CHECKED_CALLS = 4
"""Calls between two proofs before the race."""

_TRIES = 5
"""Calls that can't be compared, such as after an overflow, before the module stays as it is."""

_MOST_PROCESS_S = 600.0
"""Seconds after which a fork that compiles or proves is ended."""

_READ_S = 10.0
"""Seconds for the end of a result that a fork has begun to write."""

_MIN_GAIN = 1.02

_IN_PLACE_S = 5.0
"""About the seconds for which compiling in place stops the script: once the calls so far would have saved as much, a
run of unknown length likely saves more."""

_torch_compile = torch.compile
"""torch's own function: the exchange notices the script's calls of `torch.compile`."""

Phase = Literal["count", "record", "wait", "compile", "ready"]


def _inlined(module: nn.Module) -> Callable[..., Any]:
    """Returns a function that torch's compiler captures whole: it skips `_call_impl` itself and `nn.Sequential`."""
    call = module._call_impl
    return lambda *args, **kwargs: call(*args, **kwargs)


class _SealedBackend:
    """Compiles one graph; a second graph is an error, since only the first one is proven."""

    def __init__(self) -> None:
        self.is_sealed = False

    def __call__(self, graph: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        if self.is_sealed:
            raise RuntimeError("the module changed, so it would be compiled again")
        from hotloop.lowering.compile.dynamo_backend import compile_rewritten
        from hotloop.lowering.compile.inductor_options import inductor_options

        # A script may call backward twice on one graph; torch compiles the backward at once if asked to.
        settings = {"donated_buffer": False, "force_non_lazy_backward_lowering": True}
        with torch._functorch.config.patch(settings):
            return compile_rewritten(graph, examples, {**inductor_options(), "compile_threads": 1})


@hide_from_compiler
class ModuleSite:
    """Chooses the form of each call of a module.

    Args:
        module: the script's.
        part: receives proofs and the race.
        is_mine: whether calls of this process and thread are exchanged.
        is_enabled: whether used exchanges are on.
        may_begin: whether the script has trained for so long that compiling is likely to pay, and no other module is
            compiled or proven now.

    Attributes:
        process: the fork that compiles or proves; None while there is none.
    """

    def __init__(
        self,
        module: nn.Module,
        part: Part,
        is_mine: Callable[[], bool],
        is_enabled: Callable[[], bool],
        may_begin: Callable[[ModuleSite], bool],
    ) -> None:
        self._module, self.part = weakref.ref(module), part
        self._is_mine, self._is_enabled, self._may_begin = is_mine, is_enabled, may_begin
        self._backend = _SealedBackend()
        self._compiled: Callable[..., Any] | None = None
        self.process: CompileProcess | None = None
        self._phase: Phase = "count"
        self._kinds: Counter[Any] = Counter()
        self._signature: Any = None
        self._errors = ModuleErrors()
        self._calls = self._tries = self.calls_in_step = 0
        self._saved_s = self._process_until = self._cpu_s = 0.0
        self._is_in_place = self.exchanges_step = self._is_counted = False
        self._handles = RemovableHandle.next_id

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy or a file of the module has torch's default instead

    def install(self) -> None:
        module = self._module()
        if module is not None and self.part.stage != "off":
            object.__setattr__(module, "_compiled_call_impl", self)

    def remove(self) -> None:
        self.end()
        module = self._module()
        if module is not None and vars(module).get("_compiled_call_impl") is self:
            del vars(module)["_compiled_call_impl"]

    def end(self) -> None:
        """Ends the fork, if there is one."""
        if self.process is not None:
            self.process.end()
            self.process = None

    def leave(self, reason: str) -> None:
        """Leaves the module as it is from now on."""
        if self.part.stage == "use":
            self.part.take_back(reason)
        elif self.part.stage != "off":
            self.part.refuse(reason)
        self.remove()

    def step_ended(self, seconds: float | None) -> None:
        """Adds a step's time to the race, and chooses the form of the next step's calls.

        Args:
            seconds: of the step; None if unknown.
        """
        part = self.part
        if part.stage == "race":
            before_s, self._cpu_s = self._cpu_s, time.process_time()
            is_raced = self._is_counted and self.calls_in_step > 0
            if is_raced and seconds is not None and part.race.add(Seconds(seconds, self._cpu_s - before_s)):
                self._decide()
            self.exchanges_step, self._is_counted = part.race.exchanges_next, True
        self.calls_in_step = 0

    def _decide(self) -> None:
        self.part.decide(self.part.times)
        if self.part.stage == "off":
            self.remove()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None  # its caller
        plain = module._call_impl
        if torch.compiler.is_compiling() or self.part.stage == "off" or not self._is_mine():
            return plain(*args, **kwargs)
        try:
            form = self._choose(module, plain, args, kwargs)
        except Exception as error:
            raise_signal_error(error)
            self.leave(f"an internal error of hotloop: {_first_line(error)}")
            form = plain
        try:
            return form(*args, **kwargs)
        except BaseException as error:
            error.__traceback__ = strip_own_frames(error)
            raise

    def _choose(
        self, module: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any]:
        """Returns the form of a call."""
        if self.process is not None and self.process.is_ready:
            self._process_ended(self.process.result(_READ_S))
        elif self.process is not None and time.monotonic() > self._process_until:
            self.leave(f"compiling and comparing did not finish within {_MOST_PROCESS_S:.0f} s")
        self._check_hooks(module)
        if self._is_resting():  # most calls of a short run, so before all that takes longer
            self._calls += module.training
            return plain
        if self.part.stage == "off" or not is_plain_training_call(module) or has_differentiated_input(args, kwargs):
            return plain
        signature = call_signature(args, kwargs)
        if self._phase == "count":
            self._count(signature)
            return plain
        self._calls += 1
        if signature != self._signature:
            return plain
        self.calls_in_step += 1
        if self._phase == "record" and self._may_begin(self):
            return self._recorded
        if self._phase == "ready" and self._has_paid:
            self._compile(module, args, kwargs)
            return plain
        if not self._is_in_place:
            return plain
        return self._choose_in_place(plain)

    def _is_resting(self) -> bool:
        """Whether a call can't begin anything: the module waits for its time or for its fork."""
        if self._phase == "record":
            return not self._may_begin(self)
        return self._phase == "wait" or (self._phase == "ready" and not self._has_paid)

    @property
    def _has_paid(self) -> bool:
        """Whether the calls so far would have saved what compiling in place takes."""
        return self.part.was_faster or self._calls * self._saved_s >= _IN_PLACE_S

    def _choose_in_place(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        stage = self.part.stage
        due = _CHECKED_CALLS if stage == "proof" else RECHECK_CALLS
        if stage in ("proof", "use") and self._calls % due == 0 and self._may_begin(self):
            return self._recorded
        if stage == "race":
            return self._exchanged if self.exchanges_step else plain
        return self._exchanged if stage == "use" and self._is_enabled() else plain

    def _count(self, signature: Any) -> None:
        """Finds the kind of call that is exchanged: the most frequent one."""
        if len(self._kinds) < _MOST_KINDS:
            self._kinds[signature] += 1
        total = self._kinds.total()
        if total < _KNOWN_CALLS:
            return
        self._signature, most = self._kinds.most_common(1)[0]
        if most < _LEAST_SHARE * total:
            self.leave(f"its inputs have {len(self._kinds)} kinds of shapes in {total} calls, each to be compiled")
        self._phase = "record"

    def _check_hooks(self, module: nn.Module) -> None:
        """Each new hook of any module or tensor gets a number from torch's counter."""
        if self._handles != RemovableHandle.next_id:
            self._handles = RemovableHandle.next_id
            if hooked := why_hooked(module):
                self.leave(hooked)

    def _recorded(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the script's own call, and forks at the end of its backward."""
        module = self._module()
        assert module is not None
        call = self._record(module, args, kwargs)
        result = module._call_impl(*args, **kwargs)
        if call is None:
            return result
        try:
            call.watch(result, lambda: self._fork(call))
            if call.unfit:
                self.leave(call.unfit)
        except Exception as error:
            raise_signal_error(error)
            self.leave(f"an internal error of hotloop: {_first_line(error)}")
        return result

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall | None:
        """Records the arguments of a call; None if they can't be compared, and the module stays as it is."""
        if unfit := why_unfit_leaves((args, kwargs), "an argument"):
            self.leave(unfit)
            return None
        try:
            return RecordedCall(module, args, kwargs)
        except Exception as error:  # such as too little memory for copies; the script's call goes on
            raise_signal_error(error)
            self.leave(f"its call can't be recorded: {_first_line(error)}")
            return None

    def _fork(self, call: RecordedCall) -> None:
        try:
            short = why_short_of_memory(call.module)
            if short and self.part.stage == "use":
                return  # a later call is compared
            if reason := call.unfit or short:
                self.leave(reason)
            elif self.part.stage != "off" and self._may_begin(self) and call.has_its_parameters:
                self._begin_process(call)
        except Exception as error:  # such as a limit of processes; the script's backward goes on
            raise_signal_error(error)
            self.leave(_first_line(error))

    def _begin_process(self, call: RecordedCall) -> None:
        threads, self._process_until = torch.get_num_threads(), time.monotonic() + _MOST_PROCESS_S
        if self._compiled is None:
            self._compiled = _torch_compile(_inlined(call.module), backend=self._backend, fullgraph=True, dynamic=False)
        compiled = self._compiled
        is_in_place = self._is_in_place
        self._phase = self._phase if is_in_place else "wait"

        def work() -> dict[str, Any]:
            from hotloop.exchanges.modules import module_proof  # takes about a second, so in the fork alone

            prove = module_proof.prove if is_in_place else module_proof.compile_and_prove
            return prove(call, compiled, threads)

        with self.part.own_work():
            self.process = CompileProcess(work)

    def _process_ended(self, found: dict[str, Any]) -> None:
        self.end()
        part = self.part
        wrong = found.get("failure") or self._errors.add(found["errors"])
        if wrong:
            self.leave(wrong)
            return
        if not found["numbers"]:
            self._tries += 1
            self._phase = self._phase if self._is_in_place else "record"
            if self._tries >= _TRIES:
                self.leave("its results aren't finite")
            return
        part.proven += 1
        part.numbers += found["numbers"]
        part.is_bitwise = part.is_bitwise and found["is_bitwise"]
        if not self._is_in_place:
            self._phase, self._saved_s = "ready", found["own_s"] * (1 - 1 / found["ratio"])
            if found["ratio"] < _MIN_GAIN and not part.was_faster:
                self.leave(f"not faster: {found['ratio']:.2f} times the speed in passes beside the script")
        elif part.stage == "proof" and (wrong := self._errors.verdict()):
            self.leave(wrong)
        elif part.stage == "proof" and self._errors.is_enough:
            part.reason = ""
            part.begin_race()

    def _compile(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compiles in place, from the compiler's cache, and makes a call whose results are dropped."""
        from hotloop.core.reporter import silence_loggers

        call = RecordedCall(module, args, kwargs)
        compiled, (copies, keywords) = self._compiled, call.arguments
        assert compiled is not None
        try:
            with warnings.catch_warnings(), silence_loggers("torch"):
                warnings.simplefilter("ignore")
                with self.part.own_work():
                    compiled(*copies, **keywords)
        except Exception as error:
            raise_signal_error(error)
            self.leave(f"it can't be compiled: {_first_line(error)}")
        finally:
            torch.set_rng_state(call.random)
            with torch.no_grad():
                for name, value in module.named_buffers():
                    if not torch.equal(value, call.buffers[name]):  # a change would void an earlier call's backward
                        value.copy_(call.buffers[name])
        self._backend.is_sealed = self._is_in_place = True
        self._phase = "compile"

    def _exchanged(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the compiled module; after an error, the script's own, whose error is the script's."""
        compiled, module = self._compiled, self._module()
        assert compiled is not None and module is not None
        state = torch.get_rng_state()
        try:
            return compiled(*args, **kwargs)
        except Exception as error:
            raise_signal_error(error)
            torch.set_rng_state(state)
            self.leave(f"it raised {_first_line(error)}")
            return module._call_impl(*args, **kwargs)


def _first_line(error: BaseException) -> str:
    """Returns an error's kind and the first line of its text; of a compiler's error the cause."""
    while (inside := getattr(error, "inner_exception", None)) is not None:
        error = inside
    return describe_error(error).splitlines()[0][:200]
