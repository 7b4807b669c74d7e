"""What rank 0 settles before torch is loaded, so that a mistake answers in a second or two."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ps.config import Config
from ps.gate import Gate
from ps.rundir import RunDirectory
from ps.topology import Topology
from ps.workloads import catalogue


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    started_at: float
    """Seconds of the monotonic clock."""
    gate: Gate
    """Still closed; to be opened when nothing can be found wrong any more."""
    run_dir: RunDirectory
    workload: str
    """The name of the workload, resolved; its files are there."""


def ready_bound_s(config: Config) -> float:
    """How long the other ranks wait for rank 0, which may have to fetch data."""
    return catalogue.FETCH_BOUND_S + config.start_timeout


def prepare(topology: Topology, config: Config) -> Prepared:
    """Make the run directory and get the data. Blocks while it fetches.

    Raises:
        ConfigError: one of them cannot be had; nothing is left behind.
    """
    started_at = time.monotonic()
    gate = Gate(topology)
    run_dir = RunDirectory.create(config.run_dir, topology.error_file)
    try:
        workload = catalogue.resolve(config)
        return Prepared(started_at=started_at, gate=gate, run_dir=run_dir, workload=workload)
    except BaseException:
        run_dir.discard()
        raise
