"""Who is present, who waits, and what ended the job."""

from __future__ import annotations

import pytest

from ps.host.health import Activity, Mark
from ps.server.roll import Outcome, Roll

CAUSE = Outcome("failed", 5, "trainer rank 1: stopped", 1)


def roll_of(*trainers: int) -> Roll[str]:
    return Roll(trainers)


@pytest.mark.parametrize(
    ("left", "abandoned", "present", "all_left", "is_over"),
    [
        ([], [], [1, 2], False, False),
        ([2], [], [1], False, False),
        ([1, 2], [], [], True, True),
        ([1], [2], [2], False, True),
        ([1, 2], [2], [], False, True),
        ([], [1, 2], [1, 2], False, True),
        ([], [0], [1, 2], False, False),
        ([1, 2], [0], [], False, True),
    ],
)
def test_who_is_there_and_waited_for(
    left: list[int], abandoned: list[int], present: list[int], all_left: bool, is_over: bool
) -> None:
    roll = roll_of(1, 2)
    roll.abandon(abandoned)
    for trainer in left:
        roll.leave(trainer)
    assert (roll.present, roll.all_left, roll.is_over) == (present, all_left, is_over)
    assert [rank for rank in (0, 1, 2, 3) if roll.is_present(rank)] == present


def test_marks_are_those_of_the_present_and_the_newest() -> None:
    roll = roll_of(1, 2, 3)
    assert roll.marks() == {}
    roll.mark(1, Activity.WORKING, 1.0)
    roll.mark(2, Activity.WAITING, 2.0)
    roll.mark(1, Activity.SERVED, 3.0)
    assert roll.marks() == {1: Mark(Activity.SERVED, 3.0), 2: Mark(Activity.WAITING, 2.0)}
    roll.leave(2)
    assert roll.marks().keys() == {1}


def test_who_waits_is_served_in_the_order_they_came_and_once() -> None:
    roll = roll_of(1, 2, 3)
    assert roll.waiting() == []
    for trainer, since in ((3, 1.0), (1, 2.0), (2, 3.0)):
        roll.wait(trainer, f"to {trainer}", since)
    assert roll.waiting() == [3, 1, 2]
    assert roll.take_reply(1) == "to 1"
    assert roll.waiting() == [3, 2]
    with pytest.raises(AssertionError, match="trainer 1 does not wait"):
        roll.take_reply(1)
    roll.leave(3)
    assert roll.waiting() == [2]


@pytest.mark.parametrize(
    ("moment", "late"), [(0.5, []), (1.0, []), (1.5, [2]), (3.0, [2]), (3.5, [2, 1])]
)
def test_who_waits_since_before_a_moment(moment: float, late: list[int]) -> None:
    roll = roll_of(1, 2, 3)
    roll.wait(1, "to 1", 3.0)
    roll.wait(2, "to 2", 1.0)
    assert roll.waiting_since_before(moment) == late


def test_the_first_outcome_stays_the_cause_with_its_situation() -> None:
    roll = roll_of(1)
    assert (roll.outcome, roll.situation, roll.consequences) == (None, {}, [])
    roll.end(CAUSE, {"doing": "this"})
    roll.end(Outcome("interrupted", 143, "stopped by SIGTERM"), {"doing": "that"})
    assert (roll.outcome, roll.situation) == (CAUSE, {"doing": "this"})


def test_what_follows_is_a_consequence_once_and_the_cause_is_none_of_itself() -> None:
    roll = roll_of(1)
    for cause in (CAUSE.cause, CAUSE.cause, "late", None, "later", "late", CAUSE.cause):
        roll.end(Outcome("failed", 5, cause), {})
    roll.end(Outcome("done"), {})
    assert roll.consequences == ["late", "later"]


def test_an_outcome_that_says_nothing_more_is_the_servers_own_and_well() -> None:
    outcome = Outcome("done")
    assert (outcome.exit_code, outcome.cause, outcome.rank, outcome.rank_ends) == (
        0,
        None,
        0,
        False,
    )
