"""The server: what it answers to trainers, and how the job ends. All state is behind one lock."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor
from torch.futures import Future

from ps.host.health import Activity, Finding, Mark
from ps.model.gradients import mean_gradients
from ps.model.store import Store
from ps.protocol import Evaluate, Evaluated, Finished, Order, Result, Train, Trained, Wait
from ps.server.compute import Compute, Contribution, OnServer
from ps.server.metrics import Metrics
from ps.server.orders import Orders
from ps.server.pacing import Pacing
from ps.settings.errors import PeerLost, TrainingFailed
from ps.settings.log import log
from ps.settings.topology import SERVER_RANK

Answer = tuple[Future[Order], Order]


def _facts(order: Train | Evaluate) -> dict[str, object]:
    """For the report: what is needed to do the order alone."""
    if isinstance(order, Evaluate):
        return {"epoch": order.epoch + 1, "slice": order.slice}
    return {"epoch": order.epoch + 1, "batch": order.batch, "samples": list(order.indices)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job ended. cause is None when it is done."""

    status: Literal["done", "failed", "interrupted"]
    exit_code: int = 0
    cause: str | None = None
    rank: int = SERVER_RANK
    """Who holds the cause."""
    rank_ends: bool = False
    """Whether that rank fails by itself, so that torchrun names it if this one waits."""


