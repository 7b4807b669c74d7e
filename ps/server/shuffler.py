"""The order of the samples of each epoch, made ahead in a thread.

It takes about a second for some millions of samples, which is too long under the server's lock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from ps.model.randomness import permutation


class Shuffler:
    """Gives the permutation of each epoch (see orders.PermutationOf). Thread-safe."""

    def __init__(self, seed: int, num_samples: int, num_epochs: int) -> None:
        self._seed = seed
        self._num_samples = num_samples
        self._num_epochs = num_epochs
        self._lock = threading.Lock()
        self._made: dict[int, Sequence[int]] = {}  # under _lock, as _asked
        self._asked: set[int] = set()
        self._next = 0
        self._to_make: queue.SimpleQueue[int] | None = None

    def start(self, on_made: Callable[[], None]) -> None:
        """From now on permutations are made in a thread, the next epoch's ahead.

        on_made is called in that thread after each, so that whoever waits for one can go on.
        """
        self._to_make = queue.SimpleQueue()
        threading.Thread(target=self._make, args=(on_made,), name="shuffle", daemon=True).start()
        with self._lock:
            self._ask_for(self._next)

    def __call__(self, epoch: int) -> Sequence[int] | None:
        """None while it is being made. Before start() it is made here, which blocks."""
        with self._lock:
            found = self._made.pop(epoch, None)
            if found is None and self._to_make is None:
                found = permutation(self._seed, epoch, self._num_samples)
            self._next = epoch + 1 if found is not None else epoch
            self._ask_for(self._next)
        return found

    def _ask_for(self, epoch: int) -> None:
        if self._to_make is not None and epoch < self._num_epochs and epoch not in self._asked:
            self._asked.add(epoch)
            self._to_make.put(epoch)

    def _make(self, on_made: Callable[[], None]) -> None:
        assert self._to_make is not None
        while True:
            epoch = self._to_make.get()
            made = permutation(self._seed, epoch, self._num_samples)
            with self._lock:
                self._made[epoch] = made
            on_made()
