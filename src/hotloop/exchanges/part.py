"""A part of the script that hotloop can exchange: compared first, then raced, then used or left out; and its exchange."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeVar
from weakref import ref

from torch.utils.data import Dataset

from hotloop.core.patches import Patches
from hotloop.errors import describe_error
from hotloop.exchanges.races import CallRace, PairedTimes, is_costly, read_clocks
from hotloop.tuning.races.statistics import Ratio, verdict_of

Stage = Literal["proof", "race", "use", "off"]

_PROOFS = 3
"""Number of calls at which original and exchange are compared before a race."""

_EXACT_PROOFS, _EXACT_NUMBERS = 64, 2**14
"""With `--exact`: most compared calls, and numbers after which fewer calls are enough."""

RECHECK_CALLS = 1000
"""Calls of a used exchange between two comparisons; a comparison takes as long as about five calls."""

_MOST_ATTEMPTS = 32
"""Calls that can't be compared, and changes of the part, after which the part is left as it is."""

_NOISE = 1.02
"""A median speed above which a part that isn't used may be faster."""


@dataclass(frozen=True)
class CallComparison:
    """A call of the original compared with the same call of the exchange.

    Attributes:
        is_bitwise: whether all results have the same bits.
        numbers: how many numbers were compared; 0 if the call couldn't be compared.
        wrong: what differs beyond the noise floor; empty if nothing does.
    """

    is_bitwise: bool
    numbers: int
    wrong: str = ""


