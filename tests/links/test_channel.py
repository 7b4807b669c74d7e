"""Connections between processes: strangers, silence, peers that stand still; and shared memory."""

from __future__ import annotations

import errno
import io
import os
import pickle
import socket
import struct
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import closing, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps.links import channel
from ps.links.channel import Address, Channel, Listener, connect
from ps.links.memory import Memory
from ps.protocol import Assignment, Push, Train, Trained, Weights
from ps.settings.errors import LaunchError
from tests.helpers import run_threads, until

MEBIBYTE = 1 << 20


# Strangers


def answer_all(channel: Channel) -> None:
    """A server that echoes."""
    while True:
        channel.send(channel.receive())


@pytest.fixture
def server() -> Iterator[Listener]:
    listener = Listener(answer_all)
    listener.open()
    yield listener
    listener.close()


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
    server: Listener, tmp_path: Path, knocks: bool
) -> None:
    fuse = tmp_path / "fuse"
    stranger = raw(server.address)
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


def listening(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen()
    return listener


def test_a_trainer_reads_nothing_from_a_server_that_does_not_know_the_key(tmp_path: Path) -> None:
    fuse, name = tmp_path / "fuse", f"impostor-{os.getpid()}"

    def impostor() -> None:
        connection = Connection(listener.accept()[0].detach())
        with suppress(AuthenticationError, OSError, EOFError):
            deliver_challenge(connection, b"x" * channel.KEY_BYTES)
        with suppress(OSError):
            connection.send_bytes(pickle.dumps(Bomb(fuse)))
        connection.close()

    def trainer() -> None:
        with pytest.raises(LaunchError, match=r"rank 0: \w+"):
            connect(Address(name, (b"k" * channel.KEY_BYTES).hex()), 2.0)

    with listening(name) as listener:
        run_threads(lambda rank: trainer() if rank else impostor(), (0, 1))
    assert not fuse.exists()


def test_another_user_is_refused_on_either_side(server: Listener) -> None:
    """Also one who has read the key in the store, which every user can."""
    another = os.getuid() + 1
    with pytest.raises(LaunchError, match="another user"):
        connect(server.address, 2.0, user=another)
    for_another = Listener(answer_all, user=another)
    for_another.open()
    with pytest.raises((EOFError, OSError)), raw(for_another.address) as stranger:
        answer_challenge(stranger, bytes.fromhex(for_another.address.key))
    for_another.close()


def test_who_connects_and_says_nothing_keeps_nobody_waiting(server: Listener) -> None:
    silent = [raw(server.address) for _ in range(20)]
    here = connect(server.address, 5.0)
    here.send("echo")
    assert here.receive() == "echo"
    for connection in (*silent, here):
        connection.close()


def test_once_closed_nobody_is_let_in_and_who_is_connected_stays(server: Listener) -> None:
    here = connect(server.address, 5.0)
    time.sleep(0.1)  # it waits for the next one
    server.close()
    with pytest.raises(LaunchError):
        connect(server.address, 2.0)
    here.send("echo")
    assert here.receive() == "echo"
    here.close()


def test_no_server_at_the_address_is_an_error() -> None:
    with pytest.raises(LaunchError, match="refused"):
        connect(Address("parameter-server-nobody", "00"), 2.0)


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "says-nothing"])
def test_a_server_that_goes_no_further_in_the_handshake_is_an_error(ends: bool) -> None:
    name = f"ending-{os.getpid()}"
    with listening(name) as listener:
        accepted: list[socket.socket] = []

        def be(rank: int) -> None:
            if rank == 0:
                accepted.append(listener.accept()[0])
                if ends:
                    accepted[0].close()
                return
            with pytest.raises(LaunchError, match=r"rank 0: \w+" if ends else "--start-timeout"):
                connect(Address(name, "00"), 0.3)

        run_threads(be, (0, 1))
        accepted[0].close()


# Peers that stand still


Ends = tuple[Channel, socket.socket]


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """A channel, and what is at its other end; the parameter is the size of its buffer."""
    here, there = socket.socketpair()
    if num_bytes := getattr(request, "param", None):
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)
    channel = Channel(Connection(here.detach()))
    yield channel, there
    channel.close()
    there.close()


def large_order(samples: int = 25_000) -> Assignment:
    order, *prefetch = (Train(0, b, array("q", range(b, b + samples))) for b in range(3))
    return Assignment(order, Weights(3), prefetch)


def read_to_the_end(there: socket.socket, num_bytes: int, piece: int = 65_536) -> bytes:
    read = io.BytesIO()
    there.settimeout(10.0)
    while read.tell() < num_bytes:
        read.write(there.recv(piece))
    return read.getvalue()


def sent(message: Any) -> bytes:
    """All bytes of a message, as send() sends it to one who reads."""
    here, there = socket.socketpair()
    channel = Channel(Connection(here.detach()))
    sender = threading.Thread(target=lambda: (channel.send(message), channel.close()))
    sender.start()
    read = b"".join(iter(lambda: there.recv(1 << 16), b""))
    sender.join()
    there.close()
    return read


@pytest.mark.parametrize(
    ("message", "ends"),
    [
        ("small", None),
        (large_order(), None),
        (torch.arange(MEBIBYTE, dtype=torch.int64), None),
        (torch.arange(100_000, dtype=torch.int64), 5_000),
    ],
    ids=["small", "order", "8-MiB", "tiny-buffer"],
    indirect=["ends"],
)
def test_what_does_not_fit_follows_byte_for_byte(ends: Ends, message: Any) -> None:
    here, there = ends
    expected = sent(message)
    started = time.monotonic()
    rest = here.send_what_fits(message)
    assert time.monotonic() - started < 1
    assert bool(rest) == (len(expected) > 1000)
    sender = threading.Thread(target=here.send_rest, args=(rest,))
    sender.start()
    assert read_to_the_end(there, len(expected)) == expected
    sender.join(10)
    there.setblocking(False)
    with pytest.raises(BlockingIOError):  # and nothing else follows
        there.recv(1)


