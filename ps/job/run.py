"""Build the parts of this rank's role, run them, close them in order."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from ps.host import libc, resources, signals
from ps.host.health import Finding
from ps.host.looks import TrainerSide
from ps.host.processes import Identity, Peer
from ps.host.stacks import stacks_path
from ps.host.watch import GIL_GRACE_S, HOLD_S, Watch, leave
from ps.job import injection, rundir
from ps.job.checkpoint import Checkpointer, Checkpoints
from ps.job.ending import Ending
from ps.job.injection import Injection
from ps.job.parts import ServerParts, TrainerParts, server_parts, threads_of
from ps.job.preparation import Prepared, ready_timeout_s
from ps.job.report import report_without_server
from ps.links import channel
from ps.links.calls import InProcessLink
from ps.links.choice import ServerEnd, choose, connect
from ps.links.rendezvous import Rendezvous, record_for_torchrun, require_torchrun
from ps.links.shelf import Shelf, take_from
from ps.server.server import Outcome, ParameterServer
from ps.settings.config import LR, Config
from ps.settings.errors import Interrupted, Orphaned, PeerLost, PsError
from ps.settings.log import log
from ps.settings.topology import SERVER_RANK, Topology
from ps.trainer.trainer import train
from ps.workloads import catalogue

TICK_S = 1.0
GOODBYE_BOUND_S = 5.0
ORPHAN_BOUND_S = 4.0


def run_server(topology: Topology, prepared: Prepared, watch: Watch) -> int:
    """Be the server or, at world size 1, both. Blocks; returns the exit code.

    Raises:
        PsError: the job could not start; nothing is left behind.
    """
    config, run_dir = prepared.config, prepared.run_dir
    try:
        if topology.is_alone:  # else the rendezvous sees it
            require_torchrun(topology)
        rendezvous = None if topology.is_alone else Rendezvous(topology, config.start_timeout)
        shelf = Shelf() if rendezvous and channel.works_here() else None
        if shelf:
            shelf.open()
        earlier = Checkpoints(prepared.resume_from) if prepared.resume_from else None
        job = server_parts(topology, config, earlier)
        injection.check(config.faults, topology)
        end = (
            choose(job.server, job.compute, topology.trainers, config.link) if rendezvous else None
        )
    except BaseException:
        run_dir.discard()
        raise
    prepared.gate.open()
    link = end.invitation["link"] if end else None
    ending = Ending(job, topology, prepared, link)
    job.server.after_update = _after_update(topology, config, ending.checkpointer)
    watch.on_orphaned = lambda: _end_orphaned(ending, topology)
    libc.keep_freed_memory()  # not earlier: the model's first place is given back
    try:
        signals.raise_once()
        ending.begin()
        _watch_stacks(watch, run_dir.path, topology.rank, config)
        _announce_plan(job, topology, config, link)
        try:
            if rendezvous is None or end is None:
                signals.note_once()
                _train_alone(job, topology, config, ending, watch)
            else:
                _serve(job, config, rendezvous, end, shelf, ending, watch)
        except PsError as error:
            ending.stop(Outcome("failed", error.exit_code, str(error)))
        except (Exception, SystemExit) as error:
            signals.check()  # what fails after a signal is no cause
            cause = f"{topology.role} rank {topology.rank}: {_in_one_line(error)}"
            ending.stop(Outcome("failed", _explain(error, topology), cause))
        signals.ignore()
    except Interrupted as error:
        signals.ignore()
        loss = ending.side.lost_before() if ending.side else None
        ending.stop(Outcome("interrupted", error.exit_code, str(error)), loss=loss)
    watch.close()
    outcome = ending.finish()
    rundir.refuse_if_final(topology.error_file, outcome.exit_code)  # torchrun may end this rank now
    if end is not None and job.server.all_left:
        end.close()
    if outcome.rank_ends:
        _await_stop()
    return outcome.exit_code


def _after_update(
    topology: Topology, config: Config, checkpointer: Checkpointer
) -> Callable[[int], None]:
    every = config.checkpoint_updates
    # At world size 1 faults happen to the trainer.
    faults = Injection(() if topology.is_alone else config.faults, topology)

    def act(version: int) -> None:
        if every is not None and version % every == 0:
            checkpointer.due()
        faults.at_update(version)

    return act


def _end_orphaned(ending: Ending, topology: Topology) -> None:
    """Save and end, not in the main thread, which may be in a long step."""
    outcome = Outcome("failed", Orphaned.exit_code, str(Orphaned()))
    ending.stop(outcome, abandoned=topology.trainers, bound_s=ORPHAN_BOUND_S)
    ending.finish()
    leave(Orphaned.exit_code)


def run_trainer(topology: Topology, config: Config, watch: Watch) -> int:
    """Be a trainer. Blocks; returns the exit code.

    Raises:
        PsError: the job could not start, or the server is lost.
    """
    rendezvous = Rendezvous(topology, config.start_timeout)
    announced = json.loads(rendezvous.announced(ready_timeout_s(config)))
    if announced["shelf"]:
        take_from(channel.Address(**announced["shelf"]), config.start_timeout)
    config = Config.from_json(announced["config"])
    torch.set_num_threads(threads_of(topology, config) if config.compute == "trainer" else 1)
    workload = catalogue.load(config.workload, config)
    make = TrainerParts(config, workload, Injection(config.faults, topology))
    _watch_stacks(watch, Path(announced["run_dir"]), topology.rank, config)
    rendezvous.gather(_card())
    side = _watch_server(topology, config, Path(announced["run_dir"]), rendezvous, watch)
    server = connect(announced["invitation"], rendezvous, config)
    code = 0
    try:
        worker = make.worker(topology.rank, server)
        libc.keep_freed_memory()  # not earlier: the model's first place is given back
        train(topology.rank, server, worker, at_end=side.expect_end)
    except PeerLost:
        raise
    except (Exception, SystemExit) as error:
        side.expect_end()
        code = _explain(error, topology)
        with suppress(Exception):
            server.fail(topology.rank, _in_one_line(error), code)
    server.close()
    make.loader.close()
    return code


def _watch_server(
    topology: Topology, config: Config, run_dir: Path, rendezvous: Rendezvous, watch: Watch
) -> TrainerSide:
    """Leave when the server has ended without saying so, or stalls."""
    server, me = (_peer_of(rendezvous, rank) for rank in (SERVER_RANK, topology.rank))

    def found(finding: Finding, facts: Mapping[str, Any]) -> None:
        if finding.rank == SERVER_RANK:
            report_without_server(run_dir, finding, facts)
        else:
            log.error("%s", finding.cause)
        # A server that has ended by itself is the root cause; torchrun stops this rank soon,
        # unless it saw nothing wrong.
        holds = finding.is_gone and not finding.is_quiet
        watch.end_later(finding.exit_code, HOLD_S if holds else 0.0)

    side = TrainerSide(
        server,
        me,
        topology.rank,
        found,
        stall_timeout_s=config.stall_timeout_s,
        memory_limit_bytes=config.memory_limit_bytes,
    )
    watch.on_signal = lambda number: _end_by_signal(watch, number)
    watch.look_with(side.look, [server])
    return side


def _end_by_signal(watch: Watch, number: int) -> None:
    watch.look_now()  # torchrun sends one when the server has ended: then that is to be told
    leave(128 + number)


def _watch_stacks(watch: Watch, run_dir: Path, rank: int, config: Config) -> None:
    """Where this process's stacks are written, when it is asked for them or cannot go on."""
    file: TextIO
    try:
        file = stacks_path(run_dir, rank).open("a")
    except OSError as error:
        log.warning("stacks will be printed, if need be: %s", error.strerror)
        file = sys.stderr
    signals.show_stacks_to(file)
    if config.stall_timeout_s is not None:
        watch.guard(file, config.stall_timeout_s + GIL_GRACE_S)


