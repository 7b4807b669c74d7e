"""The link on one host: calls over a private channel, tensors in memory that both sides see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import torch

from ps.host.resources import available_memory_bytes
from ps.links.calls import RemoteCalls, answer, value
from ps.links.channel import Address, Channel, Listener, connect, is_supported
from ps.links.memory import Memory
from ps.model.flat import FlatModel
from ps.model.mailbox import Mailbox
from ps.protocol import Service
from ps.settings.errors import PeerLost


def unavailable_reason(num_mailboxes: int, mailbox_bytes: int) -> str | None:
    """What keeps this link from working here, or None."""
    if not is_supported():
        return "it needs Linux"
    needed, available = num_mailboxes * mailbox_bytes, available_memory_bytes()
    if needed > available:
        return (
            f"it needs {needed >> 20} MiB of shared memory, and {available >> 20} MiB are free "
            "(in a container: docker run --memory)"
        )
    return None


class SharedMailbox:
    """A mailbox that another process can be given."""

    def __init__(self, weights_bytes: int, gradients_bytes: int) -> None:
        """Raises:
        OSError: there is not enough memory.
        """
        self.parts = (Memory.allocate(weights_bytes), Memory.allocate(gradients_bytes))
        self.mailbox = Mailbox(*(part.bytes() for part in self.parts))

    def hand_over(self, channel: Channel) -> None:
        """To one other process, once."""
        for part in self.parts:
            channel.send_memory(part)
            part.close()


class LocalServer:
    """The server's end (see choice.ServerEnd): a channel and a thread for each trainer."""

    name: str | None = "local"

    def __init__(self, service: Service, mailboxes: Mapping[int, SharedMailbox]) -> None:
        """mailboxes are by trainer, and empty where the trainers do not compute."""
        self._service = service
        self._mailboxes = mailboxes
        self._listener = Listener(self._serve)
        self._on_disconnect: Callable[[int, str], None] = lambda trainer, how: None

    @property
    def invitation(self) -> Mapping[str, str]:
        return {"link": "local", **asdict(self._listener.address)}

    def open(
        self, rendezvous: object, config: object, on_disconnect: Callable[[int, str], None]
    ) -> None:
        self._on_disconnect = on_disconnect
        self._listener.open()

    def close(self) -> None:
        self._listener.close()

    def _serve(self, channel: Channel) -> None:
        """Answer one trainer until it is gone."""
        trainer: int = channel.receive()
        try:
            while True:
                method, args = channel.receive()
                if method == OPEN_MAILBOX:
                    self._mailboxes[trainer].hand_over(channel)
                else:
                    self._answer(channel, method, args)
        except (OSError, EOFError):
            self._on_disconnect(trainer, "its connection closed")

    def _answer(self, channel: Channel, method: str, args: Sequence[Any]) -> None:
        answered = answer(self._service, method, *args)
        if not isinstance(answered, torch.futures.Future):
            channel.send(answered)
        elif answered.done():
            channel.send(answered.value())
        else:
            # Whoever completes it sends it: this thread goes on to see if the trainer is lost.
            answered.add_done_callback(lambda future: _send_apart(channel, future.value()))


OPEN_MAILBOX = "open_mailbox"
"""The one call that is the link's own."""


def _send_apart(channel: Channel, message: Any) -> None:
    """Never waits: the caller serves another trainer, which this one must not delay."""

    def send_rest() -> None:
        with suppress(OSError):
            channel.send_rest(rest)

    with suppress(OSError):  # the thread that reads from this trainer sees the same
        rest = channel.send_what_fits(message)
        if rest:
            threading.Thread(target=send_rest, name="channel-rest", daemon=True).start()


class LocalLink(RemoteCalls):
    """The server, called over the channel (see choice.Link)."""

    def __init__(
        self,
        address: Address,
        trainer: int,
        start_timeout_s: float,
        rpc_timeout_s: float | None = None,
    ) -> None:
        """Connects. rpc_timeout_s is for each call, None for no limit.

        Raises:
            LaunchError: that is not possible.
        """
        self._timeout_s = rpc_timeout_s
        self._channel = connect(address, start_timeout_s)
        self._channel.send(trainer)
        self._channel.limit(rpc_timeout_s)

    def open_mailbox(self, flat: FlatModel) -> Mailbox:
        """The one that the server has for this trainer."""
        with self._asking(OPEN_MAILBOX):
            self._channel.send((OPEN_MAILBOX, ()))
            parts = [self._channel.receive_memory() for _ in range(2)]
        mailbox = Mailbox(*(part.bytes() for part in parts))
        for part in parts:
            part.close()
        return mailbox

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: str, *args: Any) -> Any:
        with self._asking(method):
            self._channel.send((method, args))
            answered = self._channel.receive()
        return value(method, answered)

    @contextmanager
    def _asking(self, method: str) -> Iterator[None]:
        """What goes wrong on the way is PeerLost, and names the call."""
        try:
            yield
        except BlockingIOError:
            limit = f"{self._timeout_s or 0:.0f} s (--rpc-timeout)"
            raise PeerLost(f"{method} got no answer from the server in {limit}") from None
        except (OSError, EOFError, RuntimeError) as error:  # the last if no memory came
            what = str(error) or type(error).__name__
            raise PeerLost(f"lost the server during {method}: {what}") from None
