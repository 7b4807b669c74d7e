"""How all ranks of one attempt meet."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest
import torch.distributed as dist

from ps.links.rendezvous import Rendezvous
from ps.settings.errors import LaunchError, Orphaned
from ps.settings.topology import Topology
from tests.helpers import free_port, run_threads, topology_of


def test_a_rank_that_is_connected_has_not_arrived_before_it_is_ready() -> None:
    port = free_port()
    server = Rendezvous(topology_of(0, 2, port), 5.0)
    Rendezvous(topology_of(1, 2, port), 5.0)
    with pytest.raises(LaunchError, match=r"rank 1 .*--start-timeout"):
        server.barrier("0", 0.3)


def test_the_ranks_that_are_missing_are_named() -> None:
    rendezvous = Rendezvous(topology_of(0, 3), 5.0)
    with pytest.raises(LaunchError, match=r"ranks 1, 2 .* after 0 s"):
        rendezvous.barrier("0", 0.3)


def test_waiting_is_said_every_few_seconds_by_the_lowest_rank_that_is_there(
    said: list[str],
) -> None:
    port = free_port()
    first, second = (
        Rendezvous(topology_of(rank, 3, port), 5.0, remind_interval_s=0.2) for rank in (0, 1)
    )

    def wait(rank: int) -> None:
        with pytest.raises(LaunchError):
            (first, second)[rank].barrier(str(rank), 0.7)

    run_threads(wait, (0, 1))
    assert 3 <= len(said) <= 6  # at first rank 1 may be missing too, or rank 0
    assert all("rank" in line and "of 1 s" in line for line in said)
    assert len([line for line in said if "rank 2 " in line]) in (2, 3)


def test_all_ranks_meet_hear_what_is_announced_and_know_each_other() -> None:
    port = free_port()
    server = Rendezvous(topology_of(0, 3, port), 10.0)
    heard: dict[int, list[str]] = {}

    def be(rank: int) -> None:
        rendezvous = Rendezvous(topology_of(rank, 3, port), 10.0) if rank else server
        if rank == 0:
            rendezvous.announce("digits")
        announced = rendezvous.announced(10.0)
        rendezvous.barrier(f"process {rank}", 10.0)
        heard[rank] = [announced, *map(rendezvous.identity_of, range(3))]

    run_threads(be, (0, 1, 2))
    everything = ["digits", "process 0", "process 1", "process 2"]
    assert heard == {0: everything, 1: everything, 2: everything}


def test_rank_0_may_take_longer_than_others_would_wait_if_it_tells_so() -> None:
    port = free_port()
    server = Rendezvous(topology_of(0, 2, port), 5.0)
    trainer = Rendezvous(topology_of(1, 2, port), 5.0)
    server.extend(0.4)
    started = time.monotonic()
    with pytest.raises(LaunchError, match=r"rank 0 .*--start-timeout"):
        trainer.announced(0.1)
    assert 0.4 <= time.monotonic() - started < 2
    server.extend(5.0)
    threading.Timer(0.5, server.announce, ("digits",)).start()
    assert trainer.announced(0.1) == "digits"


def test_a_shorter_time_than_others_wait_changes_nothing() -> None:
    port = free_port()
    server = Rendezvous(topology_of(0, 2, port), 5.0)
    trainer = Rendezvous(topology_of(1, 2, port), 5.0)
    server.extend(0.1)
    threading.Timer(0.4, server.announce, ("digits",)).start()
    assert trainer.announced(5.0) == "digits"


def test_what_is_found_while_others_are_waited_for_breaks_off() -> None:
    class Signalled(Exception):
        pass

    def check() -> None:
        raise Signalled

    rendezvous = Rendezvous(topology_of(0, 2), 5.0, check)
    with pytest.raises(Signalled):
        rendezvous.barrier("0", 5.0)
    with pytest.raises(Signalled):
        rendezvous.announced(5.0)


def test_a_second_attempt_does_not_see_what_the_first_one_left() -> None:
    port = free_port()
    first = Rendezvous(topology_of(0, 2, port, attempt=0), 5.0)
    first.announce("digits")
    second = Rendezvous(topology_of(1, 2, port, attempt=1), 0.3)
    with pytest.raises(LaunchError, match="rank 0 to be ready"):
        second.announced(0.3)


def test_a_store_that_rank_0_serves_listens_on_loopback_only() -> None:
    me = psutil.Process()
    before = {c.laddr.port for c in me.net_connections() if c.status == psutil.CONN_LISTEN}
    rendezvous = Rendezvous(topology_of(0, 2), 5.0)
    new = [
        c.laddr
        for c in me.net_connections()
        if c.status == psutil.CONN_LISTEN and c.laddr.port not in before
    ]
    assert [address.ip for address in new] == ["127.0.0.1"], rendezvous


def test_no_store_in_time_is_an_error_with_the_address_and_is_said_before(said: list[str]) -> None:
    port = free_port()
    start = time.monotonic()
    with pytest.raises(LaunchError, match=rf"127.0.0.1:{port}"):
        Rendezvous(topology_of(1, 2, port), 0.5, remind_interval_s=0.2)
    assert time.monotonic() - start < 3
    assert said and all(f"127.0.0.1:{port}" in line for line in said)


def of_torchrun(rank: int, port: int) -> Topology:
    """torchrun serves the store."""
    return replace(topology_of(rank, 2, port), agent_hosts_store=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_where_torchrun_is_gone_nobody_waits_for_its_store(rank: int) -> None:
    start = time.monotonic()
    with pytest.raises(Orphaned):
        Rendezvous(of_torchrun(rank, free_port()), 60.0)
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
        rendezvous = Rendezvous(of_torchrun(0, int(torchrun.stdout.readline())), 30.0)
        threading.Timer(0.3, torchrun.kill).start()
        with pytest.raises(Orphaned):
            rendezvous.barrier("0", 30.0)


@pytest.mark.slow
def test_a_store_that_is_gone_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("connection closed\nC++ stack")

    rendezvous = Rendezvous(topology_of(0, 2), 5.0)
    monkeypatch.setattr(rendezvous, "store", Gone())
    with pytest.raises(LaunchError, match=r"^the store is gone: connection closed$"):
        rendezvous.announced(5.0)
