"""The link on one host: strangers, silence, deaths, memory. test_links.py has what all links do."""

from __future__ import annotations

import errno
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from ps.host import libc
from ps.links import channel, local
from ps.links.channel import Address, Channel, Listener
from ps.links.choice import choose
from ps.links.local import LocalLink, LocalServer
from ps.links.rpc import RpcServer
from ps.protocol import Evaluate, Finished, Push, Train, Trained
from ps.settings.errors import ConfigError, LaunchError, PeerLost
from tests.helpers import (
    COMPUTE,
    Parts,
    end_processes,
    next_line,
    run_threads,
    server_of,
    start,
    until,
    worker,
)
from tests.jobs import ROOT
from tests.plugins import perceptron, wide

pytestmark = pytest.mark.slow

MEBIBYTE = 1 << 20


def open_end(parts: Parts) -> LocalServer:
    end = choose(parts.server, parts.compute, parts.trainers, "local")
    assert isinstance(end, LocalServer)
    end.open()
    return end


def address_of(end: LocalServer) -> Address:
    return Address(end.invitation["name"], end.invitation["key"])


def connect_to(invitation: str, trainer: int, timeout_s: float = 20.0) -> LocalLink:
    """invitation as JSON, the way it is announced."""
    read = json.loads(invitation)
    return LocalLink(Address(read["name"], read["key"]), trainer, timeout_s)


@pytest.fixture
def parts() -> Parts:
    return server_of(perceptron(), trainers=(1, 2))


@pytest.fixture
def end(parts: Parts) -> Iterator[LocalServer]:
    end = open_end(parts)
    yield end
    end.close()


# Strangers


def raw(address: Address) -> Connection:
    """A connection that has said nothing yet."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(5.0)
    client.connect(f"\0{address.name}")
    client.setblocking(True)
    return Connection(client.detach())


class Bomb:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("knocks", [True, False], ids=["wrong-key", "no-handshake"])
def test_a_stranger_is_refused_and_nothing_he_sends_is_unpickled(
    end: LocalServer, tmp_path: Path, knocks: bool
) -> None:
    fuse = tmp_path / "fuse"
    stranger = raw(address_of(end))
    if knocks:
        with pytest.raises(AuthenticationError):
            answer_challenge(stranger, b"x" * channel.KEY_BYTES)
    with suppress(OSError):
        for _ in range(3):
            stranger.send_bytes(pickle.dumps(Bomb(fuse)))
    with pytest.raises((OSError, EOFError)):  # he is shown the door
        while True:
            stranger.recv_bytes()
    assert not fuse.exists()
    stranger.close()


def test_a_trainer_reads_nothing_from_a_server_that_does_not_know_the_key(tmp_path: Path) -> None:
    fuse, name = tmp_path / "fuse", f"impostor-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen()

    def impostor() -> None:
        connection = Connection(listener.accept()[0].detach())
        with suppress(AuthenticationError, OSError, EOFError):
            deliver_challenge(connection, b"x" * channel.KEY_BYTES)
        with suppress(OSError):
            connection.send_bytes(pickle.dumps(Bomb(fuse)))
        connection.close()

    def trainer() -> None:
        key = (b"k" * channel.KEY_BYTES).hex()
        with pytest.raises(LaunchError, match=r"^no connection to rank 0: \w+"):
            LocalLink(Address(name, key), 1, 2.0)

    with listener:
        run_threads(lambda rank: trainer() if rank else impostor(), (0, 1))
    assert not fuse.exists()


def test_another_user_is_refused_on_either_side(
    end: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one who has read the key in the store, which every user can."""
    monkeypatch.setattr(channel, "_user_of", lambda peer: os.getuid() + 1)
    address = address_of(end)
    with pytest.raises(LaunchError, match="another user answers there"):
        LocalLink(address, 1, 2.0)
    with pytest.raises((EOFError, OSError)), raw(address) as stranger:
        answer_challenge(stranger, bytes.fromhex(address.key))


def test_who_is_at_the_other_end_is_known_by_the_kernel() -> None:
    first, second = socket.socketpair(socket.AF_UNIX)
    with first, second:
        assert channel._user_of(first) == os.getuid()


def test_who_connects_and_says_nothing_keeps_nobody_waiting(parts: Parts, end: LocalServer) -> None:
    silent = [raw(address_of(end)) for _ in range(20)]
    link = LocalLink(address_of(end), 1, 5.0)
    assert isinstance(link.next_order(1, None), Train)
    link.close()
    until(lambda: parts.server.outcome is not None, 2.0)
    assert parts.outcome.cause == "lost trainer rank 1: its connection closed"
    for connection in silent:
        connection.close()


