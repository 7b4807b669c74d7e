from __future__ import annotations

import threading
import time
import uuid
from dataclasses import replace

import pytest

from ps.host import gate
from ps.settings.topology import Topology


def topology_of(rank: int, run_id: str | None) -> Topology:
    return Topology(rank=rank, world_size=6, master_addr="127.0.0.1", master_port=1, run_id=run_id)


def start_waiting(rank: int, run_id: str | None, num_cores: int = 2) -> threading.Thread:
    thread = threading.Thread(
        target=gate.wait, args=(topology_of(rank, run_id), num_cores, 20.0), daemon=True
    )
    thread.start()
    return thread


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


def test_ranks_beyond_the_cores_wait_until_the_gate_opens(run_id: str) -> None:
    closed = gate.Gate(topology_of(0, run_id))
    threads = [start_waiting(rank, run_id) for rank in (2, 3, 4, 5)]
    time.sleep(0.3)
    assert all(thread.is_alive() for thread in threads)
    closed.open()
    for thread in threads:
        thread.join(2)
    assert not any(thread.is_alive() for thread in threads)
    closed.open()


def test_a_rank_that_has_a_core_does_not_wait(run_id: str) -> None:
    closed = gate.Gate(topology_of(0, run_id))
    start = time.monotonic()
    gate.wait(topology_of(1, run_id), 2, 20.0)
    assert time.monotonic() - start < 0.1
    closed.open()


def test_a_rank_that_is_earlier_than_rank_0_waits_all_the_same(run_id: str) -> None:
    thread = start_waiting(2, run_id)
    time.sleep(0.2)
    closed = gate.Gate(topology_of(0, run_id))
    time.sleep(0.3)
    assert thread.is_alive()
    closed.open()
    thread.join(2)
    assert not thread.is_alive()


@pytest.mark.slow
def test_without_a_gate_the_rank_goes_on_soon(run_id: str) -> None:
    start = time.monotonic()
    gate.wait(topology_of(2, run_id), 2, 20.0)
    assert time.monotonic() - start < gate.APPEAR_BOUND_S + 1


def test_without_torchrun_nobody_waits() -> None:
    start = time.monotonic()
    gate.Gate(topology_of(0, None)).open()
    gate.wait(topology_of(2, None), 2, 20.0)
    assert time.monotonic() - start < 0.1


def test_where_another_job_has_the_name_of_the_gate_nobody_waits(run_id: str) -> None:
    other = gate.Gate(topology_of(0, run_id))
    gate.Gate(topology_of(0, run_id)).open()
    assert start_waiting(2, run_id).is_alive()
    other.open()


@pytest.mark.slow
def test_jobs_with_another_store_have_another_gate(run_id: str) -> None:
    first, second = topology_of(0, run_id), replace(topology_of(0, run_id), master_port=2)
    gates = [gate.Gate(first), gate.Gate(second)]
    gates[0].open()
    thread = start_waiting(2, run_id)
    thread.join(gate.APPEAR_BOUND_S + 1)
    assert not thread.is_alive()
    gates[1].open()
