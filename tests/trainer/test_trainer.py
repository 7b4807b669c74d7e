"""A trainer's life, with a server that replies from a list."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from ps.protocol import (
    Assignment,
    Evaluate,
    Evaluated,
    Finished,
    Reply,
    Result,
    Train,
    Wait,
    Weights,
)
from ps.trainer.trainer import train

SLICE = Evaluated(0, 0, 10, 2.5, 7)
FIRST = Assignment(Train(0, 0, array("q", [1, 2])), Weights(0))
SECOND = Assignment(Evaluate(0, 0, 0, 10), Weights(1))


class Script:
    """Server and worker in one, which write down what happens."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self._replies = iter(replies)
        self.seen: list[object] = []

    def next_order(self, trainer: int, result: Result | None) -> Reply:
        self.seen.append(("asks", trainer, result))
        return next(self._replies)

    def do(self, assignment: Assignment) -> Result:
        self.seen.append(assignment)
        return SLICE

    def check(self) -> None:
        self.seen.append("checks")

    def at_end(self) -> None:
        self.seen.append("ends")

    def leave(self, trainer: int) -> None:
        self.seen.append(("leaves", trainer))


def train_by(script: Script) -> list[object]:
    train(3, script, script, check=script.check, at_end=script.at_end)  # type: ignore[arg-type]
    return script.seen


def test_orders_are_done_until_there_are_no_more_and_each_result_is_handed_in_once() -> None:
    assert train_by(Script([FIRST, Wait(), SECOND, Finished()])) == [
        *(("asks", 3, None), "checks", FIRST),
        *(("asks", 3, SLICE), "checks"),
        *(("asks", 3, None), "checks", SECOND),
        *(("asks", 3, SLICE), "ends", ("leaves", 3)),
    ]


def test_a_check_that_raises_breaks_off_before_the_order() -> None:
    class Broken(Script):
        def check(self) -> None:
            raise KeyboardInterrupt

    script = Broken([FIRST])
    with pytest.raises(KeyboardInterrupt):
        train_by(script)
    assert script.seen == [("asks", 3, None)]
