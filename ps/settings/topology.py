"""torchrun's environment variables, read into frozen values. No other module reads them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ps.settings.errors import LaunchError

SERVER_RANK = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """How this process was started, as far as that is known before anything is checked.

    For messages and exit codes of a process whose variables or options may be wrong.
    """

    rank_text: str
    """The rank as it was given, 0 without one; it may be no number at all."""
    error_file: str | None
    """Where torchrun looks for this rank's error."""
    is_under_torchrun: bool

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Origin:
        """Read torchrun's variables. Never fails."""
        return cls(
            rank_text=environ.get("RANK") or str(SERVER_RANK),
            error_file=environ.get("TORCHELASTIC_ERROR_FILE"),
            is_under_torchrun="TORCHELASTIC_RUN_ID" in environ,
        )

    @property
    def is_server(self) -> bool:
        try:
            return int(self.rank_text) == SERVER_RANK
        except ValueError:
            return False

    @property
    def role(self) -> str:
        return "server" if self.is_server else "trainer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The place of this process in the job, and where the ranks of the job meet."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    restart_count: int = 0
    agent_hosts_store: bool = False
    """Whether torchrun itself serves the store at master_addr:master_port."""
    run_id: str | None = None
    """torchrun's name of the job, the same on all ranks and in all attempts."""
    error_file: str | None = None
    """Where torchrun looks for this rank's error, in its own log directory."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], argv: Sequence[str] = ()) -> Topology:
        """Read torchrun's variables. argv only completes the command in the error message.

        Raises:
            LaunchError: a variable is missing, is not a number or contradicts another, or the
                ranks are on several hosts, which the links cannot connect.
        """
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in needed if not environ.get(name)]
        if missing:
            command = shlex.join(
                ["torchrun", "--standalone", "--nproc_per_node=4", "launch.py", *argv]
            )
            raise LaunchError(
                f"not started by torchrun ({', '.join(missing)} not set); type: {command}"
            )
        world_size = _number(environ, "WORLD_SIZE", least=1)
        rank = _number(environ, "RANK", least=0)
        if rank >= world_size:
            raise LaunchError(
                f"RANK must be below WORLD_SIZE, got RANK={rank} WORLD_SIZE={world_size}; "
                "let torchrun set both"
            )
        local_world_size = _number(environ, "LOCAL_WORLD_SIZE", least=1, default=world_size)
        if local_world_size != world_size:
            raise LaunchError(
                f"all ranks must be on one host, but only {local_world_size} of {world_size} are; "
                "give torchrun --nnodes=1"
            )
        return cls(
            rank=rank,
            world_size=world_size,
            master_addr=environ["MASTER_ADDR"],
            master_port=_number(environ, "MASTER_PORT", least=1, most=65535),
            restart_count=_number(environ, "TORCHELASTIC_RESTART_COUNT", least=0, default=0),
            agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            run_id=environ.get("TORCHELASTIC_RUN_ID"),
            error_file=environ.get("TORCHELASTIC_ERROR_FILE"),
        )

    @property
    def is_server(self) -> bool:
        return self.rank == SERVER_RANK

    @property
    def is_alone(self) -> bool:
        """World size 1: the one process is server and trainer."""
        return self.world_size == 1

    @property
    def role(self) -> str:
        return role_of(self.rank)

    @property
    def ranks(self) -> range:
        return range(self.world_size)

    @property
    def own_trainers(self) -> tuple[int, ...]:
        """The trainers that are part of the server's process."""
        return (SERVER_RANK,) if self.is_alone else ()

    @property
    def trainers(self) -> tuple[int, ...]:
        """The ranks that train: 1 to N-1, or rank 0 itself at world size 1."""
        return (SERVER_RANK,) if self.is_alone else tuple(range(1, self.world_size))


def role_of(rank: int) -> str:
    return "server" if rank == SERVER_RANK else "trainer"


def _number(
    environ: Mapping[str, str],
    name: str,
    *,
    least: int,
    most: int | None = None,
    default: int | None = None,
) -> int:
    text = environ.get(name)
    if not text and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        raise LaunchError(
            f"{name} must be a whole number, got {text!r}; let torchrun set it"
        ) from None
    if value < least or (most is not None and value > most):
        limit = f"{least} or more" if most is None else f"{least} to {most}"
        raise LaunchError(f"{name} must be {limit}, got {value}; let torchrun set it")
    return value
