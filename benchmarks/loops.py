"""The yardstick: unconnected single-process loops of the same net on the same data."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.synchronize import Barrier
from typing import Any


def rate_of_loops(num: int, steps: int, *, tuned: bool, threads: int = 1) -> float:
    """Samples per second of `num` loops side by side, each of `steps` steps of batch 32.

    tuned applies the allocator settings that launch.py applies.
    """
    context = multiprocessing.get_context("spawn")
    barrier, rates = context.Barrier(num), context.SimpleQueue()
    loops = [
        context.Process(target=_loop, args=(index, steps, tuned, threads, barrier, rates))
        for index in range(num)
    ]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()
        assert loop.exitcode == 0, f"a loop ended with {loop.exitcode}"
    return float(sum(rates.get() for _ in loops))


def _loop(index: int, steps: int, tuned: bool, threads: int, barrier: Barrier, rates: Any) -> None:
    import torch

    from ps import machine
    from ps.config import Config
    from ps.workload import fetch
    from ps.workloads import digits

    if tuned:
        machine.keep_freed_memory()
    torch.set_num_threads(threads)
    workload = digits.build(Config())
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    barrier.wait(timeout=60)
    start = time.perf_counter()
    for step in range(steps):
        first = (32 * step) % (len(workload.train) - 32)
        inputs, targets = fetch(workload.train, range(first, first + 32))
        loss = workload.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rates.put(32 * steps / (time.perf_counter() - start))
