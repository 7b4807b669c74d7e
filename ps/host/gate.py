"""Who loads torch when: rank 0, which checks everything, does not share its core for it.

With more ranks than cores, those beyond wait here until rank 0 has found nothing wrong. They
would not be ready earlier without it, and a mistake is reported seconds sooner. The gate is a
socket in Linux' abstract namespace, so that it leaves nothing behind and opens when rank 0 ends.
It is for processes of one user, and its name holds what other users cannot know.
"""

from __future__ import annotations

import hashlib
import os
import socket  # noqa: TID251
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from ps.host.sockets import user_of
from ps.settings.topology import Topology

APPEAR_TIMEOUT_S = 1.0
POLL_INTERVAL_S = 0.02


class Gate:
    """Rank 0's side: closed from the start until open(), or until this process ends."""

    def __init__(self, topology: Topology, *, user: int | None = None) -> None:
        """Holds up processes of that user: by default of this process's own."""
        self._user = os.getuid() if user is None else user
        self._listener: socket.socket | None = None
        name = name_of(topology)
        if name is not None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(name)
            except OSError:  # somebody has that name: go on without, which costs a second or two
                listener.close()
                return
            listener.listen(topology.world_size)
            self._listener = listener
            threading.Thread(
                target=self._accept, args=(listener,), name="gate", daemon=True
            ).start()

    def open(self) -> None:
        """Let those who wait go on. May be called again."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # close() alone does not wake accept()
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        waiting: list[socket.socket] = []
        with suppress(OSError):  # it was closed
            while True:
                connected, _ = listener.accept()
                if user_of(connected) == self._user:
                    waiting.append(connected)
                else:
                    connected.close()
        for connected in waiting:
            connected.close()


def wait(
    topology: Topology,
    num_cores: int,
    timeout_s: float,
    *,
    appear_timeout_s: float = APPEAR_TIMEOUT_S,
    user: int | None = None,
) -> None:
    """Block a rank beyond the cores until the gate opens, for timeout_s at most.

    The rank goes on where no gate appears in appear_timeout_s, or where it is not of that user,
    by default the user of this process.
    """
    name = name_of(topology)
    if name is None or topology.rank < num_cores:
        return
    appear_until = time.monotonic() + appear_timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting:
        waiting.settimeout(timeout_s)
        while True:
            try:
                waiting.connect(name)
                if user_of(waiting) == (os.getuid() if user is None else user):
                    waiting.recv(1)  # nothing is ever sent: it returns when the gate opens
                return
            except ConnectionRefusedError:
                if time.monotonic() > appear_until:
                    return
                time.sleep(POLL_INTERVAL_S)
            except OSError:
                return


def name_of(topology: Topology) -> str | None:
    """The same on all ranks of an attempt, and on no others; None where there is no gate.

    torchrun keeps the files of an attempt in a folder whose name has a random part.
    """
    if topology.run_id is None or not topology.error_file or sys.platform != "linux":
        return None
    attempt = Path(topology.error_file).parent.parent  # above the folder of the rank
    job = f"{topology.run_id}-{topology.master_port}-{topology.restart_count}-{attempt}"
    return f"\0parameter-server-{hashlib.sha256(job.encode()).hexdigest()}"