def test_a_message_to_a_full_socket_is_all_rest_and_does_not_block(ends: Ends) -> None:
    here, there = ends
    expected = sent("first")
    rests = [here.send_what_fits(torch.zeros(MEBIBYTE)), here.send_what_fits("first")]
    assert bytes(rests[1]) == expected
    total = len(sent(torch.zeros(MEBIBYTE))) + len(expected)
    sender = threading.Thread(target=lambda: [here.send_rest(rest) for rest in rests])
    sender.start()
    assert read_to_the_end(there, total).endswith(expected)
    sender.join(10)


@pytest.mark.parametrize("fits", [True, False], ids=["at-once", "rest"])
def test_a_peer_that_is_gone_is_an_error_in_both_halves_of_sending(ends: Ends, fits: bool) -> None:
    here, there = ends
    rest = memoryview(b"") if fits else here.send_what_fits(torch.zeros(MEBIBYTE))
    there.close()
    with pytest.raises(OSError):
        here.send_what_fits("small") if fits else here.send_rest(rest)


def test_a_peer_that_answers_and_closes_at_once_is_no_error() -> None:
    """It has the whole message: send() must not find it closed, nor receive() lose the answer."""

    def serve(channel: Channel) -> None:
        channel.send(channel.receive())

    listener = Listener(serve)
    listener.open()
    for number in range(200):
        with closing(connect(listener.address, 5.0)) as here:
            here.send(number)
            assert here.receive() == number
    listener.close()


def test_a_peer_that_goes_while_the_rest_is_sent_ends_the_sending(ends: Ends) -> None:
    here, there = ends
    rest = here.send_what_fits(torch.zeros(MEBIBYTE))
    threading.Timer(0.1, there.close).start()
    with pytest.raises(OSError):
        here.send_rest(rest)


def test_the_limit_holds_for_the_rest_as_for_all_that_is_sent_or_received(ends: Ends) -> None:
    here, _ = ends
    here.limit(0.1)
    with pytest.raises(BlockingIOError):
        here.receive()
    rest = here.send_what_fits(torch.zeros(MEBIBYTE))
    for send in (lambda: here.send_rest(rest), lambda: here.send(torch.zeros(MEBIBYTE))):
        started = time.monotonic()
        with pytest.raises(BlockingIOError):
            send()
        assert 0.05 < time.monotonic() - started < 1


def test_a_channel_that_was_closed_meanwhile_sends_nothing(ends: Ends) -> None:
    here, _ = ends
    rest = here.send_what_fits(torch.zeros(MEBIBYTE))
    here.close()
    with pytest.raises(OSError):
        here.send_rest(rest)
    with pytest.raises(OSError):
        here.send_what_fits("small")


@pytest.mark.parametrize("num_bytes", [0, 1, 0x7FFFFFFF, 0x80000000, 5 << 30])
def test_the_header_is_what_a_connection_reads(num_bytes: int) -> None:
    header = io.BytesIO(channel._header(num_bytes))
    (length,) = struct.unpack("!i", header.read(4))
    if length == -1:
        (length,) = struct.unpack("!Q", header.read(8))
    assert (length, header.read()) == (num_bytes, b"")


# Messages

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
]
SHAPES = [(3, 4), (0,), (2, 0, 3), (), (1,), (2, 3, 4, 5)]


def sent_and_received(message: Any) -> Any:
    here, there = (Channel(Connection(end.detach())) for end in socket.socketpair())
    here.send(message)
    received = there.receive()
    here.close()
    there.close()
    return received


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_kind_survive_a_message(dtype: torch.dtype) -> None:
    tensors = [(torch.randn(shape) * 3).to(dtype) for shape in SHAPES]
    received = sent_and_received((1, {"tensors": tensors}))[1]["tensors"]
    for tensor, got in zip(tensors, received, strict=True):
        assert (got.dtype, got.shape) == (dtype, tensor.shape)
        assert got.reshape(-1).view(torch.uint8).tolist() == (
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
    trained = Trained(0, 3, 8, 0.5, Push(7, (1, 3)))
    method, (trainer, received) = sent_and_received(("next_order", (1, trained)))
    assert (method, trainer, received.batch, received.loss) == ("next_order", 1, 3, 0.5)
    assert received.gradient == Push(7, (1, 3))
    assert sent_and_received(large_order(3)) == large_order(3)


# Memory


def test_memory_that_was_handed_over_is_the_same_for_both_until_the_last_is_gone() -> None:
    here, there = (Channel(Connection(end.detach())) for end in socket.socketpair())
    memory = Memory.allocate(8)
    own = memory.bytes()
    here.send_memory(memory)
    memory.close()
    received = there.receive_memory()
    other, private = received.bytes(), received.bytes(private=True)
    received.close()
    assert (own.dtype, own.shape) == (torch.uint8, (8,))
    own[0], other[1] = 7, 8
    assert own.tolist() == other.tolist() == private.tolist() == [7, 8, 0, 0, 0, 0, 0, 0]
    private[2] = 9
    assert own[2] == 0
    here.close()
    there.close()


def open_handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_that_nobody_uses_any_more_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_handles()
    memory = Memory.allocate(0)
    assert len(memory.bytes()) == 1
    del memory
    until(lambda: open_handles() == before, 2.0)

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError):
        Memory.allocate(1)
    assert open_handles() == before
