"""What the tests of this room share: plans, results of orders, and jobs at invented speeds."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from ps.model.randomness import permutation
from ps.model.store import Store
from ps.protocol import Evaluate, Evaluated, Order, Result, Train, Trained, Weights
from ps.server.compute import Contribution
from ps.server.metrics import Metrics
from ps.server.orders import Orders, Plan
from ps.server.rounds import Rounds
from ps.server.state import TrainingState, begin
from ps.server.training import Training

NO_GRADIENT = torch.zeros(0)


def plan_of(
    *,
    train: int = 10,
    test: int = 6,
    batch: int = 4,
    epochs: int = 2,
    seed: int = 0,
    slice: int = 4,
    per_update: int = 1,
) -> Plan:
    return Plan(
        num_train_samples=train,
        num_test_samples=test,
        batch_size=batch,
        epochs=epochs,
        seed=seed,
        slice_size=slice,
        batches_per_update=per_update,
    )


def orders_of(plan: Plan) -> Orders:
    """Shuffled at once."""
    return Orders(plan, lambda epoch: permutation(plan.seed, epoch, plan.num_train_samples))


def take(orders: Orders, trainer: int) -> Order | None:
    """What the server gives a trainer that may do anything: a slice first, else a batch."""
    return orders.take_slice(trainer) or orders.take_batch(trainer)


def result_of(order: Order | None, loss: float = 0.0, gradient: Tensor = NO_GRADIENT) -> Result:
    if isinstance(order, Train):
        return Trained(order.epoch, order.batch, len(order.indices), loss, gradient)
    assert order is not None
    return Evaluated(order.epoch, order.slice, order.stop - order.start, 0.0, 0)


def finish(orders: Orders, trainer: int) -> None:
    orders.finish(trainer, result_of(orders.held_by(trainer)))


def name_of(order: Order) -> tuple[int, int]:
    """Its phase (training of epoch 0 is 0, its evaluation 1, training of epoch 1 is 2, and so on),
    and its place there."""
    if isinstance(order, Train):
        return 2 * order.epoch, order.batch
    return 2 * order.epoch + 1, order.slice


# --- jobs at invented speeds


@dataclass(kw_only=True)
class Crew:
    """Trainers 1..N: how long their orders take, in turns, and after how many one leaves."""

    speeds: list[list[float]]
    leaves_after: dict[int, int] = field(default_factory=dict)
    """A trainer that is in here leaves while it holds its next order."""


@dataclass
class Start:
    """A batch was dispatched: what the simulation itself knows of that moment."""

    trainer: int
    finished: dict[int, int]
    """Batches that each trainer still there has finished."""
    waiting: set[int]
    working: set[int]


class Simulation:
    """Runs a crew on a plan, event by event, without threads or clocks, and keeps what was done."""

    def __init__(
        self, plan: Plan, crew: Crew, max_lag: int | None = None, prefetch: int = 0
    ) -> None:
        self.plan, self.crew, self.prefetch = plan, crew, prefetch
        self.orders = orders_of(plan)
        self.finished = dict.fromkeys(range(1, len(crew.speeds) + 1), 0)
        self.rounds: Rounds[Order] = Rounds(self.finished, max_lag)
        self.durations = {t: itertools.cycle(crew.speeds[t - 1]) for t in self.finished}
        self.waiting = list(self.finished)
        self.busy: list[tuple[float, int]] = []
        self.num_returned = dict.fromkeys(self.finished, 0)
        self.version = 0
        self.computed_on: dict[int, int] = {}

        self.taken: list[Order] = []
        self.done: list[Order] = []
        self.events: list[Order] = []
        """Both of the above, as they came."""
        self.out_when_opened: list[int] = []
        """How many batches were out when the evaluation of epoch 0, 1, ... was opened."""
        self.starts: list[Start] = []
        self.staleness: list[int] = []
        self.ready: list[tuple[list[int], dict[int, int], list[int]]] = []
        """What ready() was asked: who waits, what each has finished, and the answer."""

    def run(self) -> Simulation:
        now = 0.0
        while not self.orders.finished:
            self._dispatch(now)
            assert self.busy, f"{self.waiting} wait for ever, finished are {self.finished}"
            now, trainer = heapq.heappop(self.busy)
            if self.crew.leaves_after.get(trainer) == self.num_returned[trainer]:
                self._leave(trainer)
            else:
                self._return(trainer)
        assert not self.busy, "finished although an order is out"
        return self

    def batches(self) -> list[Train]:
        return [order for order in self.done if isinstance(order, Train)]

    def _dispatch(self, now: float) -> None:
        for trainer in list(self.waiting):
            if (evaluate := self.orders.take_slice(trainer)) is not None:
                self._begin(trainer, evaluate, now)
        if any(isinstance(self.orders.held_by(t), Evaluate) for _, t in self.busy):
            return
        ready = self.rounds.ready(self.waiting)
        self.ready.append((list(self.waiting), dict(self.finished), ready))
        waiting, working = set(self.waiting), {t for _, t in self.busy}
        for trainer in ready:
            if (batch := self.orders.take_batch(trainer)) is None:
                break
            self.starts.append(Start(trainer, dict(self.finished), waiting, working))
            self.rounds.start(trainer)
            self.computed_on[trainer] = self.version
            self._begin(trainer, batch, now)
            reserved = self.orders.reserve([trainer], self.prefetch)[trainer]
            assert len(reserved) <= self.prefetch
            assert all(order.epoch == batch.epoch for order in reserved)

    def _begin(self, trainer: int, order: Order, now: float) -> None:
        assert self.orders.held_by(trainer) == order
        self.waiting.remove(trainer)
        heapq.heappush(self.busy, (now + next(self.durations[trainer]), trainer))
        self.taken.append(order)
        self.events.append(order)

    def _return(self, trainer: int) -> None:
        order = self.orders.held_by(trainer)
        self.num_returned[trainer] += 1
        self.waiting.append(trainer)
        if isinstance(order, Train):
            self.rounds.finish(trainer, order)
            self.finished[trainer] += 1
            self._update()
        else:
            self._finish(trainer)

    def _update(self) -> None:
        due = self.rounds.take_due()
        for trainer, _ in due:
            self.staleness.append(self.version - self.computed_on[trainer])
            self._finish(trainer)
        self.version += bool(due)

    def _finish(self, trainer: int) -> None:
        order, evaluating = self.orders.held_by(trainer), self.orders.evaluating
        assert order is not None
        self.orders.finish(trainer, result_of(order))
        self.done.append(order)
        self.events.append(order)
        if self.orders.evaluating != evaluating:
            held = map(self.orders.held_by, self.finished)
            self.out_when_opened.append(sum(isinstance(order, Train) for order in held))

    def _leave(self, trainer: int) -> None:
        self.orders.leave(trainer)
        self.rounds.leave(trainer)
        del self.finished[trainer]
        self._update()


plans = st.builds(
    plan_of,
    train=st.integers(1, 40),
    test=st.integers(1, 12),
    batch=st.integers(1, 12),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**63 - 1),
    slice=st.integers(1, 6),
)


@st.composite
def crews(draw: st.DrawFn) -> Crew:
    """1 to 5 trainers whose speeds change, up to a hundredfold; not all of them leave."""
    num = draw(st.integers(1, 5))
    duration = st.one_of(st.sampled_from([0.1, 1.0, 10.0]), st.floats(0.1, 10.0))
    speeds = [draw(st.lists(duration, min_size=1, max_size=4)) for _ in range(num)]
    stays = draw(st.integers(1, num))
    others = [trainer for trainer in range(1, num + 1) if trainer != stays]
    leaving = draw(st.lists(st.sampled_from(others), unique=True)) if others else []
    return Crew(speeds=speeds, leaves_after={t: draw(st.integers(0, 8)) for t in leaving})


# --- a training whose gradients the test invents


class Direct:
    """A Compute without a model to run: a result brings its one gradient itself."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._versions: dict[int, int] = {}
        self.opened: list[int] = []
        """The versions whose evaluation was opened."""

    def check_layout(self, trainer: int, layout: str | None) -> None:
        pass

    def contribution(self, trainer: int, result: Trained) -> Contribution:
        """Its buffer holds the number of the trainer."""
        assert isinstance(result.gradient, Tensor)
        gradients = [result.gradient, None]
        return Contribution(gradients, self._versions[trainer], [torch.tensor(float(trainer))])

    def dispatch(self, trainer: int) -> Weights:
        self._versions[trainer] = self._store.version
        return Weights(self._store.version)

    def open_evaluation(self) -> None:
        self.opened.append(self._store.version)


