"""The server: what it answers to trainers, and how the job ends. All state is behind one lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.futures import Future

from ps.errors import TrainingFailed
from ps.log import log
from ps.metrics import Metrics
from ps.orders import Orders
from ps.protocol import Evaluate, Evaluated, Finished, Order, Result, Train, Trained, Wait
from ps.randomness import SeededForward, step_seed
from ps.store import Store
from ps.topology import SERVER_RANK

Answer = tuple[Future[Order], Order]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job ended. cause is None when it is done."""

    status: Literal["done", "failed", "interrupted"]
    exit_code: int = 0
    cause: str | None = None
    rank: int = SERVER_RANK
    """Who holds the cause, and so exits first."""


class ParameterServer:
    """Answers the trainers' calls (see protocol.Service), from any number of threads.

    Nothing here waits: a trainer that must wait holds a future, and no thread.
    """

    def __init__(
        self,
        store: Store,
        orders: Orders,
        metrics: Metrics,
        *,
        trainers: Iterable[int],
        seed: int,
        input_device: torch.device | str = "cpu",
    ) -> None:
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._store = store  # under _lock, as _orders to _outcome
        self._orders = orders
        self._metrics = metrics
        # Each trainer's own: only its calls, one at a time, touch its replica and its outputs.
        self._replicas = {trainer: store.replica() for trainer in trainers}
        self._outputs: dict[int, Tensor] = {}
        self._present = set(self._replicas)
        self._waiting: dict[int, tuple[float, Future[Order]]] = {}
        self._outcome: Outcome | None = None
        self._evaluation = store.replica()
        self._evaluation.module.eval()
        self._seed = seed
        self._input_device = input_device

    @property
    def all_left(self) -> bool:
        return not self._present

    @property
    def outcome(self) -> Outcome | None:
        return self._outcome

    def result(self) -> tuple[Outcome, dict[str, object]]:
        """How the job ended, and its numbers as report.json holds them. Only once it has."""
        with self._lock:
            assert self._outcome is not None
            return self._outcome, self._metrics.report(time.monotonic())

    def next_order(self, trainer: int, result: Result | None) -> Future[Order]:
        """Take the finished order in; the future gives the next one.

        Backward runs here, in the caller's thread, beside those of other trainers.
        """
        reply: Future[Order] = Future()
        lines: list[str | None] = []
        gradients = self._backward(trainer, result) if isinstance(result, Trained) else []
        with self._lock:
            now = time.monotonic()
            if result is not None and self._outcome is None:
                lines.append(self._take(trainer, result, gradients, now))
                lines.append(self._metrics.progress(now))
            self._waiting[trainer] = (now, reply)
            answers = self._answers(now)
        self._send(answers, lines)
        return reply

    def forward(self, trainer: int, epoch: int, batch: int, inputs: Tensor) -> Tensor:
        """See protocol.Calls. Runs in the caller's thread, beside those of other trainers."""
        replica = self._replicas[trainer]
        with self._lock:
            self._store.refresh(replica)
        with SeededForward(step_seed(self._seed, epoch, batch)):
            outputs: Tensor = replica.module(inputs.to(self._input_device))
        self._outputs[trainer] = outputs
        return outputs.detach().to("cpu")

    def evaluate(self, trainer: int, inputs: Tensor) -> Tensor:
        """See protocol.Calls. The weights stay as they are while an evaluation is open."""
        with torch.inference_mode():
            outputs: Tensor = self._evaluation.module(inputs.to(self._input_device))
            return outputs.to("cpu")

    def leave(self, trainer: int) -> None:
        """See protocol.Calls."""
        self._depart(trainer)

    def fail(self, trainer: int, cause: str, exit_code: int) -> None:
        """See protocol.Calls. The others are told to leave when they ask for their next order."""
        cause = f"trainer rank {trainer}: {cause}"
        self._depart(trainer, Outcome("failed", exit_code, cause, rank=trainer))

    def stop(self, outcome: Outcome) -> None:
        """End the job, unless it has ended; nothing more is applied, and trainers are sent home."""
        with self._lock:
            self._end(outcome)
            answers = self._answers(time.monotonic())
        self._send(answers)

    def tick(self, max_wait_s: float) -> None:
        """Once in a while: print progress, and send Wait to those who wait for max_wait_s.

        So no call of a trainer times out while there is nothing to do for it.
        """
        with self._lock:
            now = time.monotonic()
            line = self._metrics.progress(now)
            late = [t for t, (since, _) in self._waiting.items() if now - since > max_wait_s]
            answers: list[Answer] = [(self._waiting.pop(t)[1], Wait()) for t in late]
        self._send(answers, [line])

    def _backward(self, trainer: int, result: Trained) -> list[Tensor | None]:
        """The gradients of the trainer's replica, in the order of Store.names."""
        assert trainer in self._outputs, f"trainer {trainer} hands in a batch without forward"
        outputs = self._outputs.pop(trainer)
        outputs.backward(result.output_gradient.to(outputs.device))
        parameters = self._replicas[trainer].parameters
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return gradients

    def _take(
        self, trainer: int, result: Result, gradients: Sequence[Tensor | None], now: float
    ) -> str | None:
        self._orders.check(trainer, result)
        line = None
        if isinstance(result, Evaluated):
            line = self._metrics.evaluated(result)
        elif not self._apply(trainer, result, gradients, now):
            return None
        evaluating = self._orders.evaluating
        self._orders.finish(trainer, result)
        if self._orders.evaluating != evaluating:
            self._store.refresh(self._evaluation)
        return line

    def _apply(
        self, trainer: int, result: Trained, gradients: Sequence[Tensor | None], now: float
    ) -> bool:
        replica = self._replicas[trainer]
        staleness = self._store.version - replica.version
        try:
            self._store.apply(gradients)
        except TrainingFailed as error:
            where = f"trainer rank {trainer}, epoch {result.epoch + 1}, batch {result.batch}"
            self._end(Outcome("failed", error.exit_code, f"{where}: {error}"))
            return False
        self._store.take_buffers(replica)
        self._metrics.trained(result, staleness)
        self._metrics.taken_back(now)
        return True

    def _answers(self, now: float) -> list[Answer]:
        """Orders for those who wait, first come first served."""
        answers: list[Answer] = []
        for trainer in list(self._waiting):
            order = self._next(trainer)
            if order is not None:
                answers.append((self._waiting.pop(trainer)[1], order))
            if isinstance(order, Train):
                self._metrics.handed_out(now)
        return answers

    def _next(self, trainer: int) -> Train | Evaluate | Finished | None:
        if self._outcome is not None or self._orders.finished:
            return Finished()
        return self._orders.take(trainer)

    def _depart(self, trainer: int, outcome: Outcome | None = None) -> None:
        with self._lock:
            self._present.discard(trainer)
            if outcome is not None:
                self._end(outcome)
            answers = self._return_order(trainer)
            if not self._present:
                if not self._orders.finished:
                    self._end(Outcome("failed", 4, "all trainers left before the work was done"))
                self._end(Outcome("done"))
                self.ended.set()
        self._send(answers)

    def _return_order(self, trainer: int) -> list[Answer]:
        now = time.monotonic()
        if isinstance(self._orders.held_by(trainer), Train):
            self._metrics.taken_back(now)
        self._orders.leave(trainer)
        return self._answers(now)

    def _end(self, outcome: Outcome) -> None:
        """The first outcome is the cause; what follows from it changes nothing."""
        if self._outcome is None:
            self._outcome = outcome

    @staticmethod
    def _send(answers: Sequence[Answer], lines: Sequence[str | None] = ()) -> None:
        """Without the lock: setting a result runs whatever waits for it."""
        for line in lines:
            if line:
                log.info("%s", line)
        for reply, order in answers:
            reply.set_result(order)
