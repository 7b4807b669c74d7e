"""The life of every other rank: wait for rank 0, build, train, leave."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from ps.host import libc, stacks
from ps.host.health import Finding
from ps.host.monitors import ServerMonitor
from ps.host.processes import Identity, Peer
from ps.host.stacks import stacks_path
from ps.host.watch import GIL_GRACE_S, HOLD_S, Watch
from ps.job.build import TrainerParts, threads_of
from ps.job.failure import in_one_line, show_traceback
from ps.job.injection import Injection
from ps.job.preparation import ready_timeout_s
from ps.job.report import report_without_server
from ps.links.calls import ServerError
from ps.links.channel import Address
from ps.links.choice import Link, connect
from ps.links.rendezvous import Rendezvous
from ps.links.shelf import take_from
from ps.settings.config import Config
from ps.settings.errors import PeerLost, exit_code_of
from ps.settings.log import log
from ps.settings.topology import SERVER_RANK, Topology
from ps.trainer.trainer import train
from ps.workloads import catalogue


def run_trainer(topology: Topology, config: Config, watch: Watch) -> int:
    """Be a trainer. Blocks; returns the exit code.

    config is what was typed here; once rank 0 is ready, its options hold.

    Raises:
        PsError: the job could not start, or the server is lost.
    """
    timeout_s = ready_timeout_s(config)
    rendezvous = Rendezvous(topology, timeout_s)
    announced = json.loads(rendezvous.announced(timeout_s))
    config, run_dir = Config.from_json(announced["config"]), Path(announced["run_dir"])
    if announced["shelf"]:
        take_from(Address(**announced["shelf"]), config.start_timeout)
    torch.set_num_threads(threads_of(topology, config) if config.compute == "trainer" else 1)
    workload = catalogue.load(config.workload, config)
    parts = TrainerParts(config, workload, Injection(config.faults, topology))
    open_stacks(watch, run_dir, topology.rank, config)
    rendezvous.barrier(Identity.of(os.getpid()).to_json(), config.start_timeout)
    monitor = _watch_server(topology, config, run_dir, rendezvous, watch)
    server = connect(announced["invitation"], rendezvous, config)
    return work(topology, server, parts, at_end=monitor.expect_end)


def work(
    topology: Topology,
    server: Link,
    parts: TrainerParts,
    at_end: Callable[[], None] = lambda: None,
) -> int:
    """Join the server, train, and leave; returns the exit code. Blocks.

    at_end is called before this trainer leaves, or tells the server what it fails for.

    Raises:
        PeerLost: the server is gone.
    """
    code = 0
    try:
        worker = parts.join(topology.rank, server)
        libc.keep_freed_memory()  # not earlier: the model's first place is given back
        train(topology.rank, server, worker, at_end=at_end)
    except PeerLost:
        raise
    except (Exception, SystemExit) as error:
        at_end()
        code = exit_code_of(error)
        show_traceback(error, topology)
        with suppress(Exception):
            if isinstance(error, ServerError):  # the cause is the server's, and it knows
                server.leave(topology.rank)
            else:
                server.fail(topology.rank, in_one_line(error), code)
    server.close()
    parts.loader.close()
    return code


def _watch_server(
    topology: Topology, config: Config, run_dir: Path, rendezvous: Rendezvous, watch: Watch
) -> ServerMonitor:
    """Leave when the server has ended without saying so, or stalls."""
    server, me = (peer_of(rendezvous, rank) for rank in (SERVER_RANK, topology.rank))

    def end_for(finding: Finding, facts: Mapping[str, Any]) -> None:
        if finding.rank == SERVER_RANK:
            report_without_server(run_dir, finding, facts)
        else:
            log.error("%s", finding.cause)
        # A server that has ended by itself is the root cause; torchrun stops this rank soon,
        # unless it saw nothing wrong.
        watch.end_later(finding.exit_code, HOLD_S if finding.is_seen_by_torchrun else 0.0)

    monitor = ServerMonitor(
        server,
        me,
        topology.rank,
        end_for,
        stall_timeout_s=config.stall_timeout_s,
        memory_limit_bytes=config.memory_limit_bytes,
    )
    watch.look_with(monitor.look, [server])
    return monitor


def peer_of(rendezvous: Rendezvous, rank: int) -> Peer:
    """The process of a rank. Once all have passed the barrier."""
    return Peer(Identity.from_json(rendezvous.identity_of(rank)))


def open_stacks(watch: Watch, run_dir: Path, rank: int, config: Config) -> None:
    """Where this process's stacks are written, when it is asked for them or cannot go on."""
    file: TextIO
    try:
        file = stacks_path(run_dir, rank).open("a")
    except OSError as error:
        log.warning("stacks will be printed, if need be: %s", error.strerror)
        file = sys.stderr
    stacks.show_on_request(file)
    if config.stall_timeout_s is not None:
        watch.guard(file, config.stall_timeout_s + GIL_GRACE_S)
