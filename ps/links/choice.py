"""Which link joins server and trainers in this job: the server chooses, the trainers are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ps.links.channel import Address
from ps.links.in_process import InProcessServer
from ps.links.local import LocalLink, LocalServer, SharedMailbox, unavailable_reason
from ps.links.rendezvous import Rendezvous
from ps.links.rpc import RpcGroup, RpcLink, RpcServer, check_rpc
from ps.model.flat import FlatModel
from ps.model.mailbox import Mailbox, private_mailbox
from ps.protocol import Server, Service
from ps.server.compute import Compute, TrainerCompute
from ps.settings.config import Config
from ps.settings.errors import ConfigError
from ps.settings.log import log
from ps.settings.topology import SERVER_RANK


class ServerEnd(Protocol):
    """Where the trainers' calls arrive."""

    name: str | None
    """As typed with --link; None where all is one process."""

    @property
    def invitation(self) -> Mapping[str, str]:
        """What a trainer needs to know for connect()."""

    def open(
        self, rendezvous: Rendezvous, config: Config, on_disconnect: Callable[[int, str], None]
    ) -> None:
        """Let the calls in; after the barrier. May block for config.start_timeout.

        on_disconnect is called with the trainer whose connection has closed, and how, if this link
        sees that.
        """

    def close(self) -> None:
        """Once all trainers have left."""


class Link(Server, Protocol):
    """The server as a trainer sees it, and the way there."""

    def open_mailbox(self, flat: FlatModel) -> Mailbox:
        """The memory that the trainer's model shall use. Once, after join()."""

    def close(self) -> None:
        """After leave(), or after fail()."""


def choose(service: Service, compute: Compute, trainers: Sequence[int], wanted: str) -> ServerEnd:
    """The server's end of the link that was asked for with --link.

    Raises:
        ConfigError: it cannot work here.
        LaunchError: RPC cannot, and nothing else is left.
    """
    if SERVER_RANK in trainers:
        return InProcessServer()
    if wanted != "rpc":
        try:
            return _local(service, compute, trainers)
        except OSError as error:
            reason = str(error)
        if wanted == "local":
            raise ConfigError(f"--link local cannot work here: {reason}; type --link rpc")
        log.warning("the local link cannot work here, RPC is used instead: %s", reason)
    check_rpc()
    if not isinstance(compute, TrainerCompute):
        return RpcServer(service)
    for trainer in trainers:
        compute.attach(trainer, private_mailbox(compute.flat))
    return RpcServer(service, compute)


def _local(service: Service, compute: Compute, trainers: Sequence[int]) -> LocalServer:
    """Raises:
    OSError: it cannot work here; the text says why.
    """
    flat = compute.flat if isinstance(compute, TrainerCompute) else None
    sizes = (flat.total_bytes, flat.trained.stop) if flat else (0, 0)
    if reason := unavailable_reason(len(trainers), sum(sizes)):
        raise OSError(reason)
    mailboxes: dict[int, SharedMailbox] = {}
    if isinstance(compute, TrainerCompute):
        try:
            mailboxes = {trainer: SharedMailbox(*sizes) for trainer in trainers}
        except OSError as error:
            raise OSError(f"{error.strerror} (in a container: docker run --memory)") from None
        for trainer, shared in mailboxes.items():
            compute.attach(trainer, shared.mailbox)
    return LocalServer(service, mailboxes)


def connect(invitation: Mapping[str, str], rendezvous: Rendezvous, config: Config) -> Link:
    """The link that the invitation is for. Blocks, for config.start_timeout at most.

    Raises:
        LaunchError: the server cannot be reached.
    """
    if invitation["link"] == "rpc":
        check_rpc()
        return RpcLink(RpcGroup(rendezvous, config))
    address = Address(invitation["name"], invitation["key"])
    return LocalLink(address, rendezvous.topology.rank, config.start_timeout, config.rpc_timeout_s)