def _train_alone(
    job: ServerParts, topology: Topology, config: Config, ending: Ending, watch: Watch
) -> None:
    """World size 1: the one process is server and trainer."""
    me = Peer(Identity.of(os.getpid()))
    ending.watch_ranks({topology.rank: me}, watch)
    threading.Thread(target=_end_if_stuck, args=(job.server, ending), daemon=True).start()
    server = InProcessLink(job.server, job.compute, topology.rank)
    make = TrainerParts(config, job.workload, Injection(config.faults, topology))
    train(topology.rank, server, make.worker(topology.rank, server))
    make.loader.close()


def _end_if_stuck(server: ParameterServer, ending: Ending) -> None:
    """World size 1: nothing else could end a main thread that makes no progress."""
    came_at = math.inf
    while not server.ended.wait(TICK_S):
        try:
            signals.check()
        except Interrupted as error:
            came_at = min(came_at, time.monotonic())
            if time.monotonic() - came_at > GOODBYE_BOUND_S:  # so long a step is not waited for
                outcome = Outcome("interrupted", error.exit_code, str(error))
                ending.stop(outcome, abandoned={SERVER_RANK})
    time.sleep(GOODBYE_BOUND_S)
    leave(ending.finish().exit_code)


def _serve(
    job: ServerParts,
    config: Config,
    rendezvous: Rendezvous,
    end: ServerEnd,
    shelf: Shelf | None,
    ending: Ending,
    watch: Watch,
) -> None:
    """Until the job has ended, one way or the other."""
    announced = {
        "config": config.to_json(),
        "invitation": dict(end.invitation),
        "shelf": asdict(shelf.address) if shelf else None,
        "run_dir": str(ending.run_dir.path.absolute()),
    }
    rendezvous.announce(json.dumps(announced))
    rendezvous.gather(_card())
    world = range(rendezvous.topology.world_size)
    ending.watch_ranks({rank: _peer_of(rendezvous, rank) for rank in world}, watch)
    end.open(rendezvous, config)
    _wait_until_ended(job.server, config.rpc_timeout_s)