class Part:
    """One part and its exchanges, which are tried one after the other until one is proven and faster.

    Args:
        kind: as in `ExchangedPart`.
        name: the part in the script's words.
        exchanges: names of the exchanges, the most promising first.
        exact: whether only bitwise exchanges are allowed.
        changed: is called after each change of the stage.
        earlier: the exchange's name and its ratio, if an earlier run of the script proved it faster.

    Attributes:
        is_decided: whether a proof or a race of this run refused all exchanges, so that later runs needn't try them.
        own_work_s: seconds in which the script waited for comparisons, forks and compiling.
        was_busy: whether the machine was busy during the race, whose result is neither sure nor stored.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        exchanges: Sequence[str],
        *,
        exact: bool,
        changed: Callable[[], None],
        earlier: tuple[str, Ratio] | None = None,
    ) -> None:
        self.kind, self.name, self.exact = kind, name, exact
        self._earlier = earlier
        if earlier is not None and earlier[0] in exchanges:
            exchanges = [earlier[0], *(one for one in exchanges if one != earlier[0])]
        self.stage: Stage = "proof"
        self.exchange = exchanges[0]
        self.reason = ""
        self.notes: list[str] = []
        self.own_work_s = self._lost_s = self._compared_s = 0.0
        self.was_busy, self._pairs = False, 0
        self._made_s = time.perf_counter()
        self._waiting = list(exchanges[1:])
        self._changed = changed
        self.is_decided = self._has_run = self.is_bitwise = False
        self._attempts = 0
        self._rounded: list[str] = []
        self._reset()

    def _reset(self) -> None:
        self._rounded, self._has_run = self.rounded, False
        self.proven, self.numbers, self.is_bitwise = 0, 0, True
        self.race = CallRace()
        self.ratio: Ratio | None = None
        self._calls = 0

    @property
    def was_faster(self) -> bool:
        """Whether an earlier run of the script proved the exchange faster."""
        return self._earlier is not None and self._earlier[0] == self.exchange

    @property
    def rounded(self) -> list[str]:
        """The exchanges that the script had results of, equal within rounding only."""
        return self._rounded + [self.exchange] * (self._has_run and not self.is_bitwise)

    def note_run(self) -> None:
        """Notes that the script has results of the exchange, in a race or in use."""
        self._has_run = True

    @property
    def times(self) -> PairedTimes:
        """The times of the present race."""
        return self.race.times

    @property
    def cost_s(self) -> float:
        """Seconds that the part's proofs and races have cost the script."""
        return self.own_work_s + self._lost_s + (self.times.lost_s if self.stage == "race" else 0.0)

    @property
    def title(self) -> str:
        """Kind and name."""
        return f"{self.kind}: {self.name}"

    def restart(self, exchanges: Sequence[str]) -> None:
        """Begins anew, since the part has changed."""
        self._reset()
        self.stage, self.exchange, self._waiting, self.reason = "proof", exchanges[0], list(exchanges[1:]), ""
        self._count_attempt("the script changes its settings again and again")

    def _count_attempt(self, reason: str) -> None:
        self._attempts += 1
        if self._attempts >= _MOST_ATTEMPTS:
            self.refuse(reason)

    def note_unfit(self, reason: str) -> None:
        """Notes a call that can't be exchanged, for a reason that may pass."""
        self.reason = self.reason if self.proven else reason
        if not self.proven:
            self._count_attempt(reason)

    def call(
        self,
        original: Callable[[], Any],
        exchanged: Callable[[], Any],
        compare: Callable[[], tuple[Any, CallComparison]],
        *,
        enabled: bool,
        since_s: float | None = None,
    ) -> Any:
        """Calls one of both forms and returns its result.

        Args:
            original, exchanged: the two forms.
            compare: calls both and returns the original's result with the comparison.
            enabled: whether a used exchange is on; False in a dry run, once the gain is known.
            since_s: when hotloop began to choose, which an exchanged call takes longer than the script's own.
        """
        if self.stage == "proof":
            waits = self.proven >= _PROOFS and is_costly(self._compared_s, time.perf_counter() - self._made_s)
            return original() if waits else self._compare(compare)
        if self.stage == "race":
            is_exchanged = self.race.exchanges_next
            self._has_run |= is_exchanged
            began = read_clocks()
            choice_s = began.wall_s - since_s if is_exchanged and since_s is not None else 0.0
            result = exchanged() if is_exchanged else original()
            if self.stage == "race" and self.race.add(read_clocks().since(began).longer(choice_s)):
                self.decide(self.times)
            return result
        if self.stage == "off" or not enabled:
            return original()
        self._calls += 1
        if self._calls % RECHECK_CALLS == 0:
            return self._compare(compare)
        self._has_run = True
        return exchanged()

    def use_earlier(self) -> bool:
        """Uses the exchange without a race if an earlier run proved it faster; returns whether it is used."""
        if self._earlier is None or not self.was_faster:
            return False
        self.ratio = self._earlier[1]
        self._use()
        return True

    def take_back(self, reason: str) -> None:
        """Ends the use of an exchange, with a line for the summary."""
        self.notes.append(f"{self.title}: the exchange {self.exchange} was taken back: {reason}")
        self.refuse(reason)

    def refuse(self, reason: str) -> None:
        """Leaves the part as it is."""
        self.stage, self.reason = "off", reason
        self._changed()

    def as_record(self, *, used: bool) -> dict[str, Any]:
        """Returns the fields of `ExchangedPart`."""
        proof = "" if not self.proven else "bitwise" if self.is_bitwise else "fp32-equivalent"
        ratio = replace(self.ratio, low=None, high=None) if self.ratio and self.was_busy else self.ratio
        return {
            "kind": self.kind,
            "name": self.name,
            "exchange": self.exchange,
            "used": used and self.stage == "use",
            "proof": proof,
            "proven": self.proven,
            "pairs": self._pairs + (self.times.count if self.stage == "race" else 0),
            "ratio": None if ratio is None else asdict(ratio),
            "was_busy": self.was_busy,
            "reason": self.reason or ("" if self.stage == "use" else "the script ended before a decision"),
        }

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Measures the seconds of work that the script waits for."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.own_work_s += time.perf_counter() - began

    def _compare(self, compare: Callable[[], tuple[Any, CallComparison]]) -> Any:
        before_s = self.own_work_s
        with self.own_work():
            result, comparison = compare()
        self._compared_s += self.own_work_s - before_s
        wrong = comparison.wrong
        if self.exact and not comparison.is_bitwise and not wrong:
            wrong = "its results are not bitwise equal"
        if wrong and self.stage == "use":
            self.take_back(wrong)
        elif wrong:
            self._try_next(wrong)
        elif comparison.numbers:
            self.proven += 1
            self.numbers += comparison.numbers
            self.is_bitwise = self.is_bitwise and comparison.is_bitwise
            if self.stage == "proof" and self._is_proven():
                self.begin_race()
        elif self.stage == "proof":
            self._count_attempt("its results aren't finite")
        return result

    def _is_proven(self) -> bool:
        if not self.exact:
            return self.proven >= _PROOFS
        return self.proven >= _EXACT_PROOFS or (self.proven >= _PROOFS and self.numbers >= _EXACT_NUMBERS)

    def begin_race(self) -> None:
        """Ends the proof; an exchange that an earlier run proved faster is used at once."""
        if not self.use_earlier():
            self.stage = "race"

    def _use(self) -> None:
        self.stage, self.reason = "use", ""
        self._changed()

    def decide(self, times: PairedTimes) -> None:
        """Uses the exchange if its race shows that it is faster, else tries the next one."""
        self.ratio, self.was_busy = times.ratio(), times.was_busy()
        self._lost_s += times.lost_s
        self._pairs += times.count
        if self.ratio is None:
            self._try_next("its race has no two windows with steps of the same kinds")
        elif verdict_of(self.ratio) == "faster":
            self._use()
        else:
            is_unsure = times.is_costly and self.ratio.median > 1
            cost = f", stopped after a loss of {times.lost_s:.1f} s" if times.is_costly else ""
            self._try_next(
                f"not {'surely ' if self.ratio.median > _NOISE else ''}faster: {_describe(self.ratio)}{cost}"
            )
            self.is_decided &= not is_unsure  # a longer run may show more

    def _try_next(self, reason: str) -> None:
        self.reason = reason
        if not self._waiting:
            self.is_decided = True
            self.refuse(reason)
            return
        self._reset()
        refused, self.exchange = self.exchange, self._waiting.pop(0)
        self.reason = f"the script ended before a decision on {self.exchange}; {refused}: {reason}"
        self.stage = "proof"


