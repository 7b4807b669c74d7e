"""Where a trainer's batches come from: fetched when needed, or ahead by loader processes."""

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
from ps.model.randomness import loading_seed, seed_process
from ps.protocol import Train
from ps.workload import Samples, fetch

Batch = tuple[Tensor, Tensor]
_MicroBatch = tuple[int, int, int]
"""Epoch, batch, and which micro-batch of it."""


class Loader:
    """Fetches the micro-batches of orders. What a data set draws depends on the micro-batch alone,
    and not on which process fetches it."""

    def __init__(self, samples: Samples, passes: Passes, num_processes: int = 0) -> None:
        """Starts num_processes processes, which load ahead what expect() names.

        They are forks of this one, so that any data set works, and end with it.
        """
        self._samples = samples
        self._passes = passes
        self._ahead: dict[_MicroBatch, Future[bytes]] = {}
        self._pool: ProcessPoolExecutor | None = None
        if num_processes:
            self._pool = ProcessPoolExecutor(
                num_processes,
                multiprocessing.get_context("fork"),
                initializer=_become_loader_process,
                initargs=(samples, passes.seed, os.getpid()),
            )
            self._pool.submit(os.getpid).result()  # forks all now, while there are few threads

    def expect(self, order: Train, prefetch: Sequence[Train] = ()) -> None:
        """Start loading prefetch, and drop what was expected before but is not in `order`."""
        if self._pool is None:
            return
        known, self._ahead = self._ahead, {}
        for key, _ in self._micro_batches(order):
            if key in known:
                self._ahead[key] = known.pop(key)
        for following in prefetch:
            for key, indices in self._micro_batches(following):
                loading = known.pop(key) if key in known else self._pool.submit(_load, key, indices)
                self._ahead[key] = loading
        for unexpected in known.values():
            unexpected.cancel()

    def _micro_batches(self, order: Train) -> list[tuple[_MicroBatch, Sequence[int]]]:
        micro_batches = self._passes.micro_batches(order.indices)
        return [((order.epoch, order.batch, n), each) for n, each in enumerate(micro_batches)]

    def batch(self, order: Train, micro_batch: int, indices: Sequence[int]) -> Batch:
        """The inputs and targets of one micro-batch, with the samples as their first dimension,
        as the data set gives them. On the CPU. Blocks until they are loaded.

        Seeds this process's generators, unless a loader process has loaded it already.
        Raises what the data set raises, in this process or in the loader process.
        """
        key = (order.epoch, order.batch, micro_batch)
        loading = self._ahead.pop(key, None)
        if loading is None:
            return _fetch(self._samples, self._passes.seed, key, indices)
        batch: Batch = decode(loading.result())
        return batch

    def close(self) -> None:
        """End the loader processes. Blocks until what they are loading is done."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _fetch(samples: Samples, seed: int, key: _MicroBatch, indices: Sequence[int]) -> Batch:
    seed_process(loading_seed(seed, *key))
    return fetch(samples, indices)


# What a loader process loads from: data sets need not be picklable.
_source: tuple[Samples, int] | None = None


def _become_loader_process(samples: Samples, seed: int, parent: int) -> None:
    global _source
    signals.restore_defaults()
    if sys.platform == "linux":
        os.setpgid(0, 0)  # torchrun's signals reach the whole group; these end with their parent
    libc.end_with_parent(parent)
    torch.set_num_threads(1)
    _source = (samples, seed)


def _load(key: _MicroBatch, indices: Sequence[int]) -> bytes:
    """As bytes: torch's own way between processes needs /dev/shm, which is small in containers."""
    assert _source is not None
    return encode(_fetch(*_source, key, indices))
