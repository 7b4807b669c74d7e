"""Which results make the next update, and when it is due."""

from __future__ import annotations

import pytest

from ps.server.rounds import Rounds


def begun(max_lag: int | None, *trainers: int) -> Rounds[str]:
    """All have started an order."""
    rounds: Rounds[str] = Rounds(trainers, max_lag)
    for trainer in trainers:
        rounds.start(trainer)
    return rounds


@pytest.mark.parametrize("max_lag", [None, 1, 4])
def test_without_rounds_each_result_is_an_update(max_lag: int | None) -> None:
    rounds = begun(max_lag, 1, 2)
    assert rounds.take_due() == []
    for trainer in (2, 1):
        rounds.finish(trainer, f"of {trainer}")
        assert rounds.take_due() == [(trainer, f"of {trainer}")]
        assert rounds.take_due() == []


def test_a_round_is_due_when_all_are_in_and_in_the_order_of_the_trainers() -> None:
    rounds = begun(0, 1, 2, 3)
    for trainer in (3, 1):
        rounds.finish(trainer, f"of {trainer}")
        assert rounds.take_due() == []
    rounds.finish(2, "of 2")
    assert rounds.take_due() == [(1, "of 1"), (2, "of 2"), (3, "of 3")]
    assert rounds.take_due() == []


def test_what_is_left_out_keeps_nobody_waiting() -> None:
    rounds = begun(0, 1, 2)
    rounds.finish(1, "of 1")
    rounds.finish(2, None)
    assert rounds.take_due() == [(1, "of 1")]


def test_a_round_of_which_all_is_left_out_is_no_update() -> None:
    rounds = begun(0, 1, 2)
    for trainer in (1, 2):
        rounds.finish(trainer, None)
        assert rounds.take_due() == []
    assert rounds.ready([2, 1]) == [1, 2]


def test_who_leaves_withdraws_what_it_returned_and_is_waited_for_no_more() -> None:
    rounds = begun(0, 1, 2, 3)
    for trainer in (2, 3):
        rounds.finish(trainer, f"of {trainer}")
    assert rounds.leave(3) is True
    assert rounds.take_due() == []
    assert rounds.leave(1) is False
    assert rounds.take_due() == [(2, "of 2")]
    assert rounds.leave(2) is False


def test_who_may_start_is_as_the_pacing_says() -> None:
    rounds = begun(1, 1, 2)
    rounds.finish(1, "of 1")
    assert rounds.ready([1]) == [1]
    rounds.start(1)
    rounds.finish(1, "of 1")
    assert rounds.ready([1]) == []
    rounds.leave(2)
    assert rounds.ready([1]) == [1]
