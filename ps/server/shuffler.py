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

    def __init__(
        self,
        seed: int,
        num_samples: int,
        num_epochs: int,
        *,
        make: Callable[[int, int, int], Sequence[int]] = permutation,
    ) -> None:
        """make(seed, epoch, num_samples) makes a permutation."""
        self._seed = seed
        self._num_samples = num_samples
        self._num_epochs = num_epochs
        self._make = make
        self._lock = threading.Lock()
        self._made: dict[int, Sequence[int]] = {}  # under _lock, as all that follow
        self._wanted = 0
        """The epoch that is asked for next."""
        self._asked: set[int] = set()
        self._to_make: queue.SimpleQueue[int] | None = None
        self._error: Exception | None = None

    def start(self, on_made: Callable[[], None]) -> None:
        """From now on permutations are made in a thread, the next epoch's ahead.

        on_made is called in that thread after each, so that whoever waits for one can go on.
        """
        to_make: queue.SimpleQueue[int] = queue.SimpleQueue()
        with self._lock:
            self._to_make = to_make
            self._ask()
        arguments = (to_make, on_made)
        threading.Thread(target=self._serve, args=arguments, name="shuffle", daemon=True).start()

    def __call__(self, epoch: int) -> Sequence[int] | None:
        """None while it is being made. Before start() it is made here, which blocks.

        Raises what was raised where it was made.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            found = self._made.pop(epoch, None)
            if found is None and self._to_make is None:
                found = self._make(self._seed, epoch, self._num_samples)
            self._wanted = epoch if found is None else epoch + 1
            self._ask()
        return found

    def _ask(self) -> None:
        epoch = self._wanted
        if self._to_make is not None and epoch < self._num_epochs and epoch not in self._asked:
            self._asked.add(epoch)
            self._to_make.put(epoch)

    def _serve(self, to_make: queue.SimpleQueue[int], on_made: Callable[[], None]) -> None:
        while self._error is None:
            epoch = to_make.get()
            try:
                made = self._make(self._seed, epoch, self._num_samples)
            except Exception as error:  # for whoever asks next: here it would end this thread alone
                self._error = error
            else:
                with self._lock:
                    self._made[epoch] = made
                on_made()
