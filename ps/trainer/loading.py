"""Where a trainer's batches come from: fetched when needed, or ahead by processes of its own."""

from __future__ import annotations

import multiprocessing  # noqa: TID251
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor  # noqa: TID251

import torch
from torch import Tensor

from ps.host import libc, signals
from ps.model.packing import decode, encode
from ps.model.passes import Passes
from ps.model.randomness import seed_process, step_seed
from ps.protocol import Train
from ps.workload import Samples, fetch

Batch = tuple[Tensor, Tensor]
_Part = tuple[int, int, int]
"""Epoch, batch, and part of it."""


class Loader:
    """Fetches the parts of orders. What a data set draws at random depends on the part alone."""

    def __init__(self, samples: Samples, passes: Passes, num_workers: int = 0) -> None:
        """Starts num_workers processes, which load ahead what expect() tells.

        They are forks of this one, so that any data set works, and end with it.
        """
        self._samples = samples
        self._passes = passes
        self._ahead: dict[_Part, Future[bytes]] = {}
        self._pool: ProcessPoolExecutor | None = None
        if num_workers:
            self._pool = ProcessPoolExecutor(
                num_workers,
                multiprocessing.get_context("fork"),
                initializer=_become_worker,
                initargs=(samples, passes.seed, os.getpid()),
            )
            self._pool.submit(os.getpid).result()  # forks all now, while there are few threads

    def expect(self, order: Train, following: Sequence[Train] = ()) -> None:
        """Load ahead what follows this order, and nothing else any more but the order itself."""
        if self._pool is None:
            return
        known, self._ahead = self._ahead, {}
        for key, _ in self._keys(order):
            if key in known:
                self._ahead[key] = known.pop(key)
        for key, indices in (item for later in following for item in self._keys(later)):
            loading = known.pop(key) if key in known else self._pool.submit(_load, key, indices)
            self._ahead[key] = loading
        for unexpected in known.values():
            unexpected.cancel()

    def _keys(self, order: Train) -> list[tuple[_Part, Sequence[int]]]:
        parts = self._passes.parts(order.indices)
        return [((order.epoch, order.batch, part), parts[part]) for part in range(len(parts))]

    def batch(self, order: Train, part: int, indices: Sequence[int]) -> Batch:
        """Inputs and targets. Blocks until they are there."""
        loading = self._ahead.pop((order.epoch, order.batch, part), None)
        if loading is None:
            return _fetch(
                self._samples, self._passes.seed, (order.epoch, order.batch, part), indices
            )
        batch: Batch = decode(loading.result())
        return batch

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _fetch(samples: Samples, seed: int, part: _Part, indices: Sequence[int]) -> Batch:
    seed_process(step_seed(seed, *part))
    return fetch(samples, indices)


# What a worker process loads from: data sets need not be picklable.
_worker: tuple[Samples, int] | None = None


def _become_worker(samples: Samples, seed: int, parent: int) -> None:
    global _worker
    signals.restore_defaults()
    if sys.platform == "linux":
        os.setpgid(0, 0)  # torchrun's signals reach the whole group; these end with their parent
    libc.end_with_parent(parent)
    torch.set_num_threads(1)
    _worker = (samples, seed)


def _load(part: _Part, indices: Sequence[int]) -> bytes:
    """As bytes: torch's own way between processes needs /dev/shm, which is small in containers."""
    assert _worker is not None
    return encode(_fetch(*_worker, part, indices))
