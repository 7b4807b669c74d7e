"""Where all ranks of one attempt meet: the store, who has arrived, what was announced."""

from __future__ import annotations

import os
import socket  # noqa: TID251
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist  # noqa: TID251
from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # noqa: TID251

from ps.settings.errors import LaunchError, Orphaned, first_line
from ps.settings.log import log
from ps.settings.topology import SERVER_RANK, Topology

REMIND_INTERVAL_S = 5.0
ANNOUNCED_REMIND_INTERVAL_S = 15.0
POLL_INTERVAL_S = 0.05
END_TIMEOUT_S = 1.0

_ANNOUNCED, _EXTENDED = "announced", "extended"


class Rendezvous:
    """The store that all ranks of one attempt share: who has arrived, what was announced.

    The store of torchrun outlives a restart, so every key carries the attempt's number.
    """

    def __init__(
        self,
        topology: Topology,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
        *,
        remind_interval_s: float = REMIND_INTERVAL_S,
    ) -> None:
        """Connects. Blocks until rank 0 or torchrun serves the store, for timeout_s at most.

        check is called while anything is waited for, and may raise to break off.

        Raises:
            LaunchError: nobody served it in that time.
        """
        self.topology = topology
        self._check = check
        self._remind_interval_s = remind_interval_s
        _stay_on_loopback()
        self.store = dist.PrefixStore(
            f"attempt-{topology.restart_count}",
            _connect(topology, timeout_s, remind_interval_s),
        )

    def extend(self, timeout_s: float) -> None:
        """Rank 0 tells that it may take so long to be ready, counted from the others' start."""
        self.store.set(_EXTENDED, str(timeout_s))

    def announce(self, text: str) -> None:
        """Tell all ranks that rank 0 is ready, with a text for them."""
        self.store.set(_ANNOUNCED, text)

    def announced(self, timeout_s: float) -> str:
        """Wait for announce(), for timeout_s at most, or what extend() told if that is more."""

        def missing() -> list[int]:
            if self._has(_EXTENDED):
                reminder.timeout_s = max(timeout_s, float(self.store.get(_EXTENDED)))
            return [] if self._has(_ANNOUNCED) else [SERVER_RANK]

        reminder = _Reminder(timeout_s, ANNOUNCED_REMIND_INTERVAL_S)
        self._wait(missing, "to be ready", reminder)
        return bytes(self.store.get(_ANNOUNCED)).decode()

    def barrier(self, identity: str, timeout_s: float) -> None:
        """Arrive, which is to have everything ready, and wait until every rank has.

        identity is what identity_of() then gives to all.

        Raises:
            LaunchError: some did not within timeout_s; they are named.
        """
        self.store.set(_arrived(self.topology.rank), identity)
        self._wait(self._missing, "to arrive", _Reminder(timeout_s, self._remind_interval_s))

    def identity_of(self, rank: int) -> str:
        """What that rank brought to barrier(). Once all have passed it."""
        return bytes(self.store.get(_arrived(rank))).decode()

    def _missing(self) -> list[int]:
        return [r for r in range(self.topology.world_size) if not self._has(_arrived(r))]

    def _has(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except dist.DistError as error:
            until = time.monotonic() + END_TIMEOUT_S
            while time.monotonic() < until:  # its sockets close one after the other
                require_torchrun(self.topology)
                time.sleep(POLL_INTERVAL_S)
            raise LaunchError(f"the store is gone: {first_line(error)}") from None

    def _wait(self, lacking: Callable[[], list[int]], what: str, reminder: _Reminder) -> None:
        """Poll: a blocking wait cannot say who is missing, and prints on every timeout."""
        while ranks := lacking():
            self._check()
            who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {what}"
            if reminder.expired:
                raise LaunchError(
                    f"gave up waiting for {who} after {reminder.timeout_s:.0f} s (--start-timeout)"
                )
            if self._speaks(ranks):
                reminder.say(who)
            time.sleep(POLL_INTERVAL_S)

    def _speaks(self, missing: Sequence[int]) -> bool:
        """The lowest rank that is here speaks for all."""
        return self.topology.rank == min(
            set(range(self.topology.world_size)) - set(missing), default=SERVER_RANK
        )


class _Reminder:
    """Says every few seconds what is still waited for."""

    def __init__(self, timeout_s: float, interval_s: float) -> None:
        self._start = time.monotonic()
        self.timeout_s = timeout_s
        self._interval_s = interval_s
        self._said = 0

    @property
    def expired(self) -> bool:
        return time.monotonic() - self._start > self.timeout_s

    def say(self, what: str) -> None:
        waited_s = time.monotonic() - self._start
        if waited_s > (self._said + 1) * self._interval_s:
            self._said += 1
            log.info("waiting for %s, %.0f of %.0f s", what, waited_s, self.timeout_s)


def _arrived(rank: int) -> str:
    return f"arrived-{rank}"


def _stay_on_loopback() -> None:
    """RPC and gloo otherwise listen on whatever the host name resolves to. A user's value wins."""
    interface = "lo" if sys.platform == "linux" else "lo0"
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface)  # noqa: TID251


def _connect(topology: Topology, timeout_s: float, remind_interval_s: float) -> dist.Store:
    address = (topology.master_addr, topology.master_port)
    options: dict[str, Any] = {
        "world_size": topology.world_size,
        "wait_for_workers": False,
        "timeout": timedelta(seconds=timeout_s),
    }
    try:
        if topology.is_server and not topology.agent_hosts_store:
            listener = socket.create_server(address)
            return dist.TCPStore(
                *address, is_master=True, master_listen_fd=listener.detach(), **options
            )
        if topology.agent_hosts_store:
            require_torchrun(topology)
        else:
            _wait_for_listener(address, timeout_s, remind_interval_s)
        return dist.TCPStore(*address, is_master=False, **options)
    except (OSError, dist.DistNetworkError) as error:
        where = f"{address[0]}:{address[1]}"
        raise LaunchError(f"no store at {where}: {first_line(error)}") from None


def require_torchrun(topology: Topology) -> None:
    """Where it serves the store, it does so before it starts a rank, and as long as it lives.

    Raises:
        Orphaned: it does not.
    """
    if not topology.agent_hosts_store:
        return
    address = (topology.master_addr, topology.master_port)
    try:
        socket.create_connection(address, timeout=REMIND_INTERVAL_S).close()
    except ConnectionRefusedError:
        raise Orphaned from None
    except OSError:
        pass


def _wait_for_listener(
    address: tuple[str, int], timeout_s: float, remind_interval_s: float
) -> None:
    """The store's own connect prints a C++ stack for every try that fails."""
    remind = _Reminder(timeout_s, remind_interval_s)
    while True:
        try:
            socket.create_connection(address, timeout=timeout_s).close()
            return
        except OSError:
            if remind.expired:
                raise
        remind.say("rank 0 to serve {}:{}".format(*address))
        time.sleep(POLL_INTERVAL_S)


def record_for_torchrun(error: BaseException) -> None:
    """Put the traceback of the error being handled into torchrun's report."""
    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)
