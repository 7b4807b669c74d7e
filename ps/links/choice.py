"""Which link joins server and trainers in this job: the server chooses, the trainers are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from ps.links.channel import Address
from ps.links.local import LocalLink, LocalServer, SharedMailbox, why_not
from ps.links.rendezvous import Rendezvous
from ps.links.rpc import RpcLink, RpcServer, check_rpc
from ps.model.flat import FlatModel
from ps.model.mailbox import Mailbox
from ps.protocol import Server, Service
from ps.server.compute import Compute, OnTrainers
from ps.settings.config import Config
from ps.settings.errors import ConfigError
from ps.settings.log import log


class ServerEnd(Protocol):
    """Where the trainers' calls arrive."""

    @property
    def invitation(self) -> Mapping[str, str]:
        """What a trainer needs to know for connect()."""

    def open(self, rendezvous: Rendezvous, config: Config) -> None:
        """Let the calls in; once all have gathered. May block for config.start_timeout."""

    def close(self) -> None:
        """Once all trainers have left."""


class Link(Server, Protocol):
    """The server as a trainer sees it, and the way there."""

    by_message: bool
    """Whether tensors travel in the messages, as the server does not see the mailbox."""

    def open_mailbox(self, flat: FlatModel) -> Mailbox:
        """The memory that the trainer's model shall use. Once, after join()."""

    def close(self) -> None:
        """After leave(), or after fail()."""


def choose(service: Service, compute: Compute, trainers: Iterable[int], wanted: str) -> ServerEnd:
    """The server's end of the link that was asked for with --link.

    Raises:
        ConfigError: it cannot work here.
        LaunchError: RPC cannot, and nothing else is left.
    """
    if wanted != "rpc":
        flat = compute.flat if isinstance(compute, OnTrainers) else None
        sizes = (flat.total_bytes, flat.trained.stop) if flat else (0, 0)
        members = tuple(trainers)
        reason = why_not(len(members), sum(sizes))
        if reason is None:
            try:
                return _local(service, compute, members, sizes)
            except OSError as error:
                reason = f"{error.strerror} (in a container: docker run --memory)"
        if wanted == "local":
            raise ConfigError(f"--link local cannot work here: {reason}; type --link rpc")
        log.warning("the local link cannot work here, RPC is used instead: %s", reason)
    check_rpc()
    return RpcServer(service)


def _local(
    service: Service, compute: Compute, trainers: tuple[int, ...], sizes: tuple[int, int]
) -> LocalServer:
    mailboxes: dict[int, SharedMailbox] = {}
    if isinstance(compute, OnTrainers):
        mailboxes = {trainer: SharedMailbox(*sizes) for trainer in trainers}
        for trainer, shared in mailboxes.items():
            compute.attach(trainer, shared.mailbox)
    return LocalServer(service, mailboxes)


def connect(invitation: Mapping[str, str], rendezvous: Rendezvous, config: Config) -> Link:
    """The link that the invitation is for. Blocks, for config.start_timeout at most.

    Raises:
        LaunchError: the server cannot be reached.
    """
    if invitation["link"] == "rpc":
        return RpcLink(rendezvous, config)
    address = Address(invitation["name"], invitation["key"])
    return LocalLink(address, rendezvous.topology.rank, config.start_timeout, config.rpc_timeout_s)