def _describe(ratio: Ratio) -> str:
    interval = "" if ratio.low is None or ratio.high is None else f" (99 %: {ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.median:.2f} times the speed{interval}"


class Session(Protocol):
    """What an exchange asks its session."""

    @property
    def exact(self) -> bool:
        """Whether only bitwise exchanges are allowed."""

    @property
    def is_enabled(self) -> bool:
        """Whether used exchanges are on."""

    def is_mine(self) -> bool:
        """Whether calls of this process and thread are exchanged."""

    def is_exchanging(self) -> bool:
        """Whether a call may be exchanged now; a window without exchanges has none of hotloop's own work."""

    def is_choosing_threads(self) -> bool:
        """Whether the race of the number of threads, which a compiled module depends on, is undecided."""

    def make_part(self, kind: str, name: str, exchanges: Sequence[str]) -> Part:
        """Makes a part, which the summary names."""


class Exchange:
    """Functions that take the place of torch's while they are installed.

    Args:
        session: makes the parts, and says which calls are exchanged.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._patches, self._made = session, Patches(), 0

    def remove(self) -> None:
        """Gives torch's functions back."""
        self._patches.undo()

    def abandon(self) -> None:
        """In a forked process: gives torch's functions back, and leaves the parent's processes alone."""
        self._patches.undo()


class DatasetSite(Protocol):
    """What an exchange knows of one data set."""

    dataset: ref[Any]


Site = TypeVar("Site", bound=DatasetSite)

_MAX_DATASETS = 32


class DatasetExchange(Exchange, Generic[Site]):
    """An exchange of batches; what it knows of a data set ends with the data set."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._sites: dict[int, Site] = {}

    def _make_site(self, dataset: Any, ended: Callable[[Any], Any]) -> Site:
        raise NotImplementedError

    def _site(self, dataset: Any) -> Site | None:
        """Returns what is known of a data set; None for a list, which has no weak references, and for too many data sets."""
        if not isinstance(dataset, Dataset):
            return None
        key = id(dataset)
        site = self._sites.get(key)
        if site is None or site.dataset() is not dataset:
            if self._made >= _MAX_DATASETS:
                return None
            self._made += 1
            site = self._sites[key] = self._make_site(dataset, lambda _: self._sites.pop(key, None))
        return site


def first_line(error: BaseException) -> str:
    """Returns an error's kind and the first line of its text; of a compiler's error the cause."""
    while (inside := getattr(error, "inner_exception", None)) is not None:
        error = inside
    return describe_error(error).splitlines()[0][:200]
