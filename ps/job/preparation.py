"""What rank 0 decides before torch is loaded, so that a mistake is said in a second or two."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ps.host import processes
from ps.host.gate import Gate
from ps.job import preflight, rundir
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
    """Still closed; to be opened once options, plug-in and data have been checked."""
    run_dir: RunDirectory
    job: str | None
    """A name that all attempts of this job have in common, and no other job has."""
    resume_from: Path | None
    """The run directory whose newest checkpoint to go on from."""
    config: Config
    """With the options of that run; the workload is resolved, and its files are there."""

    @property
    def ready_timeout_s(self) -> float:
        """See the function of that name."""
        return ready_timeout_s(self.config)

    @property
    def is_in_place(self) -> bool:
        """Whether the run continues in the folder of the run that it continues."""
        source = self.resume_from
        return source is not None and source.resolve() == self.run_dir.path.resolve()


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What decides where a run goes on. Paths are resolved, except `own`."""

    resume: str | None
    """As typed."""
    is_later_attempt: bool
    """Whether an earlier attempt of this job has used the folder `own`."""
    own: Path
    """--run-dir, or the folder that this job has without it."""
    own_is_typed: bool
    own_resolved: Path
    own_has_checkpoints: bool
    own_is_begun: bool
    """Whether a run has begun there that is not done."""
    own_is_in_runs: bool
    asked: Path
    """The folder that `resume` names, unless it is "auto"."""
    asked_has_checkpoints: bool
    latest: Path
    """What runs/latest points to."""
    latest_is_unfinished: bool
    """Whether it has checkpoints and is not done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a run begins."""

    source: Path | None
    """The run directory to go on from, None to start from scratch."""
    run_dir: Path
    reopens: bool
    """Whether that folder holds an earlier run, which goes on there; else it must be new."""
    message: str | None = None
    """For the log."""


def decide(facts: Facts) -> Start:
    """Go on from an earlier attempt of this job first, then from what was asked for.

    Raises:
        ConfigError: what was asked for has no checkpoints.
    """
    source, message = _source(facts)
    if source is not None and not facts.own_is_typed:
        return Start(source=source, run_dir=source, reopens=True)
    is_own = source in (facts.own, facts.own_resolved)
    was_killed_early = facts.resume == AUTO and facts.own_is_begun  # before its first checkpoint
    reopens = facts.is_later_attempt or is_own or was_killed_early
    return Start(source=source, run_dir=facts.own, reopens=reopens, message=message)


def _source(facts: Facts) -> tuple[Path | None, str | None]:
    """The run directory to go on from, and what to log."""
    if facts.is_later_attempt and facts.own_has_checkpoints:
        return facts.own, None
    if facts.resume is None:
        message = "there is no checkpoint yet: starting from scratch"
        return None, message if facts.is_later_attempt else None
    if facts.resume != AUTO:
        if not facts.asked_has_checkpoints:
            raise ConfigError(
                f"--resume {facts.resume} has no checkpoints; give the run directory of an "
                "earlier run, such as runs/latest"
            )
        return facts.asked, None
    if facts.own_is_typed and facts.own_has_checkpoints:
        return facts.own, None
    if facts.own_is_in_runs and facts.latest_is_unfinished:
        return facts.latest, None
    return None, (
        "--resume auto: there is no unfinished run with a checkpoint, starting from scratch"
    )


def ready_timeout_s(config: Config) -> float:
    """How long the other ranks wait for rank 0, which may have to fetch data."""
    return catalogue.FETCH_TIMEOUT_S + config.start_timeout


def prepare(topology: Topology, config: Config, argv: Sequence[str] = ()) -> Prepared:
    """Find what to go on from, make the run directory, check the machine and get the data.

    argv is what config was read from. Blocks while data is fetched.

    Raises:
        LaunchError: no job can run on this machine as it is.
        ConfigError: one of them cannot be had; nothing is left behind.
        CheckpointUnusable: the run to go on from has no options that can be read.
    """
    started_at = time.monotonic()
    gate = Gate(topology)
    job = _job_of(topology)
    start = decide(_facts(config, job, is_restarted=topology.restart_count > 0))
    if start.message:
        log.info("%s", start.message)
    if start.source is not None:
        config = _going_on(argv, start.source)
    if start.reopens:
        run_dir = RunDirectory.reopen(start.run_dir)
    else:
        run_dir = RunDirectory.create(start.run_dir, topology.error_file)
    try:
        preflight.require(preflight.preflight_checks(config, topology.world_size))
        config = replace(config, workload=catalogue.resolve(config))
    except BaseException:
        run_dir.discard()
        raise
    return Prepared(
        started_at=started_at,
        gate=gate,
        run_dir=run_dir,
        job=job,
        resume_from=start.source,
        config=config,
    )


def with_inherited(config: Config, argv: Sequence[str]) -> Config:
    """config, read from argv, with the options of the run that it would go on from, if any.

    Raises:
        ConfigError, CheckpointUnusable: as prepare().
    """
    source = decide(_facts(config, None, is_restarted=False)).source
    return config if source is None else _going_on(argv, source)


def _going_on(argv: Sequence[str], source: Path) -> Config:
    return parse_args(argv, rundir.options_of(source))


def _job_of(topology: Topology) -> str | None:
    """All ranks of all attempts have the same torchrun; without torchrun there is no name."""
    if topology.run_id is None:
        return None
    return processes.fingerprint(processes.Identity.of(os.getppid()))


def _facts(config: Config, job: str | None, *, is_restarted: bool) -> Facts:
    own = config.run_dir or rundir.generated(job, again=is_restarted)
    asked = Path(config.resume or "").resolve()
    latest = (rundir.PARENT / rundir.LATEST).resolve()
    return Facts(
        resume=config.resume,
        is_later_attempt=is_restarted and job is not None and rundir.job_of(own) == job,
        own=own,
        own_is_typed=config.run_dir is not None,
        own_resolved=own.resolve(),
        own_has_checkpoints=rundir.has_checkpoints(own),
        own_is_begun=rundir.is_begun(own),
        own_is_in_runs=own.absolute().parent == rundir.PARENT.absolute(),
        asked=asked,
        asked_has_checkpoints=rundir.has_checkpoints(asked),
        latest=latest,
        latest_is_unfinished=rundir.has_checkpoints(latest) and not rundir.is_done(latest),
    )