def test_once_closed_nobody_is_let_in(end: LocalServer) -> None:
    link = LocalLink(address_of(end), 1, 5.0)
    link.join(1, None)
    time.sleep(0.1)  # it waits for the next one
    end.close()
    with pytest.raises(LaunchError, match=r"^no connection to rank 0: "):
        LocalLink(address_of(end), 2, 2.0)
    link.join(1, None)
    link.close()


def test_no_server_at_the_address_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"^no connection to rank 0: .*refused"):
        LocalLink(Address("parameter-server-nobody", "00"), 1, 2.0)


def test_a_server_that_ends_during_the_handshake_is_an_error_with_a_reason() -> None:
    name = f"ending-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen()

    def trainer() -> None:
        with pytest.raises(LaunchError, match=r"^no connection to rank 0: \w+"):
            LocalLink(Address(name, "00"), 1, 2.0)

    with listener:
        run_threads(lambda rank: trainer() if rank else listener.accept()[0].close(), (0, 1))


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


def test_a_call_that_takes_longer_than_its_limit_names_call_and_option(listen: Listen) -> None:
    def serve(channel: Channel) -> None:
        while True:
            channel.receive()

    link = LocalLink(listen(serve), 1, 5.0, rpc_timeout_s=1.0)
    with pytest.raises(
        PeerLost, match=r"^evaluate got no answer from the server in 1 s \(--rpc-timeout\)$"
    ):
        link.evaluate(1, torch.ones(1))
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


def test_a_large_message_to_a_server_that_stands_still_has_the_same_limit(listen: Listen) -> None:
    resume = threading.Event()

    def serve(channel: Channel) -> None:
        resume.wait(5)

    link, started = LocalLink(listen(serve), 1, 5.0, rpc_timeout_s=1.0), time.monotonic()
    with pytest.raises(PeerLost, match=r"^evaluate got no answer from the server in 1 s"):
        link.evaluate(1, torch.ones(MEBIBYTE))
    assert time.monotonic() - started < 3
    resume.set()
    link.close()


def test_a_connection_that_closes_during_a_call_says_so(listen: Listen) -> None:
    def serve(channel: Channel) -> None:
        channel.receive()
        channel.receive()

    link = LocalLink(listen(serve), 1, 5.0)
    with pytest.raises(PeerLost, match=r"^lost the server during next_order: \w+"):
        link.next_order(1, None)
    link.close()


# Deaths


def be_trainer(invitation: str, compute: str, work: str) -> None:
    """A trainer that says what it does: wait for an order, or compute."""
    link = connect_to(invitation, 1)
    worker(1, link, server_of(perceptron(), compute=compute))
    print("joined", flush=True)
    order = link.next_order(1, None)
    print(type(order).__name__, flush=True)
    if work == "compute":
        while True:
            torch.ones(500, 500) @ torch.ones(500, 500)
    link.next_order(1, None)


def be_server(compute: str) -> None:
    """A server of two trainers in step, one of which never comes, so that the other waits."""
    end = open_end(server_of(perceptron(), compute=compute, trainers=(1, 2), max_lag=0))
    print(json.dumps(dict(end.invitation)), flush=True)
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "work"), [("server", "compute"), ("trainer", "wait")])
def test_a_killed_trainer_is_noticed_within_2_s_and_named(compute: str, work: str) -> None:
    in_step = 0 if work == "wait" else None
    parts = server_of(perceptron(), compute=compute, trainers=(1, 2), max_lag=in_step)
    end = open_end(parts)
    trainer = start(be_trainer, json.dumps(dict(end.invitation)), compute, work)
    try:
        assert next_line(trainer) == "joined"
        if work == "compute":
            assert next_line(trainer) == "Train"
        else:
            until(lambda: 1 in parts.server._waiting, 5.0)
        trainer.kill()
        until(lambda: parts.server.outcome is not None, 2.0)
    finally:
        end_processes(trainer)
        end.close()
    outcome = parts.outcome
    assert (outcome.cause, outcome.exit_code, outcome.rank) == (
        "lost trainer rank 1: its connection closed",
        4,
        1,
    )
    assert isinstance(parts.server.next_order(2, None).wait(), Finished)


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
            with pytest.raises(PeerLost, match=r"^lost the server during next_order: \w+"):
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


GIBIBYTE = 1 << 30


