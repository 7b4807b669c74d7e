"""Unix sockets between processes of one host."""

from __future__ import annotations

import socket  # noqa: TID251
import struct


def user_of(connected: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket. Linux only."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack(
        "3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return int(user)
