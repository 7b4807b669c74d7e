"""Who loads torch when: rank 0, which checks everything, does not share its core for it.

With more ranks than cores, those beyond wait here until rank 0 has found nothing wrong. They
would not be ready earlier without it, and a mistake is told seconds sooner. The gate is a socket
in Linux' abstract namespace, so that it leaves nothing behind and opens when rank 0 ends.
"""

from __future__ import annotations

import socket  # noqa: TID251
import sys
import time

from ps.settings.topology import Topology

APPEAR_BOUND_S = 1.0
POLL_INTERVAL_S = 0.02


class Gate:
    """Rank 0's side: closed from the start until open()."""

    def __init__(self, topology: Topology) -> None:
        self._listener: socket.socket | None = None
        name = _name(topology)
        if name is not None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(name)
            except OSError:  # somebody has that name: go on without, which costs a second or two
                listener.close()
                return
            listener.listen(topology.world_size)
            self._listener = listener

    def open(self) -> None:
        """Let those who wait go on. May be called again."""
        if self._listener is not None:
            self._listener.close()


def wait(topology: Topology, num_cores: int, bound_s: float) -> None:
    """Block a rank beyond the cores until the gate opens, for bound_s at most.

    Where there is no gate within APPEAR_BOUND_S the rank goes on.
    """
    name = _name(topology)
    if name is None or topology.rank < num_cores:
        return
    appear_until = time.monotonic() + APPEAR_BOUND_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting:
        waiting.settimeout(bound_s)
        while True:
            try:
                waiting.connect(name)
                waiting.recv(1)  # nothing is ever sent: it returns when the gate opens
                return
            except ConnectionRefusedError:
                if time.monotonic() > appear_until:
                    return
                time.sleep(POLL_INTERVAL_S)
            except OSError:
                return


def _name(topology: Topology) -> str | None:
    if topology.run_id is None or sys.platform != "linux":
        return None
    job = f"{topology.run_id}-{topology.master_port}-{topology.restart_count}"
    return f"\0parameter-server-{job}"