class ParameterServer:
    """Answers the trainers' calls (see protocol.Service), from any number of threads.

    Nothing here waits: a trainer that must wait holds a future, and no thread.
    """

    def __init__(
        self,
        store: Store,
        orders: Orders,
        metrics: Metrics,
        compute: Compute,
        *,
        trainers: Iterable[int],
        max_lag: int | None = None,
        lookahead: int = 0,
        skip_nonfinite: bool = False,
    ) -> None:
        """lookahead is how many orders a trainer is told in advance, for loading their data.

        skip_nonfinite: what is not finite leaves its order out, instead of ending the job.
        """
        self.ended = threading.Event()
        self.after_update: Callable[[int], None] = lambda version: None
        """Called with each new version, under the lock."""
        self.explain: Callable[[int], Finding | None] = lambda trainer: None
        """Why a trainer's connection has closed, if that is known. May block for a moment."""
        self._lock = store.lock
        self._compute = compute
        self._store = store  # under _lock, as all that follow
        self._orders = orders
        self._metrics = metrics
        self._present = set(trainers)
        self._pacing = Pacing(self._present, max_lag)
        self._round: dict[int, tuple[Trained, Contribution]] = {}
        self._waiting: dict[int, tuple[float, Future[Order]]] = {}
        self._outcome: Outcome | None = None
        self._situation: dict[str, object] = {}
        self._consequences: list[str] = []
        self._abandoned: set[int] = set()
        """Trainers that are not waited for."""
        self._lookahead = lookahead
        self._skip_nonfinite = skip_nonfinite
        self._evaluated = orders.evaluating
        """The newest epoch whose evaluation was opened."""
        self._progress: dict[int, Mark] = {}  # each written by its trainer's calls alone

    @property
    def all_left(self) -> bool:
        """Whether all have said goodbye, and none was lost."""
        return not self._present and not self._abandoned

    @property
    def outcome(self) -> Outcome | None:
        return self._outcome

    def progress(self) -> dict[int, Mark]:
        """See monitors.MonitoredServer."""
        return {t: made for t, made in dict(self._progress).items() if t in self._present}

    def arrived(self) -> None:
        """All trainers are there: from now on each is expected to make progress."""
        for trainer in tuple(self._present):
            self._does(trainer, Activity.WORKING)

    def circumstances(self) -> dict[str, object]:
        """What the rank with the cause was doing, and what went wrong later, in plain values."""
        return {**self._situation, "consequences": list(self._consequences)}

    def result(self) -> tuple[Outcome, dict[str, object]]:
        """How the job ended, and its numbers as report.json holds them. Only once it has."""
        with self._lock:
            assert self._outcome is not None
            return self._outcome, self._metrics.report(time.monotonic())

    def state(self) -> dict[str, dict[str, Any]]:
        """A copy of all that a job goes on from: what was applied is in it, and nothing else.

        Training stands still for as long as it takes. Of a job that has ended it is no copy, as
        nothing is applied any more.

        Raises:
            TrainingFailed: see Store.state.
        """
        with self._lock:
            return {
                "store": self._store.state(copy=self._outcome is None),
                "orders": self._orders.state(),
                "metrics": self._metrics.state(time.monotonic()),
            }

    def join(self, trainer: int, layout: str | None) -> None:
        """See protocol.Calls."""
        self._compute.check_layout(trainer, layout)
        self._does(trainer, Activity.WORKING)

    def next_order(self, trainer: int, result: Result | None) -> Future[Order]:
        """Take the finished order in; the future gives the next one.

        What is left of backward runs here, in the caller's thread, beside that of others.
        """
        self._does(trainer, Activity.SERVED)
        reply: Future[Order] = Future()
        lines: list[str | None] = []
        contribution = self._contribution(trainer, result) if isinstance(result, Trained) else None
        with self._lock:
            now = time.monotonic()
            if result is not None and self._outcome is None:
                lines.append(self._take(trainer, result, contribution, now))
                lines.append(self._metrics.progress(now))
            self._does(trainer, Activity.WAITING, now)
            self._waiting[trainer] = (now, reply)
            answers = self._answers(now)
        self._send(answers, lines)
        return reply

    def forward(self, trainer: int, epoch: int, batch: int, inputs: Tensor) -> Tensor:
        """See protocol.Calls. Runs in the caller's thread, beside those of other trainers."""
        self._does(trainer, Activity.SERVED)
        outputs = self._on_server.forward(trainer, epoch, batch, inputs)
        self._does(trainer, Activity.WORKING)
        return outputs

    def backward(self, trainer: int, output_gradient: Tensor) -> None:
        """See protocol.Calls. As forward."""
        self._does(trainer, Activity.SERVED)
        self._on_server.backward(trainer, output_gradient)
        self._does(trainer, Activity.WORKING)

    def evaluate(self, trainer: int, inputs: Tensor) -> Tensor:
        """See protocol.Calls. The weights stay as they are while an evaluation is open."""
        self._does(trainer, Activity.SERVED)
        outputs = self._on_server.evaluate(trainer, inputs)
        self._does(trainer, Activity.WORKING)
        return outputs

    def leave(self, trainer: int) -> None:
        """See protocol.Calls."""
        self._depart(trainer)

    def fail(self, trainer: int, cause: str, exit_code: int) -> None:
        """See protocol.Calls. The others are told to leave when they ask for their next order."""
        cause = f"trainer rank {trainer}: {cause}"
        self._depart(trainer, Outcome("failed", exit_code, cause, trainer, rank_ends=True))

    def broke(self, cause: str, exit_code: int) -> None:
        """See protocol.Service."""
        self.stop(Outcome("failed", exit_code, f"server rank {SERVER_RANK}: {cause}"))

    def lost(self, trainer: int, how: str) -> None:
        """See protocol.Service."""
        gone = Finding(trainer, how, PeerLost.exit_code, is_gone=True)
        if trainer in self._present:
            reason = self.explain(trainer) or gone
            self.report(reason)
            if reason.rank != trainer:
                self.report(gone)

    def report(self, finding: Finding) -> None:
        """See monitors.MonitoredServer."""
        rank, cause = finding.rank, finding.cause
        if not finding.exit_code:
            log.warning("%s", cause)
        elif finding.is_gone:
            if rank in self._present:  # else it has left, or has told why
                seen = not finding.is_quiet
                outcome = Outcome("failed", finding.exit_code, cause, rank, rank_ends=seen)
                self._depart(rank, outcome, abandoned=True)
        else:
            self.stop(Outcome("failed", finding.exit_code, cause, rank), abandoned={rank})

    def stop(self, outcome: Outcome, abandoned: Iterable[int] = ()) -> None:
        """End the job, unless it has ended; nothing more is applied, and trainers are sent home.

        Those who are abandoned are not waited for.
        """
        with self._lock:
            self._abandoned.update(abandoned)
            self._end(outcome)
            self._see_if_over()
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

    @property
    def _on_server(self) -> OnServer:
        assert isinstance(self._compute, OnServer), "the trainers compute"
        return self._compute

    def _contribution(self, trainer: int, result: Trained) -> Contribution | TrainingFailed:
        """An error where it must not reach the weights."""
        contribution = self._compute.contribution(trainer, result)
        try:
            if not math.isfinite(result.loss):
                raise TrainingFailed(f"the loss is {result.loss}")
            self._store.check(contribution.gradients, contribution.blocks)
        except TrainingFailed as error:
            return error
        return contribution

    def _take(
        self,
        trainer: int,
        result: Result,
        contribution: Contribution | TrainingFailed | None,
        now: float,
    ) -> str | None:
        self._orders.check(trainer, result)
        if isinstance(result, Evaluated):
            self._orders.finish(trainer, result)
            return self._metrics.evaluated(result)
        assert contribution is not None
        if isinstance(contribution, TrainingFailed) and not self._skip_nonfinite:
            where = f"trainer rank {trainer}, epoch {result.epoch + 1}, batch {result.batch}"
            self._end(
                Outcome("failed", contribution.exit_code, f"{where}: {contribution}", trainer)
            )
            return None
        self._pacing.finish(trainer)
        self._metrics.handed_in(trainer, now)
        if isinstance(contribution, TrainingFailed):
            self._skip(trainer, result, str(contribution))
        else:
            self._round[trainer] = (result, contribution)
        self._apply()
        return None

    def _skip(self, trainer: int, result: Trained, cause: str) -> None:
        order = self._orders.held_by(trainer)
        assert isinstance(order, Train)
        line = self._metrics.skipped(trainer, order, self._store.version, cause)
        self._orders.finish(trainer, result)
        if line:
            log.warning("%s", line)

    def _apply(self) -> None:
        """Make an update of what was handed in, unless more is still to come for it."""
        if self._round and not self._pacing.round_is_open:
            members = sorted(self._round.items())
            self._round = {}
            gradients = mean_gradients([(c.gradients, r.samples) for _, (r, c) in members])
            version = self._store.version
            self._store.apply(gradients)
            self._store.take_buffers(members[0][1][1].buffers)
            self._metrics.updated()
            for trainer, (result, contribution) in members:
                self._metrics.trained(trainer, result, version - contribution.version)
                self._orders.finish(trainer, result)
            self.after_update(self._store.version)
        if self._orders.evaluating != self._evaluated:
            self._evaluated = self._orders.evaluating
            self._end_epoch()

    def _end_epoch(self) -> None:
        assert self._evaluated is not None
        if math.isnan(self._metrics.train_loss(self._evaluated)):  # no sample was trained on
            cause = "no order of the epoch gave a loss and gradients that are finite"
            self._end(Outcome("failed", TrainingFailed.exit_code, cause))
        self._compute.open_evaluation()
        self._warn_of_untrained()

    def _warn_of_untrained(self) -> None:
        names, self._store.untrained = sorted(self._store.untrained), set()
        if names:
            log.warning("no gradient has reached %s in this epoch", ", ".join(names))

    def _answers(self, now: float) -> list[Answer]:
        """Orders for those who wait: slices first, then batches as the pacing allows."""
        orders: dict[int, Order] = {}
        over = self._outcome is not None or self._orders.finished
        for trainer in self._waiting:
            if first := Finished() if over else self._orders.take_slice(trainer):
                orders[trainer] = first
        for trainer in self._pacing.ready(self._waiting.keys()) if not orders else ():
            if not (batch := self._orders.take_batch(trainer)):
                break
            orders[trainer] = batch
            self._pacing.start(trainer)
            self._metrics.handed_out(trainer, now)
        if self._lookahead:
            self._tell_ahead(orders)
        for trainer in orders:
            self._does(trainer, Activity.WORKING, now)
        return [(self._waiting.pop(t)[1], self._complete(t, o)) for t, o in orders.items()]

    def _tell_ahead(self, orders: dict[int, Order]) -> None:
        training = {t: order for t, order in orders.items() if isinstance(order, Train)}
        promised = self._orders.promise(tuple(training), self._lookahead)
        for trainer, order in training.items():
            orders[trainer] = replace(order, ahead=promised[trainer])

    def _complete(self, trainer: int, order: Order) -> Order:
        if isinstance(order, Train | Evaluate):
            return self._compute.hand_out(trainer, order)
        return order

    def _depart(
        self, trainer: int, outcome: Outcome | None = None, *, abandoned: bool = False
    ) -> None:
        with self._lock:
            now = time.monotonic()
            if outcome is not None and trainer in self._present:  # or another thread was first
                if abandoned:
                    self._abandoned.add(trainer)
                self._end(outcome)
            self._present.discard(trainer)
            self._forget(trainer, now)
            self._see_if_over()
            answers = self._answers(now)
        self._send(answers)

    def _see_if_over(self) -> None:
        if not self._present:
            if not self._orders.finished and self._outcome is None:
                self._end(Outcome("failed", 4, "all trainers left before the work was done"))
            self._end(Outcome("done"))
        if not self._present - self._abandoned:
            self.ended.set()

    def _forget(self, trainer: int, now: float) -> None:
        """What the trainer held, or had handed in for a round that is open, is to be done again."""
        self._waiting.pop(trainer, None)
        if self._round.pop(trainer, None) is None and isinstance(
            self._orders.held_by(trainer), Train
        ):
            self._metrics.handed_in(trainer, now)
        self._orders.leave(trainer)
        self._pacing.leave(trainer)
        if self._outcome is None:
            self._apply()

    def _end(self, outcome: Outcome) -> None:
        """The first outcome is the cause; what follows from it changes nothing."""
        if self._outcome is None:
            self._outcome = outcome
            self._situation = self._situation_of(outcome.rank)
        elif outcome.cause is not None:
            self._consequences.append(outcome.cause)

    def _situation_of(self, rank: int) -> dict[str, object]:
        order, made = self._orders.held_by(rank), self._progress.get(rank)
        return {
            "last_order": order and _facts(order),
            "doing": made.activity.value if made else None,
            "since_s": time.monotonic() - made.since if made else None,
        }

    def _does(self, trainer: int, activity: Activity, now: float | None = None) -> None:
        self._progress[trainer] = Mark(activity, time.monotonic() if now is None else now)

    @staticmethod
    def _send(answers: Sequence[Answer], lines: Sequence[str | None] = ()) -> None:
        """Without the lock: setting a result runs whatever waits for it."""
        for line in lines:
            if line:
                log.info("%s", line)
        for reply, order in answers:
            reply.set_result(order)
