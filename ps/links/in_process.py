"""The link without a way: the server's object itself, for the one process of world size 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ps.links.calls import RemoteCalls, answer, value
from ps.links.rendezvous import Rendezvous
from ps.model.flat import FlatModel
from ps.model.mailbox import Mailbox, private_mailbox
from ps.protocol import Service
from ps.server.compute import Compute, TrainerCompute
from ps.settings.config import Config


class InProcessServer:
    """The server's end (see choice.ServerEnd): nothing arrives from elsewhere."""

    name: str | None = None
    invitation: Mapping[str, str] = {}

    def open(
        self, rendezvous: Rendezvous, config: Config, on_disconnect: Callable[[int, str], None]
    ) -> None:
        pass

    def close(self) -> None:
        pass


class InProcessLink(RemoteCalls):
    """The trainer's end (see choice.Link)."""

    def __init__(self, service: Service, compute: Compute, trainer: int) -> None:
        self._service = service
        self._compute = compute
        self._trainer = trainer

    def open_mailbox(self, flat: FlatModel) -> Mailbox:
        assert isinstance(self._compute, TrainerCompute)
        mailbox = private_mailbox(flat)
        self._compute.attach(self._trainer, mailbox)
        return mailbox

    def close(self) -> None:
        pass

    def _call(self, method: str, *args: object) -> object:
        answered = answer(self._service, method, *args)
        if isinstance(answered, torch.futures.Future):
            answered = answered.wait()
        return value(method, answered)
