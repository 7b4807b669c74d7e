"""Private connections between the processes of one host, and memory that they share.

The sockets are in Linux' abstract namespace and the memory is anonymous (memfd), so that nothing
has a name in a file system: whatever is killed, nothing is left, and the size of /dev/shm does
not matter. Messages are pickles, read only from those who know the key.
"""

from __future__ import annotations

import math
import os
import secrets
import socket  # noqa: TID251
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError  # noqa: TID251
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge  # noqa: TID251
from multiprocessing.reduction import recv_handle, send_handle  # noqa: TID251
from typing import Any

from ps.host.sockets import user_of
from ps.links.memory import Memory
from ps.model.packing import decode, encode
from ps.settings.errors import LaunchError

KEY_BYTES = 32


def is_supported() -> bool:
    return sys.platform == "linux"


@dataclass(frozen=True, slots=True)
class Address:
    """Where to call, and the key. Who has it must be of this user, too: it went through a store."""

    name: str
    key: str


class Channel:
    """One end of a connection. Calls block; an end that is gone raises EOFError or OSError."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # What sends holds a handle of its own: another thread may close the channel meanwhile.
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))

    def limit(self, timeout_s: float | None) -> None:
        """What is sent or received raises BlockingIOError after that; None for never."""
        micros = math.ceil((timeout_s or 0) * 1e6)
        bound = struct.pack("ll", *divmod(micros, 10**6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, bound)

    def send(self, message: Any) -> None:
        if rest := self.send_what_fits(message):  # sending nothing fails if the peer has closed
            self.send_rest(rest)

    def send_what_fits(self, message: Any) -> memoryview:
        """Does not block. Gives what did not fit, which send_rest() must send before anything else
        is sent."""
        content = encode(message)
        header = _header(len(content))
        try:
            sent = self._socket.sendmsg([header, content], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        if sent < len(header):
            return memoryview(header + content)[sent:]
        return memoryview(content)[sent - len(header) :]

    def send_rest(self, rest: memoryview) -> None:
        """What send_what_fits() gave."""
        self._socket.sendall(rest)

    def receive(self) -> Any:
        return decode(self._connection.recv_bytes())

    def send_memory(self, memory: Memory) -> None:
        """Hand the other end the memory itself, which receive_memory() takes."""
        send_handle(self._connection, memory.handle, None)

    def receive_memory(self) -> Memory:
        return Memory(recv_handle(self._connection))

    def close(self) -> None:
        self._socket.close()
        self._connection.close()


class Listener:
    """Takes calls, each in a daemon thread of its own."""

    def __init__(self, serve: Callable[[Channel], None], user: int | None = None) -> None:
        """serve is called with each channel, and may raise EOFError or OSError at its end.

        user is the id of the one user who is let in: by default that of this process.
        """
        self._serve = serve
        self._user = os.getuid() if user is None else user
        self._key = secrets.token_bytes(KEY_BYTES)
        name = f"parameter-server-{secrets.token_hex(8)}"
        self.address = Address(name, self._key.hex())
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{name}")
        self._listener.listen()

    def open(self) -> None:
        """Answer from now on; who called earlier has waited."""
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def close(self) -> None:
        """Accept nobody any more; those who are connected stay so."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close() alone does not wake accept()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # closed
                return
            if user_of(accepted) != self._user:
                accepted.close()
                continue
            connection = Connection(accepted.detach())
            threading.Thread(
                target=self._admit, args=(connection,), name="channel", daemon=True
            ).start()

    def _admit(self, connection: Connection) -> None:
        """A thread for each, so that a stranger who says nothing holds nobody up."""
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            with closing(Channel(connection)) as channel:
                self._serve(channel)
        except (OSError, EOFError, AuthenticationError):
            pass
        finally:
            connection.close()


def _header(num_bytes: int) -> bytes:
    """What a multiprocessing Connection expects before a message of so many bytes."""
    if num_bytes <= 0x7FFFFFFF:
        return struct.pack("!i", num_bytes)
    return struct.pack("!iQ", -1, num_bytes)


def connect(address: Address, timeout_s: float, user: int | None = None) -> Channel:
    """Call. What is sent or received later raises BlockingIOError after timeout_s, see limit().

    user is the id of the one user who may answer: by default that of this process.

    Raises:
        LaunchError: nobody answers, or not with the same key.
    """
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(os.dup(caller.fileno()))
    channel = Channel(connection)
    channel.limit(timeout_s)
    try:
        with caller:
            caller.connect(f"\0{address.name}")
            if user_of(caller) != (os.getuid() if user is None else user):
                raise AuthenticationError("another user answers there")
        answer_challenge(connection, bytes.fromhex(address.key))
        deliver_challenge(connection, bytes.fromhex(address.key))
    except (OSError, EOFError, AuthenticationError) as error:
        channel.close()
        reason = str(error) or type(error).__name__
        if isinstance(error, BlockingIOError):
            reason = f"it gave no answer in {timeout_s:.0f} s (--start-timeout)"
        raise LaunchError(f"no connection to rank 0: {reason}") from None
    return channel
