"""Deadlines, and calls that may take too long."""

from __future__ import annotations

import math
import threading
import time

import pytest

from ps.host.timeouts import Deadline, call_with_timeout


def test_a_deadline_leaves_less_and_less_and_never_less_than_nothing() -> None:
    deadline = Deadline.after(50.0)
    assert 49 < deadline.left_s() <= 50 and not deadline.is_over
    assert deadline.left_s(at_most=10.0) == 10.0
    over = Deadline(time.monotonic())
    assert (over.left_s(), over.left_s(at_most=3.0), over.is_over) == (0.0, 0.0, True)
    assert Deadline(math.inf).left_s() == math.inf


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), TimeoutError("its own")])
def test_a_call_gives_its_answer_or_its_error_from_another_thread(error: BaseException) -> None:
    """Another one, so that a signal still reaches the main thread."""

    def call() -> None:
        raise error

    thread = call_with_timeout(5.0, threading.current_thread, "other")
    assert thread is not threading.current_thread()
    with pytest.raises(type(error)) as caught:
        call_with_timeout(5.0, call, "call")
    assert caught.value is error


def test_a_call_that_takes_longer_is_left_behind_in_a_daemon_thread_of_that_name() -> None:
    ended, start = threading.Event(), time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.05"):
        call_with_timeout(0.05, ended.wait, "slow")
    assert 0.05 <= time.monotonic() - start < 1.0
    [thread] = [thread for thread in threading.enumerate() if thread.name == "slow"]
    assert thread.daemon
    ended.set()
    thread.join(5.0)
    assert not thread.is_alive()
