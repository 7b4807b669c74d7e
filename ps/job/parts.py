"""The parts of a server and of a trainer, made from the options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ps.host import resources
from ps.job.checkpoint import Checkpoints, Snapshot, State
from ps.job.injection import Injection
from ps.links.choice import Link
from ps.model.devices import choose_devices, place
from ps.model.flat import FlatModel
from ps.model.optimizer import make_optimizer
from ps.model.passes import Passes
from ps.model.store import Store
from ps.server.compute import Compute, OnServer, OnTrainers
from ps.server.metrics import Metrics
from ps.server.orders import Orders, Plan
from ps.server.server import ParameterServer
from ps.settings.config import Config
from ps.settings.errors import CheckpointUnusable
from ps.settings.schedule import schedule_factor
from ps.settings.topology import Topology
from ps.trainer.loading import Loader
from ps.trainer.worker import ServerSideWorker, TrainerSideWorker, Worker
from ps.workload import Workload
from ps.workloads import catalogue
from ps.workloads.checks import make_model, refuse_without_layout, try_out


@dataclass(frozen=True, kw_only=True)
class ServerParts:
    """What the server is made of."""

    workload: Workload
    plan: Plan
    threads: int
    lr: float
    store: Store
    orders: Orders
    compute: Compute
    server: ParameterServer
    resumed_from: Path | None
    """The checkpoint that the job goes on from."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds. Training stands still for as long as it takes to copy it."""
        return {**self.server.state(), "job": _identity(self.plan)}

    def snapshot(self, *, copy: bool) -> Snapshot:
        """See TakeSnapshot."""
        state = self.state()
        version = state["store"]["version"]
        return Snapshot(version, (version, state["orders"]), state)


def server_parts(
    topology: Topology, config: Config, checkpoints: Checkpoints | None = None
) -> ServerParts:
    """What can be wrong with options and plug-in, and needs torch to be seen, is found here.

    Raises:
        ConfigError: as said.
        CheckpointUnusable: there are checkpoints to go on from, and all are unusable.
    """
    workload = catalogue.load(config.workload, config)
    plan = Plan(
        num_train_samples=len(workload.train),
        num_test_samples=len(workload.test),
        batch_size=config.batch_size * config.accumulate,
        epochs=config.epochs,
        seed=config.seed,
        batches_per_update=len(topology.trainers) if config.max_lag == 0 else 1,
    )
    threads = threads_of(topology, config)
    torch.set_num_threads(threads)
    passes = Passes.of(config, workload)
    model = passes.prepare(make_model(workload, config.seed))
    input_device = place(model, choose_devices(config.num_gpus, torch.cuda.device_count()))
    try_out(workload, model, input_device, passes.run)
    lr = config.lr_of(config.accumulate * plan.batches_per_update)
    optimizer = make_optimizer(
        config.optimizer,
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    orders, metrics = Orders(plan), Metrics(plan, topology.trainers)
    store = Store(
        model,
        optimizer,
        lr_factor=_lr_factor(config.lr_schedule, metrics),
        clip_norm=config.clip_norm,
    )

    def restore(state: State) -> None:
        if difference := _difference(_identity(plan), state["job"]):
            raise CheckpointUnusable(f"it is of another job: {difference}")
        store.restore(state["store"])
        orders.restore(state["orders"])
        metrics.restore(state["metrics"])
        metrics.total_updates = store.version + orders.updates_left

    resumed_from = checkpoints.newest(restore) if checkpoints else None
    compute: Compute
    if config.compute == "server":
        compute = OnServer(store, topology.trainers, passes, input_device)
    else:
        refuse_without_layout(workload, model)
        compute = OnTrainers(store)
    server = ParameterServer(
        store,
        orders,
        metrics,
        compute,
        trainers=topology.trainers,
        max_lag=config.max_lag,
        lookahead=config.num_workers and config.num_workers + 1,
        skip_nonfinite=config.on_nonfinite == "skip",
    )
    return ServerParts(
        workload=workload,
        plan=plan,
        threads=threads,
        lr=lr,
        store=store,
        orders=orders,
        compute=compute,
        server=server,
        resumed_from=resumed_from,
    )


def _lr_factor(schedule: str, metrics: Metrics) -> Callable[[int], float] | None:
    """By the version; None where it is always 1."""
    if schedule == "constant":
        return None
    factor = schedule_factor(schedule)

    def by_version(version: int) -> float:
        total = metrics.total_updates
        # Rounds without a trainer that left make more updates than planned.
        return factor(min(version, total), total)

    return by_version


def _identity(plan: Plan) -> dict[str, Any]:
    """What two jobs must have in common for one to go on from the other's checkpoint."""
    numbers = asdict(plan)
    return {name: numbers[name] for name in numbers.keys() - {"epochs", "batches_per_update"}}


def _difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    for name, value in sorted(own.items()):
        if other.get(name) != value:
            return f"{name} is {other.get(name)} there and {value} here"
    return None


def threads_of(topology: Topology, config: Config) -> int:
    """Threads of one forward or backward."""
    return config.threads or resources.threads_per_pass(
        resources.usable_cores(), len(topology.trainers)
    )


class TrainerParts:
    """What a trainer is made of, but for the way to the server."""

    def __init__(self, config: Config, workload: Workload, injection: Injection) -> None:
        self._injection = injection
        self._workload = injection.workload(workload) if injection else workload
        self._passes = Passes.of(config, workload)
        self.loader = Loader(workload.train, self._passes, config.num_workers)
        self._model: nn.Module | None = None
        if config.compute == "trainer":
            self._model = self._passes.prepare(make_model(workload, config.seed))

    def worker(self, trainer: int, server: Link) -> Worker:
        """Joins the server."""
        worker = self._worker(trainer, server)
        return self._injection.worker(worker) if self._injection else worker

    def _worker(self, trainer: int, server: Link) -> Worker:
        if self._model is None:
            server.join(trainer, None)
            return ServerSideWorker(trainer, server, self._workload, self._passes, self.loader)
        flat = FlatModel(self._model)
        server.join(trainer, flat.describe())
        mailbox = server.open_mailbox(flat)
        flat.move_to(mailbox.weights, keep_values=False)
        return TrainerSideWorker(
            self._workload,
            self._model,
            flat,
            mailbox,
            self._passes,
            self.loader,
            by_message=server.by_message,
        )
