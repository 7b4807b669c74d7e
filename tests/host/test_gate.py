from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ps.host import gate
from ps.host.gate import Gate, name_of
from ps.host.sockets import user_of
from ps.settings.topology import Topology

TIMEOUT_S = 5.0
STRANGER = os.getuid() + 1


@pytest.fixture
def rank_0() -> Topology:
    return topology(f"/tmp/{uuid.uuid4().hex}/attempt_0")


def topology(attempt: str) -> Topology:
    return Topology(
        rank=0,
        world_size=6,
        master_addr="127.0.0.1",
        master_port=1,
        run_id="none",
        error_file=f"{attempt}/0/error.json",
    )


def rank(number: int, rank_0: Topology) -> Topology:
    assert rank_0.error_file is not None
    error_file = rank_0.error_file.replace("/0/", f"/{number}/")
    return replace(rank_0, rank=number, error_file=error_file)


def start_waiting(topology: Topology, **options: Any) -> threading.Thread:
    """With two cores."""
    thread = threading.Thread(
        target=gate.wait, args=(topology, 2, 20.0), kwargs=options, daemon=True
    )
    thread.start()
    return thread


def wait_s(topology: Topology, **options: Any) -> float:
    """How long a rank waits that need not wait until the gate opens."""
    start = time.monotonic()
    thread = start_waiting(topology, **options)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    return time.monotonic() - start


@pytest.fixture
def closed(rank_0: Topology) -> Iterator[Gate]:
    closed = Gate(rank_0)
    yield closed
    closed.open()


def test_ranks_beyond_the_cores_wait_until_the_gate_opens(rank_0: Topology) -> None:
    """Also those that are earlier than rank 0."""
    threads = [start_waiting(rank(2, rank_0), appear_timeout_s=TIMEOUT_S)]
    time.sleep(0.05)
    closed = Gate(rank_0)
    threads += [start_waiting(rank(number, rank_0)) for number in (3, 4, 5)]
    time.sleep(0.2)
    assert all(thread.is_alive() for thread in threads)
    closed.open()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    closed.open()


@pytest.mark.usefixtures("closed")
def test_a_rank_that_has_a_core_does_not_wait(rank_0: Topology) -> None:
    assert wait_s(rank(1, rank_0)) < 1.0


def test_without_a_gate_a_rank_goes_on_soon(rank_0: Topology) -> None:
    assert wait_s(rank(2, rank_0), appear_timeout_s=0.05) < 1.0


@pytest.mark.parametrize("absent", [{"run_id": None}, {"error_file": None}, {"error_file": ""}])
def test_without_torchrun_and_its_files_nobody_waits(
    rank_0: Topology, absent: dict[str, Any]
) -> None:
    started_otherwise = replace(rank_0, **absent)
    Gate(started_otherwise).open()
    assert wait_s(replace(started_otherwise, rank=2), appear_timeout_s=TIMEOUT_S) < 1.0


def test_the_name_is_that_of_one_attempt_and_cannot_be_guessed(rank_0: Topology) -> None:
    """Its random part is in the name of a folder of torchrun, and is not shown."""
    others = [
        replace(rank_0, run_id="another"),
        replace(rank_0, master_port=2),
        replace(rank_0, restart_count=1),
        topology("/tmp/another/attempt_0"),
        topology("/tmp/another/attempt_1"),
    ]
    names = [name_of(other) for other in (rank_0, *others)]
    assert len(set(names)) == len(names)
    assert name_of(rank(5, rank_0)) == names[0]
    assert names[0] is not None and len(names[0]) == len(f"\0parameter-server-{'f' * 64}")


@pytest.mark.usefixtures("closed")
def test_where_somebody_has_the_name_rank_0_goes_on(rank_0: Topology) -> None:
    Gate(rank_0).open()
    assert start_waiting(rank(2, rank_0)).is_alive()


@pytest.mark.usefixtures("closed")
def test_nobody_waits_at_the_gate_of_another_user(rank_0: Topology) -> None:
    assert wait_s(rank(2, rank_0), user=STRANGER) < 1.0


def test_a_process_of_another_user_is_not_kept_at_the_gate(rank_0: Topology) -> None:
    """Or many could keep this job's ranks out."""
    closed = Gate(rank_0, user=STRANGER)
    assert wait_s(rank(2, rank_0)) < 1.0
    closed.open()


def test_the_user_at_the_other_end_of_a_socket_is_known() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert user_of(one) == user_of(other) == os.getuid()
