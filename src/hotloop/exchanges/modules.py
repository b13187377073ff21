"""The module exchange: forward and backward of a network compiled in place, with hotloop's rewrites.

The networks are the modules that the script itself calls in its first training steps. Each call of such a module is plain, recorded
for a proof, or by the compiled form.

The module object, its class, hooks, parameters and `state_dict()` stay the script's own. torch calls the attribute
`_compiled_call_impl` of a module if there is one, and leaves the attribute out of copies and pickles.
"""

from __future__ import annotations

import functools
import statistics
import time
import warnings
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hotloop.core.patches import Patches
from hotloop.core.processes import CompileProcess
from hotloop.exchanges.module_call import (
    RecordedCall,
    call_signature,
    has_differentiated_input,
    is_plain_training_call,
    notice_gradient,
    why_hooked,
    why_short_of_memory,
    why_unfit_leaves,
    why_unfit_module,
)
from hotloop.exchanges.part import RECHECK_CALLS, Exchange, Part, Session, first_line
from hotloop.exchanges.races import Seconds
from hotloop.margins import TYPICAL_LIMIT, WORST_LIMIT
from hotloop.profiler.base.tensor_facts import has_gradient
from hotloop.profiler.base.transparency import hide_from_compiler, hide_from_warnings
from hotloop.scripts.child import raise_signal_error, strip_own_frames
from hotloop.tuning.spare_time import SpareTime

_WATCHED_STEPS = 3
"""Steps in which the networks are found."""

_MIN_TRAINED_S = 10.0
"""Seconds of training before a network is compiled: a run of unknown length likely lasts as long again."""

_MAX_PARTS = 8

_COMPILES = "the script uses torch.compile itself"

_NOT_EXACT = "a compiled module is equal within rounding, and this run allows bitwise exchanges only"

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

_MOST_LOSS = 0.02
"""Largest share of the script's time that forks may cost. The length of the run is unknown, so a larger cost might not be
saved later."""

_SPAN_S, _RECENT_SPANS = 0.1, 20
"""Seconds of a span of steps, and the last spans without a fork that give the seconds of a step."""

_OTHER_WORK = 4.0
"""A step that is so many times as long as usual has an evaluation or a checkpoint in it, and doesn't count."""

_COMPARED_CALLS = 3
"""Compared calls of which the median error counts."""


