"""Build the parts of this rank's role, run them, close them in order."""

from __future__ import annotations

import json
import math
import platform
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ps import interruption, machine
from ps.checkpoint import Checkpointer, Checkpoints
from ps.config import LR, Config
from ps.errors import Interrupted, PeerLost, PsError
from ps.files import replacing
from ps.links import channel
from ps.links.answers import InProcessLink
from ps.links.choice import ServerEnd, choose, connect
from ps.links.rendezvous import Rendezvous, record_for_torchrun
from ps.links.shelf import Shelf, take_from
from ps.log import log
from ps.parts import ServerParts, TrainerParts, server_parts, threads_of
from ps.preparation import Prepared, ready_bound_s
from ps.server import Outcome, ParameterServer
from ps.topology import Topology
from ps.trainer import train
from ps.workloads import catalogue

TICK_S = 1.0
SAVE_BOUND_S = 25.0  # torchrun kills 30 s after its SIGTERM
GOODBYE_BOUND_S = 5.0


def run_server(topology: Topology, prepared: Prepared) -> int:
    """Be the server or, at world size 1, both. Blocks; returns the exit code.

    Raises:
        PsError: the job could not start; nothing is left behind.
    """
    config, run_dir = prepared.config, prepared.run_dir
    try:
        rendezvous = None if topology.is_alone else Rendezvous(topology, config.start_timeout)
        shelf = Shelf() if rendezvous and channel.works_here() else None
        if shelf:
            shelf.open()
        earlier = Checkpoints(prepared.resume_from) if prepared.resume_from else None
        job = server_parts(topology, config, earlier)
        end = (
            choose(job.server, job.compute, topology.trainers, config.link) if rendezvous else None
        )
    except BaseException:
        run_dir.discard()
        raise
    prepared.gate.open()
    checkpointer = Checkpointer(
        Checkpoints(run_dir.path, config.keep), job.state, config.checkpoint_interval_s
    )
    job.server.after_update = _after_update(config, checkpointer)
    machine.keep_freed_memory()  # not earlier: the model's first place is given back
    try:
        interruption.raise_once()
        run_dir.write_options(config.to_json(inherited_only=True), prepared.job)
        run_dir.publish()
        _announce_plan(job, topology, config)
        checkpointer.start()
        try:
            if rendezvous is None or end is None:
                interruption.note_once()
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
        interruption.ignore()
        job.server.stop(Outcome("interrupted", error.exit_code, str(error)))
    checkpointer.close(SAVE_BOUND_S)
    outcome = _finish(job, topology, prepared, checkpointer.last)
    if end is not None and job.server.all_left:
        end.close()
    if outcome.rank != topology.rank:
        _await_stop()
    return outcome.exit_code


def _after_update(config: Config, checkpointer: Checkpointer) -> Callable[[int], None]:
    every = config.checkpoint_updates

    def act(version: int) -> None:
        if every is not None and version % every == 0:
            checkpointer.due()

    return act


def run_trainer(topology: Topology, config: Config) -> int:
    """Be a trainer. Blocks; returns the exit code.

    Raises:
        PsError: the job could not start, or the server is lost.
    """
    rendezvous = Rendezvous(topology, config.start_timeout)
    announced = json.loads(rendezvous.announced(ready_bound_s(config)))
    if announced["shelf"]:
        take_from(channel.Address(**announced["shelf"]), config.start_timeout)
    config = Config.from_json(announced["config"])
    torch.set_num_threads(threads_of(topology, config) if config.compute == "trainer" else 1)
    workload = catalogue.load(config.workload, config)
    make = TrainerParts(config, workload)
    rendezvous.gather()
    server = connect(announced["invitation"], rendezvous, config)
    code = 0
    try:
        worker = make.worker(topology.rank, server)
        machine.keep_freed_memory()  # not earlier: the model's first place is given back
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


def _train_alone(job: ServerParts, topology: Topology, config: Config) -> None:
    """World size 1: the one process is server and trainer."""
    server = InProcessLink(job.server, job.compute, topology.rank)
    make = TrainerParts(config, job.workload)
    train(topology.rank, server, make.worker(topology.rank, server))
    make.loader.close()


def _serve(
    job: ServerParts, config: Config, rendezvous: Rendezvous, end: ServerEnd, shelf: Shelf | None
) -> None:
    """Until the job has ended, one way or the other."""
    announced = {
        "config": config.to_json(),
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


def _announce_plan(job: ServerParts, topology: Topology, config: Config) -> None:
    plan, num = job.plan, len(topology.trainers)
    log.info(
        "workload %s: %d epoch%s of %d updates, %d training and %d test samples",
        config.workload,
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
    if job.resumed_from is not None:
        updates, total = job.store.version, job.store.version + job.orders.updates_left
        log.info("going on from %s, after %d of %d updates", job.resumed_from, updates, total)
    if config.lr is None and job.lr != LR:
        log.info("learning rate %g, for so many batches in an update; --lr overrides it", job.lr)


def _finish(
    job: ServerParts, topology: Topology, prepared: Prepared, checkpoint: Path | None
) -> Outcome:
    """Write what the run leaves, and the last line."""
    config = prepared.config
    outcome, numbers = job.server.result()
    duration_s = time.monotonic() - prepared.started_at
    report = {
        "status": outcome.status,
        "exit_code": outcome.exit_code,
        "cause": outcome.cause,
        "world_size": topology.world_size,
        "compute": config.compute,
        "staleness": config.staleness,
        "workload": config.workload,
        "epochs": config.epochs,
        "attempt": topology.restart_count,
        "resumed_from": str(job.resumed_from) if job.resumed_from else None,
        "checkpoint": str(checkpoint) if checkpoint else None,
        **numbers,
        "duration_s": duration_s,
        "threads": job.threads,
        "lr": job.lr,
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
