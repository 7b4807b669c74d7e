"""Tensors that one process of a host makes and all others see, without a copy of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ps.links.channel import Address, Channel, Listener, connect
from ps.links.memory import Memory
from ps.model.flat import Layout
from ps.settings.errors import PeerLost
from ps.settings.log import log
from ps.workload import share_by

Make = Callable[[], Sequence[Tensor]]


class Shelf:
    """Rank 0's side: keeps what is made here, and hands it to who asks by its name."""

    def __init__(self) -> None:
        self._listener = Listener(self._serve)
        self._items: dict[str, tuple[Layout, Memory]] = {}
        self.address = self._listener.address

    def open(self) -> None:
        """From now on what workloads share is kept, and given out by daemon threads."""
        share_by(self._keep)
        self._listener.open()

    def _keep(self, name: str, make: Make) -> Sequence[Tensor]:
        made = make()
        layout = Layout(made)
        try:
            memory = Memory.allocate(layout.stop)
        except OSError as error:
            log.warning("each rank holds its own copy of the data: %s", error.strerror)
            return made
        shared = layout.views(memory.bytes())
        for into, tensor in zip(shared, made, strict=True):
            into.copy_(tensor)
        self._items[name] = (layout, memory)
        return shared

    def _serve(self, channel: Channel) -> None:
        item = self._items.get(channel.receive())
        channel.send(item and item[0])
        if item is not None:
            channel.send_memory(item[1])


def take_from(address: Address, timeout_s: float) -> None:
    """From now on what workloads share comes from the shelf; what is not there is made here.

    once_per_host() may then raise LaunchError or PeerLost.
    """

    def take(name: str, make: Make) -> Sequence[Tensor]:
        channel = connect(address, timeout_s)
        try:
            channel.send(name)
            layout: Layout | None = channel.receive()
            memory = channel.receive_memory() if layout else None
        except (OSError, EOFError, RuntimeError) as error:
            what = str(error) or type(error).__name__
            raise PeerLost(f"lost the server before the data came: {what}") from None
        finally:
            channel.close()
        if layout is None or memory is None:
            return make()
        tensors = layout.views(memory.bytes(private=True))
        memory.close()
        return tensors

    share_by(take)
