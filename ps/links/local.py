"""The link on one host: calls over a Unix socket, tensors in memory that both sides see.

The socket is in Linux' abstract namespace and the memory is anonymous (memfd), so that nothing
has a name in a file system: whatever is killed, nothing is left, and the size of /dev/shm does
not matter. Messages are pickles, read only from those who know the key.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor

from ps.errors import LaunchError, PeerLost
from ps.flat import FlatModel, Mailbox
from ps.links.answers import answer, value
from ps.machine import available_memory_bytes
from ps.protocol import Order, Result, Service

KEY_BYTES = 32


class SharedMailbox:
    """A mailbox in memory of its own, that other processes can be given."""

    def __init__(self, weights_bytes: int, gradients_bytes: int) -> None:
        """Takes all of the memory at once, so that none is missing later.

        Raises:
            OSError: there is not enough.
        """
        self.handles = (_memory(weights_bytes), _memory(gradients_bytes))
        self.mailbox = _mailbox(self.handles)

    def close_handles(self) -> None:
        """Once it was handed over. The memory stays while anybody uses it."""
        for handle in self.handles:
            os.close(handle)


def why_not(num_mailboxes: int, mailbox_bytes: int) -> str | None:
    """What keeps this link from working here, or None."""
    if sys.platform != "linux":
        return "it needs Linux"
    needed, available = num_mailboxes * mailbox_bytes, available_memory_bytes()
    if needed > available:
        return (
            f"it needs {needed >> 20} MiB of shared memory, and {available >> 20} MiB are free "
            "(in a container: docker run --memory)"
        )
    return None


class LocalServer:
    """The server's end: a connection and a thread for each trainer."""

    def __init__(self, service: Service, mailboxes: Mapping[int, SharedMailbox]) -> None:
        """mailboxes are by trainer, and empty where the trainers do not compute."""
        self.key = secrets.token_bytes(KEY_BYTES)
        self.address = f"parameter-server-{secrets.token_hex(8)}"
        self._service = service
        self._mailboxes = mailboxes
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen()

    @property
    def invitation(self) -> Mapping[str, str]:
        """The key is for the ranks alone: it is what keeps strangers from sending pickles."""
        return {"link": "local", "address": self.address, "key": self.key.hex()}

    def open(self, rendezvous: object = None, config: object = None) -> None:
        """Answer from now on, in daemon threads."""
        threading.Thread(target=self._accept, name="local link", daemon=True).start()

    def close(self) -> None:
        """Accept nobody any more; those who are connected stay so."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # closed
                return
            connection = Connection(accepted.detach())
            threading.Thread(
                target=self._serve, args=(connection,), name="local link", daemon=True
            ).start()

    def _serve(self, connection: Connection) -> None:
        """Answer one trainer until it is gone."""
        trainer: int | None = None
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            trainer = self._welcome(connection)
            while True:
                self._answer(connection, *_receive(connection))
        except (OSError, EOFError, AuthenticationError):
            if trainer is not None:
                self._service.lost(trainer, "its connection closed")

    def _welcome(self, connection: Connection) -> int:
        trainer: int = _receive(connection)
        shared = self._mailboxes.get(trainer)
        if shared is not None:
            for handle in shared.handles:
                send_handle(connection, handle, None)
            shared.close_handles()
        return trainer

    def _answer(self, connection: Connection, method: str, args: Sequence[Any]) -> None:
        answered = answer(self._service, method, *args)
        if not isinstance(answered, torch.futures.Future):
            _send(connection, answered)
        elif answered.done():
            _send(connection, answered.value())
        else:
            # Whoever completes it sends it: this thread goes on to see if the trainer is lost.
            answered.add_done_callback(lambda future: _send_if_there(connection, future.value()))


class LocalLink:
    """The server, called over the socket (see protocol.Server)."""

    by_message = False

    def __init__(self, address: str, key: bytes, trainer: int, timeout_s: float) -> None:
        """Connects.

        Raises:
            LaunchError: that is not possible.
        """
        self._timeout_s = timeout_s
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        try:
            client.connect(f"\0{address}")
            self._connection = Connection(client.detach())
            answer_challenge(self._connection, key)
            deliver_challenge(self._connection, key)
            _send(self._connection, trainer)
        except (OSError, EOFError, AuthenticationError) as error:
            raise LaunchError(f"no connection to the server: {error}") from None

    def open_mailbox(self, flat: FlatModel) -> Mailbox:
        """The one that the server has for this trainer."""
        handles = (recv_handle(self._connection), recv_handle(self._connection))
        mailbox = _mailbox(handles)
        for handle in handles:
            os.close(handle)
        return mailbox

    def join(self, trainer: int, layout: str | None) -> None:
        self._call("join", trainer, layout)

    def next_order(self, trainer: int, result: Result | None) -> Order:
        order: Order = self._call("next_order", trainer, result)
        return order

    def forward(self, trainer: int, epoch: int, batch: int, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._call("forward", trainer, epoch, batch, inputs)
        return outputs

    def backward(self, trainer: int, output_gradient: Tensor) -> None:
        self._call("backward", trainer, output_gradient)

    def evaluate(self, trainer: int, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._call("evaluate", trainer, inputs)
        return outputs

    def leave(self, trainer: int) -> None:
        self._call("leave", trainer)

    def fail(self, trainer: int, cause: str, exit_code: int) -> None:
        self._call("fail", trainer, cause, exit_code)

    def close(self) -> None:
        self._connection.close()

    def _call(self, method: str, *args: Any) -> Any:
        try:
            _send(self._connection, (method, args))
            answered = _receive(self._connection)
        except BlockingIOError:
            limit = f"{self._timeout_s:.0f} s (--rpc-timeout)"
            raise PeerLost(f"{method} got no answer from the server in {limit}") from None
        except (OSError, EOFError) as error:
            what = type(error).__name__
            raise PeerLost(f"lost the server during {method}: {error or what}") from None
        return value(method, answered)


def _memory(num_bytes: int) -> int:
    """A handle of new memory."""
    handle = os.memfd_create("parameter-server")
    try:
        os.posix_fallocate(handle, 0, max(1, num_bytes))
    except OSError:
        os.close(handle)
        raise
    return handle


def _mailbox(handles: tuple[int, int]) -> Mailbox:
    weights, gradients = (
        torch.frombuffer(mmap.mmap(handle, 0), dtype=torch.uint8) for handle in handles
    )
    return Mailbox(weights, gradients)


def _send_if_there(connection: Connection, message: Any) -> None:
    with suppress(OSError):  # the thread that reads from this trainer sees the same
        _send(connection, message)


def _send(connection: Connection, message: Any) -> None:
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(message)
    connection.send_bytes(stream.getbuffer())


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


class _Pickler(pickle.Pickler):
    """Tensors travel as their bytes: torch's own pickling takes longer than the call."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor:
            return NotImplemented
        flat = value.detach().contiguous().view(-1).view(torch.uint8)
        return _tensor, (bytearray(flat.numpy()), value.dtype, tuple(value.shape))


def _tensor(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(shape)
