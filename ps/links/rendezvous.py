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
END_BOUND_S = 1.0


class Rendezvous:
    """The store that all ranks of one attempt share: who has arrived, what was announced.

    The store of torchrun outlives a restart, so every key carries the attempt's number.
    """

    def __init__(
        self, topology: Topology, bound_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        """Connects. Blocks until rank 0 or torchrun serves the store.

        check is called while this waits, and raises to end the wait.

        Raises:
            LaunchError: nobody served it within bound_s.
        """
        self.topology = topology
        self._bound_s = bound_s
        self._check = check
        _stay_on_loopback()
        self.store = dist.PrefixStore(
            f"attempt-{topology.restart_count}", _connect(topology, bound_s)
        )

    def announce(self, text: str) -> None:
        """Tell all ranks that rank 0 is ready, with a text for them."""
        self.store.set("announced", text)

    def announced(self, bound_s: float) -> str:
        """Wait for announce(). Rank 0 may be fetching data, so it has a bound of its own."""
        self._wait(
            lambda: [] if self._has("announced") else [SERVER_RANK],
            "to be ready",
            bound_s,
            ANNOUNCED_REMIND_INTERVAL_S,
        )
        return bytes(self.store.get("announced")).decode()

    def gather(self, card: str = "") -> None:
        """Arrive, which is to have everything ready, and wait until every rank has.

        card is what card_of() then gives to all.

        Raises:
            LaunchError: some did not within the bound; they are named.
        """
        self.store.set(_arrived(self.topology.rank), card)
        self._wait(self._missing, "to arrive", self._bound_s, REMIND_INTERVAL_S)

    def card_of(self, rank: int) -> str:
        """What that rank brought to gather(). Once all have gathered."""
        return bytes(self.store.get(_arrived(rank))).decode()

    def _missing(self) -> list[int]:
        return [r for r in range(self.topology.world_size) if not self._has(_arrived(r))]

    def _has(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except dist.DistError as error:
            until = time.monotonic() + END_BOUND_S
            while time.monotonic() < until:  # its sockets close one after the other
                require_torchrun(self.topology)
                time.sleep(POLL_INTERVAL_S)
            raise LaunchError(f"the store is gone: {first_line(error)}") from None

    def _wait(
        self, lacking: Callable[[], list[int]], what: str, bound_s: float, remind_s: float
    ) -> None:
        """Poll: a blocking wait cannot say who is missing, and prints on every timeout."""
        remind = _Reminder(bound_s, remind_s)
        while ranks := lacking():
            self._check()
            who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {what}"
            if remind.expired:
                raise LaunchError(
                    f"gave up waiting for {who} after {bound_s:.0f} s (--start-timeout)"
                )
            if self._speaks(ranks):
                remind.say(who)
            time.sleep(POLL_INTERVAL_S)

    def _speaks(self, missing: Sequence[int]) -> bool:
        """The lowest rank that is here speaks for all."""
        return self.topology.rank == min(
            set(range(self.topology.world_size)) - set(missing), default=SERVER_RANK
        )


class _Reminder:
    """Says every few seconds what is still waited for."""

    def __init__(self, bound_s: float, interval_s: float) -> None:
        self._start = time.monotonic()
        self._bound_s = bound_s
        self._interval_s = interval_s
        self._said = 0

    @property
    def expired(self) -> bool:
        return time.monotonic() - self._start > self._bound_s

    def say(self, what: str) -> None:
        waited_s = time.monotonic() - self._start
        if waited_s > (self._said + 1) * self._interval_s:
            self._said += 1
            log.info("waiting for %s, %.0f of %.0f s", what, waited_s, self._bound_s)


def _arrived(rank: int) -> str:
    return f"arrived-{rank}"


def _stay_on_loopback() -> None:
    """RPC and gloo otherwise listen on whatever the host name resolves to. A user's value wins."""
    interface = "lo" if sys.platform == "linux" else "lo0"
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface)  # noqa: TID251


def _connect(topology: Topology, bound_s: float) -> dist.Store:
    address = (topology.master_addr, topology.master_port)
    options: dict[str, Any] = {
        "world_size": topology.world_size,
        "wait_for_workers": False,
        "timeout": timedelta(seconds=bound_s),
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
            _wait_for_listener(address, bound_s)
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


def _wait_for_listener(address: tuple[str, int], bound_s: float) -> None:
    """The store's own connect prints a C++ stack for every try that fails."""
    remind = _Reminder(bound_s, REMIND_INTERVAL_S)
    while True:
        try:
            socket.create_connection(address, timeout=bound_s).close()
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
