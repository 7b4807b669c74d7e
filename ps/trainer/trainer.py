"""A trainer's whole life: ask, work, report."""

from __future__ import annotations

from collections.abc import Callable

from ps.protocol import Finished, Result, Server, Wait
from ps.trainer.worker import Worker


def train(
    trainer: int,
    server: Server,
    worker: Worker,
    at_end: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Work on orders until there are no more, then leave, after at_end().

    check is called between orders, and raises to end it.
    """
    result: Result | None = None
    while not isinstance(order := server.next_order(trainer, result), Finished):
        check()
        result = None if isinstance(order, Wait) else worker.do(order)
    at_end()
    server.leave(trainer)
