"""What rank 0 settles before torch is loaded, so that a mistake answers in a second or two."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ps.host import processes
from ps.host.gate import Gate
from ps.job import doctor, rundir
from ps.job.rundir import RunDirectory
from ps.settings.config import Config, parse_args
from ps.settings.errors import ConfigError
from ps.settings.log import log
from ps.settings.topology import Topology
from ps.workloads import catalogue

AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    started_at: float
    """Seconds of the monotonic clock."""
    gate: Gate
    """Still closed; to be opened when nothing can be found wrong any more."""
    run_dir: RunDirectory
    job: str | None
    """A name that all attempts of this job have in common, and no other job has."""
    resume_from: Path | None
    """The run directory whose newest checkpoint to go on from."""
    config: Config
    """With the options of that run; the workload is resolved, and its files are there."""


def ready_bound_s(config: Config) -> float:
    """How long the other ranks wait for rank 0, which may have to fetch data."""
    return catalogue.FETCH_TIMEOUT_S + config.start_timeout


def prepare(topology: Topology, config: Config, argv: Sequence[str] = ()) -> Prepared:
    """Look at the machine, find what to go on from, make the run directory and get the data.

    Blocks while it fetches.

    argv is what config was read from.

    Raises:
        LaunchError: no job can run on this machine as it is.
        ConfigError: one of them cannot be had; nothing is left behind.
        CheckpointUnusable: the run to go on from has no options that can be read.
    """
    started_at = time.monotonic()
    gate = Gate(topology)
    job = (
        None
        if topology.run_id is None
        else processes.fingerprint(processes.Identity.of(os.getppid()))
    )
    own = config.run_dir or rundir.generated(job, again=topology.restart_count > 0)
    again = topology.restart_count > 0 and job is not None and rundir.job_of(own) == job
    source = _source(config, own, again=again)
    if source is not None:
        config = _going_on(argv, source)
    in_place = source is not None and config.run_dir is None
    same = source is not None and source.resolve() == own.resolve()
    begun = config.resume == AUTO and rundir.is_begun(own)  # and killed before its first checkpoint
    if again or in_place or same or begun:
        run_dir = RunDirectory.reopen(source if in_place and source else own)
    else:
        run_dir = RunDirectory.create(own, topology.error_file)
    try:
        doctor.require(doctor.cheap_checks(config, topology.world_size))
        config = replace(config, workload=catalogue.resolve(config))
    except BaseException:
        run_dir.discard()
        raise
    return Prepared(
        started_at=started_at,
        gate=gate,
        run_dir=run_dir,
        job=job,
        resume_from=source,
        config=config,
    )


def with_inherited(config: Config, argv: Sequence[str]) -> Config:
    """config, read from argv, with the options of the run that it would go on from, if any.

    Raises:
        ConfigError, CheckpointUnusable: as prepare().
    """
    source = _source(config, config.run_dir or rundir.generated(None), again=False)
    return config if source is None else _going_on(argv, source)


def _going_on(argv: Sequence[str], source: Path) -> Config:
    return parse_args(argv, rundir.options_of(source))


def _source(config: Config, own: Path, *, again: bool) -> Path | None:
    """The run to go on from: of an earlier attempt of this job first, then what was asked for.

    Raises:
        ConfigError: what was asked for has no checkpoint.
    """
    if again and rundir.has_checkpoints(own):
        return own
    if config.resume is None:
        if again:
            log.info("there is no checkpoint yet: starting from scratch")
        return None
    if config.resume != AUTO:
        asked = Path(config.resume).resolve()
        if not rundir.has_checkpoints(asked):
            raise ConfigError(
                f"--resume {config.resume} has no checkpoints; give the run directory of an "
                "earlier run, such as runs/latest"
            )
        return asked
    if config.run_dir and rundir.has_checkpoints(own):
        return own
    latest = (rundir.PARENT / rundir.LATEST).resolve()
    is_there = own.absolute().parent == rundir.PARENT.absolute()
    if is_there and rundir.has_checkpoints(latest) and not rundir.is_done(latest):
        return latest
    log.info("--resume auto: there is no unfinished run with a checkpoint, starting from scratch")
    return None
