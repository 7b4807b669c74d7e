"""Build the parts of this rank's role, run them, close them in order."""

from __future__ import annotations

import json
import math
import platform
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ps import interruption, machine
from ps.compute import Compute, OnServer, OnTrainers
from ps.config import Config
from ps.devices import choose_devices, place
from ps.errors import Interrupted, PeerLost, PsError
from ps.files import replacing
from ps.flat import FlatModel
from ps.links import channel
from ps.links.answers import InProcessLink
from ps.links.choice import Link, ServerEnd, choose, connect
from ps.links.rendezvous import Rendezvous, record_for_torchrun
from ps.links.shelf import Shelf, take_from
from ps.loading import Loader
from ps.log import log
from ps.metrics import Metrics
from ps.orders import Orders, Plan
from ps.passes import Passes
from ps.preparation import Prepared, ready_bound_s
from ps.schedule import schedule_factor
from ps.server import Outcome, ParameterServer
from ps.step import ServerSideWorker, TrainerSideWorker, Worker
from ps.store import Store, make_optimizer
from ps.topology import Topology
from ps.trainer import train
from ps.workload import Workload, make_model, refuse_sparse, try_out
from ps.workloads import catalogue

TICK_S = 1.0
GOODBYE_BOUND_S = 5.0


def run_server(topology: Topology, config: Config, prepared: Prepared) -> int:
    """Be the server or, at world size 1, both. Blocks; returns the exit code.

    Raises:
        PsError: the job could not start; nothing is left behind.
    """
    machine.keep_freed_memory()
    try:
        rendezvous = None if topology.is_alone else Rendezvous(topology, config.start_timeout)
        shelf = Shelf() if rendezvous and channel.works_here() else None
        if shelf:
            shelf.open()
        job = _build(topology, config, prepared.workload)
        end = (
            choose(job.server, job.compute, topology.trainers, config.link) if rendezvous else None
        )
    except BaseException:
        prepared.run_dir.discard()
        raise
    prepared.gate.open()
    try:
        interruption.raise_once()
        prepared.run_dir.publish()
        _announce_plan(job, topology, config)
        try:
            if rendezvous is None or end is None:
                _train_alone(job, topology, config)
            else:
                _serve(job, config, rendezvous, end, shelf)
        except PsError as error:
            job.server.stop(Outcome("failed", error.exit_code, str(error)))
        except (Exception, SystemExit) as error:
            cause = f"{topology.role} rank {topology.rank}: {_in_one_line(error)}"
            job.server.stop(Outcome("failed", _explain(error, topology), cause))
        interruption.ignore()
    except Interrupted as error:
        job.server.stop(Outcome("interrupted", error.exit_code, str(error)))
    outcome = _finish(job, topology, config, prepared)
    if end is not None and job.server.all_left:
        end.close()
    if outcome.rank != topology.rank:
        _await_stop()
    return outcome.exit_code


def run_trainer(topology: Topology, config: Config) -> int:
    """Be a trainer. Blocks; returns the exit code.

    Raises:
        PsError: the job could not start, or the server is lost.
    """
    machine.keep_freed_memory()
    rendezvous = Rendezvous(topology, config.start_timeout)
    announced = json.loads(rendezvous.announced(ready_bound_s(config)))
    torch.set_num_threads(_threads(topology, config) if config.compute == "trainer" else 1)
    if announced["shelf"]:
        take_from(channel.Address(**announced["shelf"]), config.start_timeout)
    workload = catalogue.load(announced["workload"], config)
    make = _WorkerMaker(config, workload)
    rendezvous.gather()
    server = connect(announced["invitation"], rendezvous, config)
    worker = make.worker(topology.rank, server)
    code = 0
    try:
        train(topology.rank, server, worker)
    except PeerLost:
        raise
    except (Exception, SystemExit) as error:
        code = _explain(error, topology)
        with suppress(Exception):
            server.fail(topology.rank, _in_one_line(error), code)
    server.close()
    make.loader.close()
    return code


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What the server is made of."""

    workload_name: str
    workload: Workload
    plan: Plan
    threads: int
    store: Store
    compute: Compute
    server: ParameterServer


def _build(topology: Topology, config: Config, name: str) -> _Job:
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
    threads = _threads(topology, config)
    torch.set_num_threads(threads)
    passes = Passes.of(config, workload)
    model = passes.prepare(make_model(workload, config.seed))
    input_device = place(model, choose_devices(config.num_gpus, torch.cuda.device_count()))
    try_out(workload, model, input_device, passes.run)
    optimizer = make_optimizer(
        config.optimizer,
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )
    factor = schedule_factor(config.lr_schedule)
    store = Store(
        model,
        optimizer,
        lr_factor=None
        if config.lr_schedule == "constant"
        else lambda version: factor(version, plan.total_updates),
        clip_norm=config.clip_norm,
    )
    compute: Compute
    if config.compute == "server":
        compute = OnServer(store, topology.trainers, passes, input_device)
    else:
        refuse_sparse(workload, model)
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
    return _Job(
        workload_name=name,
        workload=workload,
        plan=plan,
        threads=threads,
        store=store,
        compute=compute,
        server=server,
    )


def _threads(topology: Topology, config: Config) -> int:
    """Threads of one forward or backward."""
    return config.threads or machine.threads_per_pass(
        machine.usable_cores(), len(topology.trainers)
    )


class _WorkerMaker:
    """Makes a trainer's worker; the model, which may take long, before the trainer is ready."""

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
        mailbox = server.open_mailbox(flat)
        server.join(trainer, flat.describe())
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


