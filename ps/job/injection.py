"""What a fault of --inject does to this process when it is due."""

from __future__ import annotations

import os
import signal  # noqa: TID251
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor

from ps.host import libc
from ps.protocol import Assignment, Result
from ps.settings.errors import ConfigError
from ps.settings.faults import AT_UPDATE, Fault
from ps.settings.log import log
from ps.settings.topology import SERVER_RANK, Topology
from ps.trainer.worker import Worker
from ps.workload import Workload

FOR_TRAINERS = ("slow", "nan")
LEAK_INTERVAL_S = 0.1


def check(faults: Iterable[Fault], topology: Topology) -> None:
    """Raises:
    ConfigError: a rank is not there, or cannot have that fault.
    """
    for fault in faults:
        if fault.rank >= topology.world_size:
            raise ConfigError(f"--inject: there is no rank {fault.rank} in {topology.world_size}")
        if fault.kind in FOR_TRAINERS and fault.rank not in topology.trainers:
            raise ConfigError(f"--inject: {fault.kind} is for trainers, rank {fault.rank} is none")


class Injection:
    """The faults of this process. Each happens once."""

    def __init__(self, faults: Iterable[Fault], topology: Topology) -> None:
        """In later attempts of a job there are none."""
        first = topology.restart_count == 0
        self._faults = [f for f in faults if first and f.rank == topology.rank]
        self._is_server = topology.rank == SERVER_RANK
        self._spoil = False
        for fault in self._faults:
            log.warning("a fault will be injected: %s", fault)
            if fault.kind == "leak":
                threading.Thread(target=_leak, args=(fault.amount,), daemon=True).start()

    def __bool__(self) -> bool:
        return bool(self._faults)

    def at_update(self, version: int) -> None:
        """Act on what is due once the weights have that version."""
        due = [f for f in self._faults if f.kind in AT_UPDATE and version >= f.amount]
        for fault in due:
            self._faults.remove(fault)
            if fault.kind == "nan":
                self._spoil = True
            else:
                _ACTS[fault.kind]()

    def workload(self, workload: Workload) -> Workload:
        """With a loss that can be spoiled, when it is trained on."""

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            value = workload.loss(outputs, targets)
            if not (self._spoil and value.requires_grad):  # nobody checks that of an evaluation
                return value
            self._spoil = False
            return value * float("nan")

        return replace(workload, loss=loss)

    def worker(
        self,
        worker: Worker,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Worker:
        """One to which the faults happen."""
        slow = max((f.amount for f in self._faults if f.kind == "slow"), default=1.0)
        return _Faulty(worker, self.at_update, slow, monotonic, sleep)


class _Faulty:
    def __init__(
        self,
        worker: Worker,
        at_update: Callable[[int], None],
        slow: float,
        monotonic: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._worker = worker
        self._at_update = at_update
        self._slow = slow
        self._monotonic = monotonic
        self._sleep = sleep

    def do(self, assignment: Assignment) -> Result:
        self._at_update(assignment.weights.version)
        start = self._monotonic()
        result = self._worker.do(assignment)
        self._sleep((self._slow - 1) * (self._monotonic() - start))
        return result


def _raise() -> None:
    raise RuntimeError("a fault was injected: raise")


def _hang() -> None:
    """Waits for ever; of a server, with its lock held."""
    threading.Event().wait()


_ACTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
    "hang": _hang,
    "deadlock": libc.hold_gil,
    "exit0": lambda: os._exit(0),
}


def _leak(mib_per_s: float) -> None:
    held = []
    while True:
        held.append(bytearray(os.urandom(1)) * int(mib_per_s * LEAK_INTERVAL_S * (1 << 20)))
        time.sleep(LEAK_INTERVAL_S)
