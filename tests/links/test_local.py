"""The link on one host: slow trainers, silence, deaths, memory. test_links.py has what all do."""

from __future__ import annotations

import errno
import json
import os
import queue
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.futures import Future

from ps.host import libc
from ps.host.health import Activity
from ps.links import choice, local
from ps.links.channel import Address, Channel, Listener, connect
from ps.links.choice import choose
from ps.links.local import LocalLink, LocalServer
from ps.links.rpc import RpcServer
from ps.model.flat import FlatModel
from ps.protocol import Assignment, Finished, Reply, Result, Train, Trained, Wait, Weights
from ps.settings.config import Config
from ps.settings.errors import ConfigError, PeerLost
from tests.helpers import (
    COMPUTE,
    Parts,
    end_processes,
    next_line,
    run_threads,
    server_of,
    start,
    topology_of,
    until,
    worker,
)
from tests.jobs import ROOT
from tests.links.helpers import address_of, connect_to, invitation_of, open_local
from tests.plugins import perceptron, wide

MEBIBYTE = 1 << 20
GIBIBYTE = 1 << 30


# Slow trainers


def large_assignment(samples: int, following: int) -> Assignment:
    """Of different indices, as a pickle holds equal ones once."""
    order, *prefetch = (
        Train(0, batch, array("q", range(batch, batch + samples))) for batch in range(1 + following)
    )
    return Assignment(order, Weights(0), prefetch)


