"""A trainer's whole life: ask, work, report."""

from __future__ import annotations

from collections.abc import Callable

from ps.protocol import Assignment, Finished, Result, Server
from ps.trainer.worker import Worker


def train(
    trainer: int,
    server: Server,
    worker: Worker,
    *,
    check: Callable[[], None] = lambda: None,
    at_end: Callable[[], None] = lambda: None,
) -> None:
    """Work on orders until there are no more, then leave, after at_end(). Blocks.

    check is called before each order, and may raise to break off.
    """
    result: Result | None = None
    while not isinstance(reply := server.next_order(trainer, result), Finished):
        check()
        result = worker.do(reply) if isinstance(reply, Assignment) else None
    at_end()
    server.leave(trainer)