class ModuleExchange(Exchange):
    """Finds the script's networks, and installs a `ModuleSite` at each."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._sites: dict[int, ModuleSite] = {}
        self._watched_until: int | None = None
        self._calls, self._child_limit = Patches(), ChildLimit()
        self._is_watching = self._is_inside = self._has_compiled = False
        self._began_s: float | None = None
        self._step_s: float | None = None
        self._steps = 0

    def install(self) -> None:
        """Looks for networks from the next update on, so a script without training has no hook in its calls."""
        self._watched_until = None
        self._patches.patch(torch, "compile", self._noticing)

    def remove(self) -> None:
        self.end()
        self.abandon()

    def abandon(self) -> None:
        self._is_watching = False
        self._calls.undo()
        super().abandon()
        for site in self._sites.values():
            site.uninstall()

    @property
    def is_busy(self) -> bool:
        """Whether the next steps are needed, to find networks or to try one."""
        return self._watched_until is None or self._is_watching or any(site.is_tried for site in self._sites.values())

    @property
    def is_over(self) -> bool:
        """Whether no network is used or waits for a decision."""
        return not self.is_busy and all(site.is_over for site in self._sites.values())

    def end(self) -> None:
        """Ends the processes that compile or prove."""
        for site in self._sites.values():
            site.end()

    def step_ended(self, steps: int) -> None:
        """Notes the number of the script's steps so far, after an optimizer's update."""
        if self._watched_until is None:
            self._watched_until, self._is_watching = steps + _WATCHED_STEPS, True
            self._calls.patch(nn.Module, "__call__", self._watching)
        if steps == self._steps:
            return
        now, passed = time.perf_counter(), steps - self._steps
        span_s = None if self._step_s is None else now - self._step_s
        self._steps, self._step_s = steps, now
        if self._is_watching and steps >= self._watched_until:
            self._is_watching = False
            self._calls.undo()
        if not self._sites:
            return
        process = next((site.process for site in self._sites.values() if site.process is not None), None)
        self._child_limit.step_ended(process, span_s, passed)
        if not self._is_watching:
            for site in self._sites.values():
                site.step_ended(steps, span_s if passed == 1 else None)

    @hide_from_warnings
    def _watching(self, original: Any) -> Any:
        compiling, session = torch.compiler.is_compiling, self._session

        @functools.wraps(original)
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if compiling() or self._is_inside or not self._is_watching or not session.is_exchanging():
                return original(module, *args, **kwargs)
            self._is_inside = True
            try:
                result = original(module, *args, **kwargs)
            except BaseException as error:
                error.__traceback__ = strip_own_frames(error)
                raise
            finally:
                self._is_inside = False
            self._note(module, result)
            return result

        return hide_from_compiler(call)

    def _noticing(self, original: Any) -> Any:
        """A module that is called inside of a function which the script compiles may have no further attribute."""

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            self._has_compiled = True
            for site in self._sites.values():
                site.leave(_COMPILES)
            return original(*args, **kwargs)

        return compile

    def _note(self, module: nn.Module, result: Any) -> None:
        """Makes a part of a network that is trained."""
        if id(module) in self._sites or len(self._sites) >= _MAX_PARTS or not module.training:
            return
        if not torch.is_grad_enabled() or not has_gradient(result):
            return
        numbers = sum(value.numel() for value in module.parameters() if value.requires_grad)
        if not numbers:
            return
        if self._began_s is None:
            self._began_s = time.monotonic()
        part = self._session.make_part("module", f"{type(module).__name__}, {numbers:,} parameters", ["compiled"])
        site = ModuleSite(module, part, self._session, self._may_begin)
        self._sites[id(module)] = site
        unfit = _NOT_EXACT if self._session.exact else _COMPILES if self._has_compiled else why_unfit_module(module)
        part.reason = "the script ended before compiling was likely to pay"
        if unfit:
            part.refuse(unfit)

    def _may_begin(self, site: ModuleSite) -> bool:
        is_early = self._began_s is None or time.monotonic() - self._began_s < _MIN_TRAINED_S
        if is_early and not site.part.was_faster and not site.part.proven:
            return False
        if any(other.process is not None for other in self._sites.values()):
            return False
        is_busy = any(other is not site and other.part.stage == "race" for other in self._sites.values())
        return not is_busy and not self._session.is_choosing_threads()


@hide_from_compiler
class ModuleSite:
    """Chooses the form of each call of a module, while its calls are counted, recorded or exchanged.

    Only a call that a gradient reaches is a training call: calls for acting, targets and evaluation have no backward.

    Args:
        module: the script's.
        part: receives proofs and the race.
        session: says which calls are exchanged.
        may_begin: whether the script has trained for so long that compiling is likely to pay, and no other module is
            compiled or proven now.

    Attributes:
        process: the fork that compiles or proves; None while there is none.
    """

    def __init__(
        self, module: nn.Module, part: Part, session: Session, may_begin: Callable[[ModuleSite], bool]
    ) -> None:
        self._module, self.part = weakref.ref(module), part
        self._session, self._may_begin = session, may_begin
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
                part.decide(part.times)
                if self.part.stage == "off":
                    self.remove()
            self.exchanges_step, self._is_counted = part.race.exchanges_next, True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None  # its caller
        plain = module._call_impl
        if torch.compiler.is_compiling() or self.part.stage == "off" or not self._session.is_exchanging():
            return plain(*args, **kwargs)
        try:
            form = self._choose(module, plain, args, kwargs)
        except Exception as error:
            raise_signal_error(error)
            self.leave(f"an internal error of hotloop: {first_line(error)}")
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
        return self._exchanged if stage == "use" and self._session.is_enabled else plain

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
            self.leave(f"an internal error of hotloop: {first_line(error)}")
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
            self.leave(f"its call can't be recorded: {first_line(error)}")
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
            self.leave(first_line(error))

    def _begin_process(self, call: RecordedCall) -> None:
        threads, self._process_until = torch.get_num_threads(), time.monotonic() + _MOST_PROCESS_S
        if self._compiled is None:
            self._compiled = _torch_compile(_inlined(call.module), backend=self._backend, fullgraph=True, dynamic=False)
        compiled = self._compiled
        is_in_place = self._is_in_place
        self._phase = self._phase if is_in_place else "wait"

        def work() -> dict[str, Any]:
            from hotloop.exchanges import module_proof  # takes about a second, so in the fork alone

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
            self.leave(f"it can't be compiled: {first_line(error)}")
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
            self.leave(f"it raised {first_line(error)}")
            return module._call_impl(*args, **kwargs)


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
        from hotloop.lowering.compile.inductor_patches import inductor_options

        # A script may call backward twice on one graph; torch compiles the backward at once if asked to.
        settings = {"donated_buffer": False, "force_non_lazy_backward_lowering": True}
        with torch._functorch.config.patch(settings):
            return compile_rewritten(graph, examples, {**inductor_options(), "compile_threads": 1})


class ChildLimit:
    """Pauses a fork while the steps at the same time are too slow; a fork on an idle core is never paused for long."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT_SPANS)
        self._process: CompileProcess | None = None
        self._spare_time: SpareTime | None = None
        self._steps, self._seconds = 0, 0.0

    def step_ended(self, process: CompileProcess | None, seconds: float | None, steps: int = 1) -> None:
        """Records some steps.

        Args:
            process: the fork that runs now, or None.
            seconds: of the steps; None if unknown.
            steps: their number.
        """
        if process is not self._process:
            self._process, self._spare_time, self._steps, self._seconds = process, None, 0, 0.0
            if process is not None and self._recent:
                usual_s = statistics.median(self._recent)
                self._spare_time = SpareTime(usual_s, process.pause, process.proceed, most_loss=_MOST_LOSS)
        if seconds is None or (self._recent and seconds > _OTHER_WORK * steps * statistics.median(self._recent)):
            return
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        if self._seconds < _SPAN_S:
            return
        if self._spare_time is not None:
            self._spare_time.record(self._steps, self._seconds)
        elif process is None:
            self._recent.append(self._seconds / self._steps)
        self._steps, self._seconds = 0, 0.0


class ModuleErrors:
    """Errors of each tensor against float64 in the last calls, in multiples of the noise floor."""

    def __init__(self) -> None:
        self._errors: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_COMPARED_CALLS))
        self._calls = 0

    def add(self, errors: Mapping[str, float]) -> str:
        """Adds the errors of one call; returns what is clearly wrong, or an empty string."""
        self._calls += bool(errors)
        for name, error in errors.items():
            self._errors[name].append(error)
        name, worst = max(errors.items(), key=lambda item: item[1], default=("", 0.0))
        if worst > WORST_LIMIT:
            return f"the error of its {name} is {worst:.3g} times the noise floor of the script's own"
        return self.verdict() if self.is_enough else ""

    @property
    def is_enough(self) -> bool:
        """Whether the median of enough calls is known."""
        return self._calls >= _COMPARED_CALLS

    def verdict(self) -> str:
        """Returns what is typically wrong; empty if nothing is."""
        typical = {name: statistics.median(errors) for name, errors in self._errors.items()}
        name, worst = max(typical.items(), key=lambda item: item[1], default=("", 0.0))
        if worst > TYPICAL_LIMIT:
            return f"the typical error of its {name} is {worst:.3g} times the noise floor of the script's own"
        return ""
