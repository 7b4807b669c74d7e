"""What a server and a trainer are made of, built from the options."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ps.host import resources
from ps.job.checkpoint import Checkpoints
from ps.job.injection import Injection
from ps.links.choice import Link
from ps.model.devices import choose_devices, place
from ps.model.flat import FlatModel
from ps.model.optimizer import make_optimizer
from ps.model.passes import Passes
from ps.model.store import Store
from ps.server.compute import Compute, ServerCompute, TrainerCompute
from ps.server.metrics import Metrics
from ps.server.orders import Orders, Plan
from ps.server.server import ParameterServer
from ps.server.shuffler import Shuffler
from ps.server.state import TrainingState, begin
from ps.server.training import Training
from ps.settings.config import Config
from ps.settings.schedule import factor_by_version
from ps.settings.topology import Topology
from ps.trainer.loading import Loader
from ps.trainer.worker import ServerComputeWorker, TrainerComputeWorker, Worker
from ps.workload import Workload
from ps.workloads import catalogue
from ps.workloads.checks import make_model, refuse_without_layout, try_out


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What the server is built on: all that is known before the first call."""

    workload: Workload
    threads: int
    lr: float
    state: TrainingState
    shuffler: Shuffler
    compute: Compute


def build_basis(
    topology: Topology, config: Config, checkpoints: Checkpoints | None = None
) -> Basis:
    """What can be wrong with options and plug-in, and needs torch to be seen, is found here.

    Raises:
        ConfigError: as said.
        CheckpointUnusable: there are checkpoints to go on from, and all are unusable.
    """
    workload = catalogue.load(config.workload, config)
    plan = plan_of(topology, config, workload)
    threads = threads_of(topology, config)
    torch.set_num_threads(threads)
    passes = Passes.of(config, workload)
    model = passes.prepare(make_model(workload, config.seed))
    input_device = place(model, choose_devices(config.num_gpus, torch.cuda.device_count()))
    try_out(workload, model, input_device, passes.run)
    lr = config.lr_of(config.accumulate * plan.batches_per_update)
    shuffler = Shuffler(plan.seed, plan.num_train_samples, plan.epochs)
    metrics = Metrics(plan, topology.trainers)
    state = begin(
        plan,
        _store(config, model, lr, metrics),
        Orders(plan, shuffler),
        metrics,
        clock=time.monotonic,
        restore_newest=checkpoints.newest if checkpoints else None,
    )
    return Basis(
        workload=workload,
        threads=threads,
        lr=lr,
        state=state,
        shuffler=shuffler,
        compute=_compute(config, topology, workload, model, state, passes, input_device),
    )


def plan_of(topology: Topology, config: Config, workload: Workload) -> Plan:
    return Plan(
        num_train_samples=len(workload.train),
        num_test_samples=len(workload.test),
        batch_size=config.batch_size * config.accumulate,
        epochs=config.epochs,
        seed=config.seed,
        batches_per_update=len(topology.trainers) if config.lag_limit == 0 else 1,
    )


def _store(config: Config, model: nn.Module, lr: float, metrics: Metrics) -> Store:
    optimizer = make_optimizer(
        config.optimizer,
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    lr_factor = factor_by_version(config.lr_schedule, lambda: metrics.total_updates)
    return Store(model, optimizer, lr_factor=lr_factor, clip_norm=config.clip_norm)


def _compute(
    config: Config,
    topology: Topology,
    workload: Workload,
    model: nn.Module,
    state: TrainingState,
    passes: Passes,
    input_device: torch.device,
) -> Compute:
    if config.compute == "server":
        return ServerCompute(state, topology.trainers, passes, input_device)
    refuse_without_layout(workload, model)
    return TrainerCompute(state)


def build_server(
    topology: Topology, config: Config, basis: Basis, after_update: Callable[[int], None]
) -> ParameterServer:
    """after_update is called with each new version, under the server's lock."""
    training = Training(
        basis.state,
        basis.compute,
        topology.trainers,
        max_lag=config.lag_limit,
        prefetch=config.num_workers and config.num_workers + 1,
        skip_nonfinite=config.on_nonfinite == "skip",
        after_update=after_update,
    )
    return ParameterServer(training, topology.trainers)


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

    def join(self, trainer: int, server: Link) -> Worker:
        """Join the server; gives what works on its orders."""
        worker = self._join(trainer, server)
        return self._injection.worker(worker) if self._injection else worker

    def _join(self, trainer: int, server: Link) -> Worker:
        if self._model is None:
            server.join(trainer, None)
            return ServerComputeWorker(trainer, server, self._workload, self._passes, self.loader)
        flat = FlatModel(self._model)
        server.join(trainer, flat.describe())
        mailbox = server.open_mailbox(flat)
        flat.move_to(mailbox.weights, keep_values=False)
        return TrainerComputeWorker(
            self._workload, self._model, flat, mailbox, self._passes, self.loader
        )
