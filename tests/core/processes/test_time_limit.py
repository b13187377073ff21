"""Work that takes too long is given up, whatever it catches, and nothing rings afterwards."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from hotloop.core.processes import time_limit

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no alarms on Windows")


class TooLongError(Exception):
    pass


def sleeping(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            time.sleep(0.01)
        except Exception:  # as libraries do that try something
            continue


def test_it_is_given_up() -> None:
    with pytest.raises(TooLongError), time_limit(0.05, TooLongError):
        sleeping(60)


def test_what_is_done_in_time_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(60, TooLongError):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_an_alarm_of_somebody_else_goes_on_afterwards() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 60)
        with time_limit(30, TooLongError):
            pass
        assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with time_limit(30, TooLongError):
            sleeping(0.1)
        sleeping(0.1)
        assert rung == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_an_error_of_its_own_goes_through_and_nothing_rings_later() -> None:
    with pytest.raises(ValueError), time_limit(0.05, TooLongError):
        raise ValueError
    sleeping(0.1)


def test_in_another_thread_nobody_can_be_interrupted() -> None:
    done = []

    def work() -> None:
        with time_limit(0.01, TooLongError):
            sleeping(0.1)
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
