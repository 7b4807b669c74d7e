"""How all ranks of one attempt meet."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest
import torch.distributed as dist

from ps.links import rendezvous as meeting
from ps.links.rendezvous import Rendezvous
from ps.settings.errors import LaunchError, Orphaned
from ps.settings.log import log
from ps.settings.topology import Topology
from tests.helpers import free_port, topology_of


def test_a_rank_that_is_connected_has_not_arrived_before_it_is_ready() -> None:
    port = free_port()
    server = Rendezvous(topology_of(0, 2, port), bound_s=0.3)
    Rendezvous(topology_of(1, 2, port), bound_s=0.3)
    with pytest.raises(LaunchError, match=r"^gave up waiting for rank 1 to arrive after 0 s"):
        server.gather()


def test_the_ranks_that_are_missing_are_named() -> None:
    rendezvous = Rendezvous(topology_of(0, 3), bound_s=0.5)
    with pytest.raises(LaunchError, match=r"^gave up waiting for ranks 1, 2 to arrive after 0 s"):
        rendezvous.gather()


def test_waiting_is_said_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "REMIND_INTERVAL_S", 0.2)
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log.addHandler(keep := Keep())
    before = log.level
    log.setLevel("INFO")
    try:
        rendezvous = Rendezvous(topology_of(0, 2), bound_s=0.7)
        with pytest.raises(LaunchError):
            rendezvous.gather()
    finally:
        log.removeHandler(keep)
        log.setLevel(before)
    assert len(lines) == 3
    assert all(line.startswith("waiting for rank 1 to arrive, ") for line in lines)


def test_all_ranks_meet_and_hear_what_is_announced() -> None:
    port = free_port()
    server = Rendezvous(topology_of(0, 3, port), bound_s=10.0)
    heard: dict[int, str] = {}

    def be(rank: int) -> None:
        rendezvous = Rendezvous(topology_of(rank, 3, port), bound_s=10.0)
        heard[rank] = rendezvous.announced(10.0)
        rendezvous.gather()

    threads = [threading.Thread(target=be, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    server.announce("digits")
    server.gather()
    for thread in threads:
        thread.join(10)
    assert heard == {1: "digits", 2: "digits"}


def test_a_second_attempt_does_not_see_what_the_first_one_left() -> None:
    port = free_port()
    first = Rendezvous(topology_of(0, 2, port, attempt=0), bound_s=5.0)
    first.announce("digits")
    second = Rendezvous(topology_of(1, 2, port, attempt=1), bound_s=0.3)
    with pytest.raises(LaunchError, match="gave up waiting for rank 0 to be ready after 0 s"):
        second.announced(0.3)


def test_a_store_that_rank_0_serves_listens_on_loopback_only() -> None:
    me = psutil.Process()
    before = {c.laddr.port for c in me.net_connections() if c.status == psutil.CONN_LISTEN}
    rendezvous = Rendezvous(topology_of(0, 2), bound_s=5.0)
    new = [
        c.laddr
        for c in me.net_connections()
        if c.status == psutil.CONN_LISTEN and c.laddr.port not in before
    ]
    assert [address.ip for address in new] == ["127.0.0.1"], rendezvous


def test_no_store_within_the_bound_is_an_error_with_the_address() -> None:
    port = free_port()
    start = time.monotonic()
    with pytest.raises(LaunchError, match=rf"^no store at 127.0.0.1:{port}: "):
        Rendezvous(topology_of(1, 2, port), bound_s=0.5)
    assert time.monotonic() - start < 3


def of_torchrun(rank: int, port: int) -> Topology:
    """torchrun serves the store."""
    return replace(topology_of(rank, 2, port), agent_hosts_store=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_where_torchrun_is_gone_nobody_waits_for_its_store(rank: int) -> None:
    start = time.monotonic()
    with pytest.raises(Orphaned, match="torchrun, the parent of all ranks, is gone"):
        Rendezvous(of_torchrun(rank, free_port()), bound_s=60.0)
    assert time.monotonic() - start < 1


@pytest.mark.slow
def test_a_store_that_is_gone_while_ranks_are_waited_for_is_torchruns_end() -> None:
    code = (
        "import time; import torch.distributed as dist; from datetime import timedelta; "
        "store = dist.TCPStore('127.0.0.1', 0, 2, True, timedelta(seconds=60), False); "
        "print(store.port, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as torchrun:
        assert torchrun.stdout is not None
        rendezvous = Rendezvous(of_torchrun(0, int(torchrun.stdout.readline())), bound_s=30.0)
        threading.Timer(0.3, torchrun.kill).start()
        with pytest.raises(Orphaned):
            rendezvous.gather()


@pytest.mark.slow
def test_a_store_that_is_gone_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("connection closed\nC++ stack")

    rendezvous = Rendezvous(topology_of(0, 2), bound_s=5.0)
    monkeypatch.setattr(rendezvous, "store", Gone())
    with pytest.raises(LaunchError, match=r"^the store is gone: connection closed$"):
        rendezvous.announced(5.0)