def _train_alone(job: _Job, topology: Topology, config: Config) -> None:
    """World size 1: the one process is server and trainer."""
    server = InProcessLink(job.server, job.compute, topology.rank)
    make = _WorkerMaker(config, job.workload)
    train(topology.rank, server, make.worker(topology.rank, server))
    make.loader.close()


def _serve(
    job: _Job, config: Config, rendezvous: Rendezvous, end: ServerEnd, shelf: Shelf | None
) -> None:
    """Until the job has ended, one way or the other."""
    announced = {
        "workload": job.workload_name,
        "invitation": dict(end.invitation),
        "shelf": asdict(shelf.address) if shelf else None,
    }
    rendezvous.announce(json.dumps(announced))
    rendezvous.gather()
    end.open(rendezvous, config)
    _wait_until_ended(job.server, config.rpc_timeout)


def _wait_until_ended(server: ParameterServer, rpc_timeout_s: float) -> None:
    """After a failure the others get GOODBYE_BOUND_S to leave."""
    goodbye_since: float | None = None
    tick_s = min(TICK_S, rpc_timeout_s / 4)
    while not server.ended.wait(tick_s):
        interruption.check()
        server.tick(max_wait_s=rpc_timeout_s / 2)
        if server.outcome is None:
            continue
        goodbye_since = goodbye_since or time.monotonic()
        if time.monotonic() - goodbye_since > GOODBYE_BOUND_S:
            return


def _announce_plan(job: _Job, topology: Topology, config: Config) -> None:
    plan, num = job.plan, len(topology.trainers)
    log.info(
        "workload %s: %d epoch%s of %d updates, %d training and %d test samples",
        job.workload_name,
        plan.epochs,
        "" if plan.epochs == 1 else "s",
        plan.updates_per_epoch,
        plan.num_train_samples,
        plan.num_test_samples,
    )
    log.info(
        "%d trainer%s, compute on the %s, %d thread%s for each pass, %d usable cores",
        num,
        "" if num == 1 else "s",
        config.compute,
        job.threads,
        "" if job.threads == 1 else "s",
        machine.usable_cores(),
    )


def _finish(job: _Job, topology: Topology, config: Config, prepared: Prepared) -> Outcome:
    """Write what the run leaves, and the last line."""
    outcome, numbers = job.server.result()
    duration_s = time.monotonic() - prepared.started_at
    report = {
        "status": outcome.status,
        "exit_code": outcome.exit_code,
        "cause": outcome.cause,
        "world_size": topology.world_size,
        "compute": config.compute,
        "staleness": config.staleness,
        "workload": job.workload_name,
        "epochs": config.epochs,
        **numbers,
        "duration_s": duration_s,
        "threads": job.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    run_dir = prepared.run_dir
    if outcome.status == "done":
        with replacing(run_dir.path / "model.pt") as partial:
            torch.save(job.store.state_dict(), partial)
    path = run_dir.write_report(_finite(report))
    if outcome.status == "done":
        log.info(
            "done: %d updates, %d samples in %.1f s (%.0f samples/s), test accuracy %.4f; see %s",
            numbers["updates"],
            numbers["samples_trained"],
            duration_s,
            numbers["samples_per_s"],
            numbers["test_accuracy"],
            path,
        )
    else:
        log.error("%s: %s; see %s", outcome.status, outcome.cause, path)
    return outcome


def _finite(value: Any) -> Any:
    """The value as JSON can hold it: without NaN and infinity, at any depth."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _await_stop() -> None:
    """torchrun names the rank that exits first as the root cause: let that be the one."""
    interruption.end_at_once()
    time.sleep(GOODBYE_BOUND_S)


def _explain(error: BaseException, topology: Topology) -> int:
    """Show the traceback of the error being handled once, and return the exit code.

    What is recorded for torchrun stands in its report; without torchrun it is printed here.
    """
    if topology.error_file is None:
        traceback.print_exc()
        return 1
    record_for_torchrun(error)
    log.error("%s; torchrun's report below has the traceback", _in_one_line(error))
    return 1
