"""Permutations that are made ahead."""

from __future__ import annotations

from ps.model.randomness import permutation
from ps.server.shuffler import Shuffler
from tests.helpers import until

TIMEOUT_S = 10.0


def test_from_the_start_the_permutation_of_the_next_epoch_is_made_ahead_and_no_further() -> None:
    made: list[int] = []
    shuffler = Shuffler(seed=3, num_samples=10, num_epochs=5)
    assert shuffler(0) == permutation(3, 0, 10)
    assert shuffler(2) == permutation(3, 2, 10)  # of the run to go on from
    shuffler.start(lambda: made.append(1))
    for number in (1, 2):
        until(lambda: len(made) == number, TIMEOUT_S)  # noqa: B023
        assert shuffler(2 + number) == permutation(3, 2 + number, 10)
    assert shuffler(4) is None  # each is given once
    assert len(made) == 2