class Weight(nn.Module):
    """A weight of zero, one that no gradient reaches, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(()))
        self.forgotten = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))


def state_of(
    plan: Plan,
    trainers: Sequence[int] = (1,),
    *,
    orders: Orders | None = None,
    restore_from: TrainingState | None = None,
) -> TrainingState:
    """Its optimizer takes each gradient off the weight."""
    model = Weight()
    store = Store(model, torch.optim.SGD(model.parameters(), lr=1.0))
    content = restore_from.snapshot().content if restore_from else None

    def restore_newest(restore: Callable[..., None]) -> None:
        if content is not None:
            restore(content)

    return begin(
        *(plan, store, orders or orders_of(plan), Metrics(plan, trainers)),
        clock=lambda: 0.0,
        restore_newest=restore_newest,
    )


def training_of(
    state: TrainingState,
    trainers: Sequence[int] = (1,),
    *,
    max_lag: int | None = None,
    prefetch: int = 0,
    skip_nonfinite: bool = False,
    after_update: Callable[[int], None] = lambda version: None,
) -> tuple[Training, Direct]:
    compute = Direct(state.store)
    training = Training(
        *(state, compute, trainers),
        max_lag=max_lag,
        prefetch=prefetch,
        skip_nonfinite=skip_nonfinite,
        after_update=after_update,
    )
    return training, compute
