"""A call with a bound on its time."""

from __future__ import annotations

import threading
import time

import pytest

from ps.host.timeouts import within


def test_it_gives_what_the_call_gives() -> None:
    assert within(5.0, lambda: 7, "seven") == 7


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), TimeoutError("its own")])
def test_it_raises_what_the_call_raises(error: BaseException) -> None:
    def call() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        within(5.0, call, "call")
    assert caught.value is error


def test_a_call_that_takes_longer_is_left_behind_in_a_thread_with_a_name() -> None:
    ended, start = threading.Event(), time.monotonic()
    with pytest.raises(TimeoutError, match=r"^no answer within 0.05 s$"):
        within(0.05, ended.wait, "slow")
    assert 0.05 <= time.monotonic() - start < 1.0
    [thread] = [thread for thread in threading.enumerate() if thread.name == "slow"]
    assert thread.daemon
    ended.set()
    thread.join(5.0)
    assert not thread.is_alive()


def test_it_runs_in_another_thread() -> None:
    """So that a signal reaches the main thread."""
    assert within(5.0, threading.current_thread, "other") is not threading.current_thread()
