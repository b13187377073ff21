"""The calls of one module of the script: plain, recorded for a proof, or by the compiled form.

The module object, its class, hooks, parameters and `state_dict()` stay the script's own. torch calls the attribute
`_compiled_call_impl` of a module if there is one, and leaves the attribute out of copies and pickles.
"""

from __future__ import annotations

import functools
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hotloop.core.processes import CompileProcess
from hotloop.errors import describe_error
from hotloop.exchanges.modules.module_call import (
    RecordedCall,
    call_signature,
    has_differentiated_input,
    notice_gradient,
)
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
from hotloop.scripts.child import raise_signal_error, strip_own_frames

_KNOWN_CALLS, _LEAST_SHARE = 10, 0.6
"""Calls after which the most frequent kind of call is known, and its least share."""

_MOST_KINDS = 64

_ACTING_CALLS = 200
"""Counted calls in a row without a backward, after which a module is one for acting, targets or evaluation."""

_MISSED_BACKWARDS = 16
"""Recorded calls in a row without a backward, after which the module stays as it is."""

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

Phase = Literal["count", "record", "wait", "ready", "compile"]
"""In `wait` a fork compiles, and in `ready` the module waits until its calls would have paid for compiling in place."""


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
    """Chooses the form of each call of a module, while its calls are counted, recorded or exchanged.

    Only a call that a gradient reaches is a training call: calls for acting, targets and evaluation have no backward.

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
        self._calls = self._checked_at = self._tries = 0
        self.calls_in_step, self._usual_calls = 0, 1
        self._acting = self._missed = self._skipped = 0
        self._first_step = self._steps = self._counted_from = 0
        self._rate = self._saved_s = self._process_until = self._cpu_s = 0.0
        self._is_in_place = self.exchanges_step = self._is_counted = self._has_recorded = False
        self._handles = -1

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy or a file of the module has torch's default instead

    def install(self) -> None:
        """Takes the place of the module's calls."""
        module = self._module()
        if module is None or self.part.stage == "off" or self.is_installed:
            return
        if module._compiled_call_impl is not None:
            self.leave("the script compiles it")
            return
        object.__setattr__(module, "_compiled_call_impl", self)
        self._handles = -1  # hooks may be new

    def uninstall(self) -> None:
        """Gives the module's calls back."""
        if self.is_installed:
            del vars(self._module())["_compiled_call_impl"]

    @property
    def is_installed(self) -> bool:
        module = self._module()
        return module is not None and vars(module).get("_compiled_call_impl") is self

    @property
    def is_over(self) -> bool:
        """Whether the module is left as it is, or freed."""
        return self.part.stage == "off" or self._module() is None

    @property
    def is_tried(self) -> bool:
        """Whether the module's calls are counted, recorded, proven or raced now."""
        return self.is_installed and self.part.stage != "use"

    def remove(self) -> None:
        self.end()
        self.uninstall()

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

    def step_ended(self, steps: int, seconds: float | None) -> None:
        """Adds a step's time to the race, and decides about the next step's calls.

        Args:
            steps: number of the script's steps so far.
            seconds: of the step; None if unknown.
        """
        self._first_step, self._steps = self._first_step or steps, steps
        if self.process is not None and self.process.is_ready:
            self._process_ended(self.process.result(_READ_S))
        elif self.process is not None and time.monotonic() > self._process_until:
            self.leave(f"compiling and comparing did not finish within {_MOST_PROCESS_S:.0f} s")
        self._end_recording()
        self._race(seconds)
        self._usual_calls, self.calls_in_step = self.calls_in_step or self._usual_calls, 0
        if self._module() is None and self.part.stage in ("proof", "race"):
            self.part.refuse("the script freed it before a decision")
        elif self._wants_calls():
            self.install()
        else:
            self.uninstall()

    def _end_recording(self) -> None:
        """Notes that no backward followed the recorded call of this step, which another call of a step may have."""
        if self._has_recorded and self.process is None and self.part.stage != "off":
            self._missed, self._skipped = self._missed + 1, self._skipped + 1
            if self._missed >= _MISSED_BACKWARDS and self.part.stage == "proof":
                self.leave("no backward follows its calls")
        self._has_recorded = False

    def _wants_calls(self) -> bool:
        """Whether the next calls are counted, recorded or exchanged; else they are the script's own."""
        if self.part.stage == "off":
            return False
        if self._is_in_place:
            return True
        if self._phase == "ready":
            return self._has_paid
        if self._phase == "count" and not self.is_installed:
            self._counted_from = self._steps
        return self._phase != "wait" and self._may_begin(self)

    def _race(self, seconds: float | None) -> None:
        part = self.part
        if part.stage == "race":
            before_s, self._cpu_s = self._cpu_s, time.process_time()
            is_raced = self._is_counted and self.calls_in_step > 0
            if is_raced and seconds is not None and part.race.add(Seconds(seconds, self._cpu_s - before_s)):
                self._decide()
            self.exchanges_step, self._is_counted = part.race.exchanges_next, True

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
        self._check_hooks(module)
        if self.part.stage == "off" or not is_plain_training_call(module) or has_differentiated_input(args, kwargs):
            return plain
        signature = call_signature(args, kwargs)
        if self._phase == "count":
            return functools.partial(self._counted, signature)
        if signature != self._signature:
            return plain
        self._calls += 1
        self.calls_in_step += 1
        if self._phase == "ready":
            self._compile(module, args, kwargs)
            return plain
        if self._is_in_place:
            return self._choose_in_place(plain)
        return self._recorded if self._phase == "record" and self._can_record() else plain

    def _can_record(self) -> bool:
        """Whether this call is recorded: one of a step, and another one after calls without a backward."""
        is_next = not self._has_recorded and self.calls_in_step > self._skipped % self._usual_calls
        return is_next and self._may_begin(self)

    @property
    def _has_paid(self) -> bool:
        """Whether the calls so far would have saved what compiling in place takes."""
        calls = self._rate * (self._steps - self._first_step)
        return self.part.was_faster or calls * self._saved_s >= _IN_PLACE_S

    def _choose_in_place(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        stage = self.part.stage
        due = _CHECKED_CALLS if stage == "proof" else RECHECK_CALLS
        if stage in ("proof", "use") and self._calls - self._checked_at >= due and self._can_record():
            return self._recorded
        if stage == "race":
            return self._exchanged if self.exchanges_step else plain
        return self._exchanged if stage == "use" and self._is_enabled() else plain

    def _counted(self, signature: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes the script's own call, and counts the call once a gradient reaches its result."""
        module = self._module()
        assert module is not None
        result = module._call_impl(*args, **kwargs)
        self._acting += 1
        if self._acting >= _ACTING_CALLS:
            self.leave(f"{_ACTING_CALLS} calls in a row had no backward")
        else:
            notice_gradient(result, lambda: self._count(signature))
        return result

    def _count(self, signature: Any) -> None:
        """Finds the kind of training call that is exchanged: the most frequent one."""
        if self._phase != "count":
            return
        self._acting = 0
        if len(self._kinds) < _MOST_KINDS:
            self._kinds[signature] += 1
        total = self._kinds.total()
        if total < _KNOWN_CALLS:
            return
        self._signature, most = self._kinds.most_common(1)[0]
        if most < _LEAST_SHARE * total:
            self.leave(f"its inputs have {len(self._kinds)} kinds of shapes in {total} calls, each to be compiled")
        self._phase, self._rate = "record", total / max(1, self._steps - self._counted_from)

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
        self._has_recorded = True
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
        self._missed, self._checked_at = 0, self._calls

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
        self.part.note_run()
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