def _card() -> str:
    """What the others know this process by, see _peer_of."""
    return json.dumps(asdict(Identity.of(os.getpid())))


def _peer_of(rendezvous: Rendezvous, rank: int) -> Peer:
    return Peer(Identity(**json.loads(rendezvous.card_of(rank))))


def _wait_until_ended(server: ParameterServer, rpc_timeout_s: float | None) -> None:
    """After a failure the others get GOODBYE_BOUND_S to leave."""
    goodbye_since: float | None = None
    limit_s = math.inf if rpc_timeout_s is None else rpc_timeout_s
    tick_s = min(TICK_S, limit_s / 4)
    while not server.ended.wait(tick_s):
        signals.check()
        server.tick(max_wait_s=limit_s / 2)
        if server.outcome is None:
            continue
        goodbye_since = goodbye_since or time.monotonic()
        if time.monotonic() - goodbye_since > GOODBYE_BOUND_S:
            return


def _announce_plan(job: ServerParts, topology: Topology, config: Config, link: str | None) -> None:
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
        "%d trainer%s%s, compute on the %s in %s, %d thread%s for each pass, %d usable cores",
        num,
        "" if num == 1 else "s",
        f" over the {link} link" if link else "",
        config.compute,
        config.precision,
        job.threads,
        "" if job.threads == 1 else "s",
        resources.usable_cores(),
    )
    if job.resumed_from is not None:
        updates, total = job.store.version, job.store.version + job.orders.updates_left
        log.info("going on from %s, after %d of %d updates", job.resumed_from, updates, total)
    if config.lr is None and job.lr != LR:
        log.info("learning rate %g, for so many batches in an update; --lr overrides it", job.lr)


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _await_stop() -> None:
    """torchrun names the rank that exits first as the root cause: let that be the one."""
    if signals.came():  # torchrun has seen it end, and waits for this rank
        return
    signals.end_at_once()
    time.sleep(GOODBYE_BOUND_S)


def _explain(error: BaseException, topology: Topology) -> int:
    """Show the traceback of the error being handled once, and return the exit code.

    What is recorded for torchrun stands in its report; without torchrun it is printed here.
    """
    code = error.exit_code if isinstance(error, PsError) else 1
    if topology.error_file is None:
        traceback.print_exc()
        return code
    record_for_torchrun(error)
    log.error("%s; torchrun's report below has the traceback", _in_one_line(error))
    return code
