"""The parts of a server and of a trainer, made from the options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ps import machine
from ps.compute import Compute, OnServer, OnTrainers
from ps.config import Config
from ps.devices import choose_devices, place
from ps.flat import FlatModel
from ps.links.choice import Link
from ps.loading import Loader
from ps.metrics import Metrics
from ps.orders import Orders, Plan
from ps.passes import Passes
from ps.schedule import schedule_factor
from ps.server import ParameterServer
from ps.step import ServerSideWorker, TrainerSideWorker, Worker
from ps.store import Store, make_optimizer
from ps.topology import Topology
from ps.workload import Workload, make_model, refuse_without_layout, try_out
from ps.workloads import catalogue


@dataclass(frozen=True, kw_only=True)
class ServerParts:
    """What the server is made of."""

    workload_name: str
    workload: Workload
    plan: Plan
    threads: int
    lr: float
    store: Store
    compute: Compute
    server: ParameterServer


def server_parts(topology: Topology, config: Config, name: str) -> ServerParts:
    """What can be wrong with options and plug-in, and needs torch to be seen, is found here."""
    workload = catalogue.load(name, config)
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
    store = Store(
        model,
        optimizer,
        lr_factor=_lr_factor(config.lr_schedule, plan.total_updates),
        clip_norm=config.clip_norm,
    )
    compute: Compute
    if config.compute == "server":
        compute = OnServer(store, topology.trainers, passes, input_device)
    else:
        refuse_without_layout(workload, model)
        compute = OnTrainers(store)
    server = ParameterServer(
        store,
        Orders(plan),
        Metrics(plan, topology.trainers),
        compute,
        trainers=topology.trainers,
        max_lag=config.max_lag,
        lookahead=config.num_workers and config.num_workers + 1,
    )
    return ServerParts(
        workload_name=name,
        workload=workload,
        plan=plan,
        threads=threads,
        lr=lr,
        store=store,
        compute=compute,
        server=server,
    )


def _lr_factor(schedule: str, total_updates: int) -> Callable[[int], float] | None:
    """By the version; None where it is always 1."""
    if schedule == "constant":
        return None
    factor = schedule_factor(schedule)
    # Rounds without a trainer that left make more updates than planned.
    return lambda version: factor(min(version, total_updates), total_updates)


def threads_of(topology: Topology, config: Config) -> int:
    """Threads of one forward or backward."""
    return config.threads or machine.threads_per_pass(
        machine.usable_cores(), len(topology.trainers)
    )


class TrainerParts:
    """What a trainer is made of, but for the way to the server."""

    def __init__(self, config: Config, workload: Workload) -> None:
        self._workload = workload
        self._passes = Passes.of(config, workload)
        self.loader = Loader(workload.train, self._passes, config.num_workers)
        self._model: nn.Module | None = None
        if config.compute == "trainer":
            self._model = self._passes.prepare(make_model(workload, config.seed))

    def worker(self, trainer: int, server: Link) -> Worker:
        """Joins the server."""
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