def test_too_little_memory_keeps_the_link_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "available_memory_bytes", lambda: GIBIBYTE)
    assert local.why_not(2, GIBIBYTE // 2) is None
    assert local.why_not(2, GIBIBYTE // 2 + 1) == (
        "it needs 1024 MiB of shared memory, and 1024 MiB are free "
        "(in a container: docker run --memory)"
    )


def test_another_system_than_linux_keeps_it_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert local.why_not(1, 0) == "it needs Linux"


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


@pytest.mark.parametrize("num_files", [None, 0, 1, 3])
def test_with_too_little_memory_rpc_is_used_and_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture, num_files: int | None
) -> None:
    """None is for what shows before anything is taken, a number for what shows after."""
    before = memory_files()
    parts = server_of(perceptron(), compute="trainer", trainers=(1, 2))
    if num_files is None:
        monkeypatch.setattr(local, "available_memory_bytes", lambda: 1000)
    else:
        full_after(monkeypatch, num_files)
    end = choose(parts.server, parts.compute, parts.trainers, "auto")
    assert isinstance(end, RpcServer)
    [line] = [record.getMessage() for record in warnings.records]
    assert line.startswith("the local link cannot work here, RPC is used instead: ")
    assert "docker run --memory" in line and "\n" not in line
    assert memory_files() == before


def test_with_too_little_memory_the_link_that_was_asked_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = server_of(perceptron(), compute="trainer", trainers=(1, 2))
    monkeypatch.setattr(local, "available_memory_bytes", lambda: 1000)
    with pytest.raises(
        ConfigError, match=r"^--link local cannot work here: .*docker.*; type --link rpc$"
    ):
        choose(parts.server, parts.compute, parts.trainers, "local")
    full_after(monkeypatch, 0)
    monkeypatch.setattr(local, "available_memory_bytes", lambda: GIBIBYTE)
    with pytest.raises(ConfigError, match=r"^--link local cannot work here: No space left"):
        choose(parts.server, parts.compute, parts.trainers, "local")


def test_no_memory_is_needed_where_the_server_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "available_memory_bytes", lambda: 0)
    parts = server_of(perceptron(), trainers=(1, 2))
    end = choose(parts.server, parts.compute, parts.trainers, "local")
    assert isinstance(end, LocalServer)
    end.close()


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
    print(json.dumps(dict(open_end(parts).invitation)), flush=True)
    parts.server.ended.wait(280)
    print(parts.metrics.updates, growth.bytes, flush=True)


def be_measured_trainer(num_orders: int, invitation: str) -> None:
    link, growth = connect_to(invitation, 1), Growth()
    work = worker(1, link, pushing(num_orders))
    order = link.next_order(1, None)
    while not isinstance(order, Finished):
        assert isinstance(order, Train | Evaluate)
        order = link.next_order(1, work.do(order))
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


# Messages

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
]
SHAPES = [(3, 4), (0,), (2, 0, 3), (), (1,), (2, 3, 4, 5)]


def sent_and_received(message: Any) -> Any:
    here, there = (Connection(end.detach()) for end in socket.socketpair())
    Channel(here).send(message)
    received = Channel(there).receive()
    here.close()
    there.close()
    return received


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_kind_survive_a_message(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    received = sent_and_received((1, {"tensor": tensor}))[1]["tensor"]
    assert (received.dtype, received.shape) == (dtype, tensor.shape)
    assert received.reshape(-1).view(torch.uint8).tolist() == (
        tensor.reshape(-1).view(torch.uint8).tolist()
    )


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(3).expand(4, 3),
        torch.arange(10)[2:9:3],
        torch.randn(3, requires_grad=True),
        torch.randn(3, requires_grad=True) * 2,
        torch.randn(3, dtype=torch.complex64).conj(),
        nn.Parameter(torch.randn(3)),
    ],
    ids=["permuted", "channels-last", "expanded", "slice", "leaf", "graph", "conj", "parameter"],
)
def test_the_values_of_a_tensor_that_is_no_plain_block_survive_a_message(tensor: Tensor) -> None:
    received = sent_and_received(tensor)
    assert torch.equal(received, tensor.detach().resolve_conj())


def test_what_was_received_can_be_written_and_is_nobody_elses() -> None:
    tensor = torch.zeros(4)
    received = sent_and_received(tensor)
    received += 1
    assert tensor.tolist() == [0.0] * 4


def test_the_values_of_the_protocol_survive_a_message() -> None:
    push = Push(7, (1, 3), torch.arange(5, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8))
    received = sent_and_received(("next_order", (1, Trained(0, 3, 8, 0.5, push))))[1][1]
    assert (received.batch, received.loss) == (3, 0.5)
    assert (received.gradient.version, received.gradient.unused) == (7, (1, 3))
    assert received.gradient.gradients.tolist() == [0, 1, 2, 3, 4]
    assert received.gradient.buffers.numel() == 0
