"""The order of the samples: made by whoever asks before the job has started, and ahead later."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from ps.model.randomness import permutation
from ps.server.shuffler import Shuffler
from tests.helpers import until

BOUND_S = 10.0


class Maker:
    """Makes a permutation when it is let; knows who asked."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self.may: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self.waits = False

    def __call__(self, seed: int, epoch: int, num_samples: int) -> Sequence[int]:
        self.asked.put((epoch, threading.current_thread().name))
        if self.waits and (error := self.may.get()) is not None:
            raise error
        return permutation(seed, epoch, num_samples)

    def next_asked(self) -> tuple[int, str]:
        return self.asked.get(timeout=BOUND_S)


@pytest.fixture
def maker() -> Iterator[Maker]:
    maker = Maker()
    yield maker
    for _ in range(9):
        maker.may.put(None)


def nothing() -> None:
    pass


def soon(shuffler: Shuffler, epoch: int) -> list[int]:
    """Its permutation once it is there."""
    found: list[Sequence[int]] = []

    def is_there() -> bool:
        made = shuffler(epoch)
        found.extend([] if made is None else [made])
        return made is not None

    until(is_there, BOUND_S)
    return list(found[0])


def test_before_the_start_a_permutation_is_made_where_it_is_asked_for(maker: Maker) -> None:
    shuffler = Shuffler(3, 20, 2, make=maker)
    for epoch in (0, 5, 0):
        made = shuffler(epoch)
        assert made is not None and list(made) == list(permutation(3, epoch, 20))
        assert maker.next_asked() == (epoch, threading.current_thread().name)
    assert maker.asked.empty()


@pytest.mark.parametrize("given", [[], [0], [0, 4]])
def test_after_it_the_epoch_after_the_newest_is_made_ahead_once_in_another_thread(
    maker: Maker, given: list[int]
) -> None:
    shuffler = Shuffler(3, 20, 9, make=maker)
    for epoch in given:
        shuffler(epoch)
        maker.next_asked()
    maker.waits = True
    made = threading.Semaphore(0)
    shuffler.start(made.release)
    for epoch in range(given[-1] + 1 if given else 0, 9):
        assert maker.next_asked() == (epoch, "shuffle")
        assert (shuffler(epoch), shuffler(epoch)) == (None, None)
        assert not made.acquire(blocking=False)
        maker.may.put(None)
        assert made.acquire(timeout=BOUND_S)
        assert maker.asked.empty()
        assert soon(shuffler, epoch) == list(permutation(3, epoch, 20))
    assert maker.asked.empty()


def test_what_fails_in_the_thread_is_raised_where_it_is_asked_for(maker: Maker) -> None:
    shuffler = Shuffler(3, 20, 2, make=maker)
    maker.waits = True
    shuffler.start(nothing)
    maker.may.put(MemoryError("too many samples"))
    with pytest.raises(MemoryError, match="too many samples"):
        soon(shuffler, 0)


def test_where_nothing_is_said_it_is_the_permutation_of_the_job() -> None:
    made: Callable[[int], Sequence[int] | None] = Shuffler(5, 30, 1)
    assert list(made(0) or ()) == list(permutation(5, 0, 30))
