"""Limits of time: a moment by which something must be over, and a call that may hang."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Answer = TypeVar("Answer")
ASK_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment, in seconds of the monotonic clock."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def left_s(self, at_most: float = math.inf) -> float:
        """Seconds until the deadline, but no more than at_most; 0 once it is over."""
        return max(0.0, min(at_most, self.at - time.monotonic()))

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.at


def call_with_timeout(
    timeout_s: float | Callable[[], float], call: Callable[[], Answer], thread_name: str
) -> Answer:
    """Return or raise what the call does, made in a daemon thread of that name.

    For calls that have no timeout of their own, or that let no signal through. Blocks for
    timeout_s at most; a function is asked again and again how many seconds are left, which may
    become less. The thread of a call that takes longer stays behind.

    Raises:
        TimeoutError: the call takes longer than timeout_s.
    """
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except (Exception, SystemExit) as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=thread_name, daemon=True)
    start = time.monotonic()
    thread.start()
    if callable(timeout_s):
        while thread.is_alive() and (left_s := timeout_s()) > 0:
            thread.join(min(left_s, ASK_INTERVAL_S))
    else:
        thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {time.monotonic() - start:.3g} s")
    return answers[0]