class Postman:
    """Rank 1 alone gets its replies at once, and with each of its calls those who wait get the
    reply that is ready for them."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.waiting: dict[int, Future[Reply]] = {}

    def next_order(self, trainer: int, result: Result | None) -> Future[Reply]:
        future: Future[Reply] = Future()
        if trainer == 1:
            future.set_result(Wait())
            while self.waiting:
                self.waiting.popitem()[1].set_result(self._reply)
        else:
            self.waiting[trainer] = future
        return future


@pytest.mark.parametrize(
    ("samples", "following", "num_slow"), [(25_000, 3, 1), (25_000, 3, 4), (1_000_000, 0, 1)]
)
def test_trainers_that_do_not_read_hold_nobody_up_and_miss_nothing(
    samples: int, following: int, num_slow: int
) -> None:
    """Their replies are larger than what the socket takes, and sent by the thread that serves
    another trainer."""
    reply = large_assignment(samples, following)
    postman = Postman(reply)
    end = LocalServer(postman, {})  # type: ignore[arg-type]
    end.open(None, None, lambda trainer, how: None)
    healthy = LocalLink(address_of(end), 1, 10.0, rpc_timeout_s=5.0)
    stopped = {rank: connect(address_of(end), 10.0) for rank in range(2, 2 + num_slow)}
    for rank, channel in stopped.items():
        channel.send(rank)
    for _ in range(2):  # the second time shows that the first message was whole
        for rank, channel in stopped.items():
            channel.send(("next_order", (rank, None)))
        until(lambda: len(postman.waiting) == num_slow, 5.0)
        started = time.monotonic()
        for _ in range(3):
            assert isinstance(healthy.next_order(1, None), Wait)
        assert time.monotonic() - started < 2
        for channel in stopped.values():
            assert channel.receive() == reply
    for opened in (*stopped.values(), healthy, end):
        opened.close()


def test_a_trainer_that_is_gone_before_its_reply_does_not_harm_who_completes_it() -> None:
    lost: queue.SimpleQueue[int] = queue.SimpleQueue()
    postman = Postman(large_assignment(25_000, 3))
    end = LocalServer(postman, {})  # type: ignore[arg-type]
    end.open(None, None, lambda trainer, how: lost.put(trainer))
    healthy = LocalLink(address_of(end), 1, 10.0, rpc_timeout_s=5.0)
    channel = connect(address_of(end), 10.0)
    channel.send(2)
    channel.send(("next_order", (2, None)))
    until(lambda: bool(postman.waiting), 5.0)
    channel.close()
    assert lost.get(timeout=5.0) == 2
    assert isinstance(healthy.next_order(1, None), Wait)
    healthy.close()
    end.close()


# Calls that get no answer


Listen = Callable[[Callable[[Channel], None]], Address]


@pytest.fixture
def listen() -> Iterator[Listen]:
    listeners: list[Listener] = []

    def listen(serve: Callable[[Channel], None]) -> Address:
        listeners.append(listener := Listener(serve))
        listener.open()
        return listener.address

    yield listen
    for listener in listeners:
        listener.close()


def read_on(channel: Channel) -> None:
    while True:
        channel.receive()


def read_nothing(channel: Channel) -> None:
    time.sleep(3)


@pytest.mark.parametrize(("serve", "size"), [(read_on, 1), (read_nothing, MEBIBYTE)])
def test_a_call_that_takes_longer_than_its_limit_names_call_and_option(
    listen: Listen, serve: Callable[[Channel], None], size: int
) -> None:
    """Whether the answer does not come, or the call cannot even be sent."""
    link, started = LocalLink(listen(serve), 1, 5.0, rpc_timeout_s=0.6), time.monotonic()
    with pytest.raises(PeerLost, match=r"^evaluate .* 1 s \(--rpc-timeout\)$"):
        link.evaluate(1, torch.ones(size))
    assert time.monotonic() - started < 2
    with pytest.raises(PeerLost, match=r"^open_mailbox .* 1 s \(--rpc-timeout\)$"):
        link.open_mailbox(FlatModel(perceptron().model()))
    link.close()


def test_without_a_limit_a_call_may_take_longer_than_the_connection(listen: Listen) -> None:
    def serve(channel: Channel) -> None:
        channel.receive()
        channel.receive()
        time.sleep(0.6)
        channel.send(torch.ones(1))

    link = LocalLink(listen(serve), 1, 0.3)
    assert link.evaluate(1, torch.ones(1)).equal(torch.ones(1))
    link.close()


def test_a_connection_that_closes_during_a_call_says_so(listen: Listen) -> None:
    def serve(channel: Channel) -> None:
        channel.receive()
        channel.receive()

    flat = FlatModel(perceptron().model())
    for method, args in (("next_order", (1, None)), ("open_mailbox", (flat,))):
        link = LocalLink(listen(serve), 1, 5.0)
        with pytest.raises(PeerLost, match=rf"^lost the server during {method}: .*\w"):
            getattr(link, method)(*args)
        link.close()


# Deaths


def be_trainer(invitation: str, compute: str, work: str) -> None:
    """A trainer that says what it does: wait for an order, or compute."""
    link = connect_to(invitation, 1)
    worker(1, link, server_of(perceptron(), compute=compute))
    print("joined", flush=True)
    reply = link.next_order(1, None)
    print(type(reply).__name__, flush=True)
    if work == "compute":
        while True:
            torch.ones(500, 500) @ torch.ones(500, 500)
    link.next_order(1, None)


def be_server(compute: str) -> None:
    """A server of two trainers in step, one of which never comes, so that the other waits."""
    end = open_local(server_of(perceptron(), compute=compute, trainers=(1, 2), max_lag=0))
    print(invitation_of(end), flush=True)
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "work"), [("server", "compute"), ("trainer", "wait")])
def test_a_killed_trainer_is_noticed_within_2_s(compute: str, work: str) -> None:
    in_step = 0 if work == "wait" else None
    parts = server_of(perceptron(), compute=compute, trainers=(1, 2), max_lag=in_step)
    lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    end = open_local(parts, lambda trainer, how: lost.put((trainer, how)))
    trainer = start(be_trainer, invitation_of(end), compute, work)
    try:
        assert next_line(trainer) == "joined"
        if work == "compute":
            assert next_line(trainer) == "Assignment"
        else:
            until(lambda: parts.server.progress()[1].activity is Activity.WAITING, 5.0)
        assert lost.empty()
        trainer.kill()
        rank, how = lost.get(timeout=2.0)
    finally:
        end_processes(trainer)
        end.close()
    assert rank == 1 and "connection" in how


def names_left(socket_name: str) -> set[str]:
    """In shared memory, and of that socket; those of other jobs are not ours."""
    unix = Path("/proc/net/unix").read_text().split()
    return {*os.listdir("/dev/shm"), *(name for name in unix if socket_name in name)}


def files_of(process: subprocess.Popen[str]) -> set[str]:
    """Named files and sockets that a process has open, or in memory, outside of its programs."""
    held = psutil.Process(process.pid)
    sockets = {connection.laddr for connection in held.net_connections("unix")}
    maps = {area.path for area in held.memory_maps()}
    names = {str(name) for name in sockets | maps}
    programs = (str(ROOT), sys.prefix)
    return {n for n in names if n.startswith(("/dev/shm", "/tmp")) and not n.startswith(programs)}


@pytest.mark.slow
def test_a_killed_server_is_noticed_within_2_s() -> None:
    server = start(be_server, "server")
    try:
        link = connect_to(next_line(server), 1)
        start_s = []

        def be(who: int) -> None:
            if who == 0:
                time.sleep(0.5)
                server.kill()
                start_s.append(time.monotonic())
                return
            with pytest.raises(PeerLost, match=r"^lost the server during next_order: .*\w"):
                link.next_order(1, None)
            start_s.append(time.monotonic())

        run_threads(be, (0, 1))
    finally:
        end_processes(server)
    link.close()
    assert start_s[1] - start_s[0] < 2


@pytest.mark.slow
@pytest.mark.parametrize("compute", COMPUTE)
def test_when_server_and_trainer_are_killed_nothing_is_left(compute: str) -> None:
    server = start(be_server, compute)
    invitation = next_line(server)
    name = json.loads(invitation)["name"]
    with_server = names_left(name)
    processes = [server]
    try:
        processes.append(start(be_trainer, invitation, compute, "wait"))
        assert next_line(processes[1]) == "joined"
        assert any(name in seen for seen in with_server)
        assert [files_of(process) for process in processes] == [set(), set()]
    finally:
        end_processes(*processes)
    before = {seen for seen in with_server if name not in seen}
    until(lambda: names_left(name) <= before, 2.0)


# Memory


def test_too_little_memory_keeps_the_link_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "available_memory_bytes", lambda: GIBIBYTE)
    assert local.unavailable_reason(2, GIBIBYTE // 2) is None
    reason = local.unavailable_reason(2, GIBIBYTE)
    assert reason is not None and "2048 MiB" in reason and "1024 MiB" in reason
    assert "docker run --memory" in reason


def test_another_system_than_linux_keeps_it_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux" in (local.unavailable_reason(1, 0) or "")


def memory_files() -> set[str]:
    """Anonymous files that this process has open."""
    open_files = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return {
        f"{path.name} {os.readlink(path)}"
        for path in open_files
        if path.is_symlink() and "memfd:parameter-server" in os.readlink(path)
    }


def full_after(monkeypatch: pytest.MonkeyPatch, num_files: int) -> None:
    """The kernel has memory for so many more files."""
    fallocate = os.posix_fallocate
    made: list[int] = []

    def allocate(handle: int, offset: int, length: int) -> None:
        if len(made) == num_files:
            raise OSError(errno.ENOSPC, "No space left on device")
        made.append(handle)
        fallocate(handle, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)


def chosen(wanted: str, compute: str = "trainer") -> tuple[Parts, Any]:
    parts = server_of(perceptron(), compute=compute, trainers=(1, 2))
    return parts, choose(parts.server, parts.compute, parts.trainers, wanted)


@pytest.mark.parametrize("num_files", [None, 0, 1, 3])
def test_with_too_little_memory_rpc_is_used_and_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture, num_files: int | None
) -> None:
    """None is for what shows before anything is taken, a number for what shows after."""
    before = memory_files()
    if num_files is None:
        monkeypatch.setattr(local, "available_memory_bytes", lambda: 1000)
    else:
        full_after(monkeypatch, num_files)
    _, end = chosen("auto")
    assert isinstance(end, RpcServer)
    [line] = [record.getMessage() for record in warnings.records]
    assert "RPC" in line and "docker run --memory" in line and "\n" not in line
    assert memory_files() == before


@pytest.mark.parametrize(("memory_bytes", "why"), [(1000, "MiB"), (GIBIBYTE, "No space left")])
def test_with_too_little_memory_the_link_that_was_asked_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, memory_bytes: int, why: str
) -> None:
    full_after(monkeypatch, 0)
    monkeypatch.setattr(local, "available_memory_bytes", lambda: memory_bytes)
    with pytest.raises(ConfigError, match=rf"^--link local .*{why}.*docker.*--link rpc$"):
        chosen("local")


def test_no_memory_is_needed_where_the_server_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "available_memory_bytes", lambda: 0)
    _, end = chosen("local", compute="server")
    assert isinstance(end, LocalServer)
    end.close()


def test_without_being_asked_the_local_link_is_chosen_and_one_process_needs_none() -> None:
    _, end = chosen("auto")
    assert (end.name, end.invitation["link"]) == ("local", "local")
    end.open(None, None, lambda trainer, how: None)
    meeting = SimpleNamespace(topology=topology_of(1, 3, port=1))
    link = choice.connect(end.invitation, meeting, Config())  # type: ignore[arg-type]
    assert isinstance(link, LocalLink)
    link.close()
    end.close()
    parts = server_of(perceptron(), trainers=(0,))
    alone = choose(parts.server, parts.compute, parts.trainers, "auto")
    assert (alone.name, dict(alone.invitation)) == (None, {})


class Growth:
    """How far resident memory ever exceeds what it was after the first thousand orders."""

    def __init__(self) -> None:
        self.bytes = 0
        self._base = 0

    def see(self, batch: int) -> None:
        if batch == 1000:
            self._base = psutil.Process().memory_info().rss
        elif batch % 1000 == 0 and batch:
            self.bytes = max(self.bytes, psutil.Process().memory_info().rss - self._base)


def pushing(num_orders: int) -> Parts:
    """A gradient of 1 MB for each order."""
    libc.keep_freed_memory()
    return server_of(wide(512, num_train=num_orders), compute="trainer", batch_size=1)


def be_measured_server(num_orders: int) -> None:
    parts = pushing(num_orders)
    next_order, growth = parts.server.next_order, Growth()

    def seen(trainer: int, result: Trained | None) -> object:
        if isinstance(result, Trained):
            growth.see(result.batch)
        return next_order(trainer, result)

    parts.server.next_order = seen  # type: ignore[method-assign,assignment]
    print(invitation_of(open_local(parts)), flush=True)
    parts.server.ended.wait(280)
    print(parts.metrics.updates, growth.bytes, flush=True)


def be_measured_trainer(num_orders: int, invitation: str) -> None:
    link, growth = connect_to(invitation, 1), Growth()
    work = worker(1, link, pushing(num_orders))
    reply = link.next_order(1, None)
    while not isinstance(reply, Finished):
        assert isinstance(reply, Assignment)
        order, reply = reply.order, link.next_order(1, work.do(reply))
        growth.see(getattr(order, "batch", 0))
    link.leave(1)
    print(growth.bytes, flush=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_20_000_gradients_of_1_mb_leave_no_memory_behind() -> None:
    server = start(be_measured_server, 20_000)
    processes = [server]
    try:
        processes.append(start(be_measured_trainer, 20_000, next_line(server)))
        updates, grown = map(int, next_line(server).split())
        assert updates == 20_000
        assert grown < 5 * MEBIBYTE
        assert int(next_line(processes[1])) < 5 * MEBIBYTE
    finally:
        end_processes(*processes)
