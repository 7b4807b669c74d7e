"""The server's calls: what it answers to trainers, and how the job ends. One lock, no waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.futures import Future

from ps.host.health import Activity, Finding, Mark
from ps.protocol import Evaluated, Finished, Reply, Result, Trained, Wait
from ps.server.compute import ServerCompute
from ps.server.roll import Outcome, Roll
from ps.server.training import Line, Training, facts_of
from ps.settings.errors import PeerLost, TrainingFailed
from ps.settings.log import log
from ps.settings.topology import SERVER_RANK, role_of

Answer = tuple[Future[Reply], Reply]


class ParameterServer:
    """Answers the trainers' calls (see protocol.Service), from any number of threads.

    Nothing here waits: a trainer that must wait holds a future, and no thread. Log lines are
    written and futures completed without the lock, as either may block or run other code.
    """

    def __init__(self, training: Training, trainers: Iterable[int]) -> None:
        self.ended = threading.Event()
        """Set when the job has ended and nobody is waited for any more."""
        self._training = training
        self._lock = training.state.lock
        self.roll: Roll[Future[Reply]] = Roll(trainers)  # written under _lock
        """Who takes part, and how the job ended: for others to read."""

    @property
    def outcome(self) -> Outcome | None:
        return self.roll.outcome

    def progress(self) -> dict[int, Mark]:
        """What each trainer that has not left is doing, and since when."""
        return self.roll.marks()

    def expect_progress(self) -> None:
        """All trainers are there: from now on each is expected to make progress."""
        for trainer in self.roll.present:
            self.roll.mark(trainer, Activity.WORKING, time.monotonic())

    def result(self) -> tuple[Outcome, dict[str, object]]:
        """How the job ended, and its numbers as report.json holds them. Only once it has."""
        with self._lock:
            assert self.roll.outcome is not None
            return self.roll.outcome, self._training.state.metrics.report(time.monotonic())

    def join(self, trainer: int, layout: str | None) -> None:
        """See protocol.Calls."""
        self._training.compute.check_layout(trainer, layout)
        self.roll.mark(trainer, Activity.WORKING, time.monotonic())

    def next_order(self, trainer: int, result: Result | None) -> Future[Reply]:
        """Take the finished order in; the future gives the next one.

        What is left of backward runs here, in the caller's thread, beside that of others.
        """
        self.roll.mark(trainer, Activity.SERVED, time.monotonic())
        reply: Future[Reply] = Future()
        contribution = None
        if isinstance(result, Trained):
            contribution = self._training.contribution(trainer, result)
        lines: list[Line] = []
        with self._lock:
            now = time.monotonic()
            if self.roll.outcome is None:
                with self._ending_at_failure():
                    if isinstance(result, Evaluated):
                        lines += self._training.take_evaluated(trainer, result)
                    elif result is not None and contribution is not None:
                        lines += self._training.take_trained(trainer, result, contribution, now)
                lines += self._training.progress_line(now)
            self.roll.mark(trainer, Activity.WAITING, now)
            self.roll.wait(trainer, reply, now)
            answers = self._answers(now)
        _send(answers, lines)
        return reply

    def forward(self, trainer: int, epoch: int, batch: int, inputs: Tensor) -> Tensor:
        """See protocol.Calls. Runs in the caller's thread, beside those of other trainers."""
        with self._serving(trainer) as compute:
            return compute.forward(trainer, epoch, batch, inputs)

    def backward(self, trainer: int, output_gradient: Tensor) -> None:
        """See protocol.Calls. As forward."""
        with self._serving(trainer) as compute:
            compute.backward(trainer, output_gradient)

    def evaluate(self, trainer: int, inputs: Tensor) -> Tensor:
        """See protocol.Calls. The weights stay as they are while an evaluation is open."""
        with self._serving(trainer) as compute:
            return compute.evaluate(trainer, inputs)

    def leave(self, trainer: int) -> None:
        """See protocol.Calls."""
        self._depart(trainer)

    def fail(self, trainer: int, cause: str, exit_code: int) -> None:
        """See protocol.Calls. The others are told to leave when they ask for their next order."""
        cause = f"{role_of(trainer)} rank {trainer}: {cause}"
        rank_ends = trainer != SERVER_RANK  # at world size 1 it is this one
        self._depart(trainer, Outcome("failed", exit_code, cause, trainer, rank_ends=rank_ends))

    def internal_error(self, cause: str, exit_code: int) -> None:
        """See protocol.Service."""
        self.stop(Outcome("failed", exit_code, f"server rank {SERVER_RANK}: {cause}"))

    def report(self, finding: Finding) -> None:
        """Take what was found about a rank: a warning, or what ends the job.

        That a trainer is gone is no news if it has left, or has told why.
        """
        rank, cause = finding.rank, finding.cause
        if not finding.exit_code:
            log.warning("%s", cause)
        elif finding.is_gone:
            seen = finding.is_seen_by_torchrun
            outcome = Outcome("failed", finding.exit_code, cause, rank, rank_ends=seen)
            if self.roll.is_present(rank):
                self._depart(rank, outcome, is_abandoned=True)
        else:
            self.stop(Outcome("failed", finding.exit_code, cause, rank), abandoned={rank})

    def stop(self, outcome: Outcome, abandoned: Iterable[int] = ()) -> None:
        """End the job, unless it has ended; nothing more is applied, and trainers are sent home.

        Those who are abandoned are not waited for.
        """
        with self._lock:
            self.roll.abandon(abandoned)
            self._end(outcome)
            self._see_if_over()
            answers = self._answers(time.monotonic())
        _send(answers)

    def tick(self, max_wait_s: float) -> None:
        """Once in a while: print progress, and send Wait to those who wait for max_wait_s.

        So no call of a trainer times out while there is nothing to do for it.
        """
        with self._lock:
            now = time.monotonic()
            lines = self._training.progress_line(now)
            late = self.roll.waiting_since_before(now - max_wait_s)
            answers: list[Answer] = [(self.roll.take_reply(t), Wait()) for t in late]
        _send(answers, lines)

    def answer_waiting(self) -> None:
        """There may be orders now for those who wait."""
        with self._lock:
            answers = self._answers(time.monotonic())
        _send(answers)

    @contextmanager
    def _serving(self, trainer: int) -> Iterator[ServerCompute]:
        """A call of the trainer in which the server computes."""
        compute = self._training.compute
        assert isinstance(compute, ServerCompute), "the trainers compute"
        self.roll.mark(trainer, Activity.SERVED, time.monotonic())
        yield compute
        self.roll.mark(trainer, Activity.WORKING, time.monotonic())

    @contextmanager
    def _ending_at_failure(self) -> Iterator[None]:
        """The job ends where training must not go on. The caller holds the lock."""
        try:
            yield
        except TrainingFailed as error:
            self._end(Outcome("failed", error.exit_code, str(error), error.rank))

    def _answers(self, now: float) -> list[Answer]:
        """For those who wait and need not any more."""
        waiting = self.roll.waiting()
        replies: dict[int, Reply] = {}
        if self.roll.outcome is not None or self._training.is_finished:
            replies |= dict.fromkeys(waiting, Finished())
        elif waiting:
            replies |= self._training.assign(waiting, now)
        for trainer in replies:
            self.roll.mark(trainer, Activity.WORKING, now)
        return [(self.roll.take_reply(trainer), reply) for trainer, reply in replies.items()]

    def _depart(
        self, trainer: int, outcome: Outcome | None = None, *, is_abandoned: bool = False
    ) -> None:
        lines: list[Line] = []
        with self._lock:
            now = time.monotonic()
            if outcome is not None and self.roll.is_present(trainer):  # or another thread did it
                self.roll.abandon({trainer} if is_abandoned else ())
                self._end(outcome)
            self.roll.leave(trainer)
            self._training.leave(trainer, now)
            if self.roll.outcome is None:
                with self._ending_at_failure():
                    lines += self._training.update_without_those_who_left()
            self._see_if_over()
            answers = self._answers(now)
        _send(answers, lines)

    def _see_if_over(self) -> None:
        if not self.roll.present:
            if not self._training.is_finished and self.roll.outcome is None:
                cause = "all trainers left before the work was done"
                self._end(Outcome("failed", PeerLost.exit_code, cause))
            self._end(Outcome("done"))
        if self.roll.is_over:
            self.ended.set()

    def _end(self, outcome: Outcome) -> None:
        held, mark = self._training.held_by(outcome.rank), self.roll.marks().get(outcome.rank)
        situation = {
            "last_order": facts_of(held),
            "doing": mark.activity.value if mark else None,
            "since_s": time.monotonic() - mark.since if mark else None,
        }
        self.roll.end(outcome, situation)


def _send(answers: Sequence[Answer], lines: Sequence[Line] = ()) -> None:
    """Without the lock: setting a result runs whatever waits for it, and writing, which comes last,
    may block."""
    for reply, answer in answers:
        reply.set_result(answer)
    for level, line in lines:
        log.log(level, "%s", line)
