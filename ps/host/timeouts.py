"""A call with a bound on its time, for what keeps none itself or lets no signal through."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")


def within(bound_s: float, call: Callable[[], Answer], name: str) -> Answer:
    """What the call returns or raises, in a daemon thread of that name.

    Blocks for bound_s at most. The thread of a call that takes longer stays behind.

    Raises:
        TimeoutError: it takes longer than bound_s.
    """
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except (Exception, SystemExit) as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(bound_s)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {bound_s:g} s")
    return answers[0]
