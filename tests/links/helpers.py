"""Servers that are reached over the local link, and the way to them."""

from __future__ import annotations

import json
from collections.abc import Callable

from ps.links.channel import Address
from ps.links.choice import choose
from ps.links.local import LocalLink, LocalServer
from tests.helpers import Parts

OnDisconnect = Callable[[int, str], None]


def open_local(
    parts: Parts, on_disconnect: OnDisconnect = lambda trainer, how: None
) -> LocalServer:
    end = choose(parts.server, parts.compute, parts.trainers, "local")
    assert isinstance(end, LocalServer)
    end.open(None, None, on_disconnect)
    return end


def address_of(end: LocalServer) -> Address:
    return Address(end.invitation["name"], end.invitation["key"])


def invitation_of(end: LocalServer) -> str:
    """As JSON, the way it is announced."""
    return json.dumps(dict(end.invitation))


def connect_to(
    invitation: str, trainer: int, timeout_s: float = 20.0, rpc_timeout_s: float | None = None
) -> LocalLink:
    read = json.loads(invitation)
    return LocalLink(Address(read["name"], read["key"]), trainer, timeout_s, rpc_timeout_s)
