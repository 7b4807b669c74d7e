"""A call on the server's object, and what comes back over any link: a value, or its error."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ps.protocol import Reply, Result, Service
from ps.settings.errors import PsError


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception of the server's code, as a value that any link can carry."""

    text: str
    traceback: str


class ServerError(RuntimeError):
    """The server's code raised while it answered; the message has its traceback."""


def answer(service: Service, method: str, *args: Any) -> Any:
    """What the method gives, which for next_order is a future; or its error, as a value."""
    try:
        return getattr(service, method)(*args)
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        service.internal_error(text, error.exit_code if isinstance(error, PsError) else 1)
        return _Raised(text, traceback.format_exc())


def value(method: str, answered: Any) -> Any:
    """The value of an answer that has arrived.

    Raises:
        ServerError: the answer is an error.
    """
    if isinstance(answered, _Raised):
        raise ServerError(f"on the server, {method}: {answered.text}\n\n{answered.traceback}")
    return answered


class RemoteCalls(ABC):
    """The calls of protocol.Server, for a link that sends a method's name and its arguments."""

    @abstractmethod
    def _call(self, method: str, *args: Any) -> Any:
        """What the server gives. May raise PeerLost and ServerError."""

    def join(self, trainer: int, layout: str | None) -> None:
        self._call("join", trainer, layout)

    def next_order(self, trainer: int, result: Result | None) -> Reply:
        reply: Reply = self._call("next_order", trainer, result)
        return reply

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
