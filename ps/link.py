"""How ranks find and reach each other: the rendezvous, RPC, and the links over them.

The only module that imports torch.distributed. RPC runs any pickle it is sent, from anybody who
reaches its port, so on one host everything listens on loopback alone.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.futures import Future

from ps import interruption
from ps.config import Config
from ps.errors import LaunchError, PeerLost
from ps.log import log
from ps.protocol import Order, Result, Service
from ps.topology import SERVER_RANK, Topology

try:
    import torch.distributed.rpc as rpc
except ImportError:  # builds without RPC fail in several ways here
    rpc = None  # type: ignore[assignment]

SCHEME = "parameter-server"
REMIND_INTERVAL_S = 5.0
POLL_INTERVAL_S = 0.05
CLOSE_BOUND_S = 5.0


class Rendezvous:
    """The store that all ranks of one attempt share: who has arrived, what was announced.

    The store of torchrun outlives a restart, so every key carries the attempt's number.
    """

    def __init__(self, topology: Topology, bound_s: float) -> None:
        """Connects. Blocks until rank 0 or torchrun serves the store.

        Raises:
            LaunchError: nobody served it within bound_s.
        """
        self._topology = topology
        self._bound_s = bound_s
        _stay_on_loopback()
        self.store = dist.PrefixStore(
            f"attempt-{topology.restart_count}", _connect(topology, bound_s)
        )

    def announce(self, text: str) -> None:
        """Tell all ranks that rank 0 is ready, with one word for them."""
        self.store.set("announced", text)

    def announced(self, bound_s: float) -> str:
        """Wait for announce(). Rank 0 may be fetching data, so it has a bound of its own."""
        self._wait(
            lambda: [] if self._has("announced") else [SERVER_RANK], "to be ready", bound_s, 15.0
        )
        return bytes(self.store.get("announced")).decode()

    def gather(self) -> None:
        """Arrive, which is to have everything ready, and wait until every rank has.

        Raises:
            LaunchError: some did not within the bound; they are named.
        """
        self.store.set(_arrived(self._topology.rank), "1")
        self._wait(self._missing, "to arrive", self._bound_s, REMIND_INTERVAL_S)

    def _missing(self) -> list[int]:
        return [r for r in range(self._topology.world_size) if not self._has(_arrived(r))]

    def _has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def _wait(
        self, lacking: Callable[[], list[int]], what: str, bound_s: float, remind_s: float
    ) -> None:
        """Poll: a blocking wait cannot say who is missing, and prints on every timeout."""
        start = time.monotonic()
        reminded = 0
        while ranks := lacking():
            interruption.check()
            waited_s = time.monotonic() - start
            who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            if waited_s > bound_s:
                raise LaunchError(
                    f"gave up waiting for {who} {what} after {bound_s:.0f} s (--start-timeout)"
                )
            if waited_s > (reminded + 1) * remind_s:
                reminded += 1
                if self._speaks(ranks):
                    log.info("waiting for %s %s, %.0f of %.0f s", who, what, waited_s, bound_s)
            time.sleep(POLL_INTERVAL_S)

    def _speaks(self, missing: Sequence[int]) -> bool:
        """The lowest rank that is here speaks for all."""
        return self._topology.rank == min(
            set(range(self._topology.world_size)) - set(missing), default=SERVER_RANK
        )


def _arrived(rank: int) -> str:
    return f"arrived-{rank}"


def _stay_on_loopback() -> None:
    """RPC and gloo otherwise listen on whatever the host name resolves to. A user's value wins."""
    interface = "lo" if sys.platform == "linux" else "lo0"
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface)


def _connect(topology: Topology, bound_s: float) -> dist.Store:
    address = (topology.master_addr, topology.master_port)
    options: dict[str, Any] = {
        "world_size": topology.world_size,
        "wait_for_workers": False,
        "timeout": timedelta(seconds=bound_s),
    }
    try:
        if topology.is_server and not topology.agent_hosts_store:
            listener = socket.create_server(address)
            return dist.TCPStore(
                *address, is_master=True, master_listen_fd=listener.detach(), **options
            )
        _wait_for_listener(address, bound_s)
        return dist.TCPStore(*address, is_master=False, **options)
    except (OSError, dist.DistNetworkError) as error:
        raise LaunchError(f"no store at {address[0]}:{address[1]}: {_first_line(error)}") from None


def _wait_for_listener(address: tuple[str, int], bound_s: float) -> None:
    """The store's own connect prints a C++ stack for every try that fails."""
    start = time.monotonic()
    reminded = 0
    while True:
        try:
            socket.create_connection(address, timeout=bound_s).close()
            return
        except OSError:
            waited_s = time.monotonic() - start
            if waited_s > bound_s:
                raise
        if waited_s > (reminded + 1) * REMIND_INTERVAL_S:
            reminded += 1
            log.info(
                "waiting for rank 0 to serve %s:%d, %.0f of %.0f s", *address, waited_s, bound_s
            )
        time.sleep(POLL_INTERVAL_S)


def record_for_torchrun(error: BaseException) -> None:
    """Put the traceback of the error being handled into torchrun's report."""
    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)


def check_rpc() -> None:
    """Raises:
    LaunchError: this build of torch has no usable RPC.
    """
    if rpc is None or not rpc.is_available() or not hasattr(rpc, "TensorPipeRpcBackendOptions"):
        raise LaunchError(
            "this build of torch has no TensorPipe RPC; install one for Linux or macOS from "
            "pytorch.org, or train with --nproc_per_node=1"
        )


class RpcGroup:
    """This process's membership in the RPC group. One per process and lifetime.

    Trainers call the server, never each other.
    """

    def __init__(self, topology: Topology, rendezvous: Rendezvous, config: Config) -> None:
        """Joins; blocks until all ranks have, for config.start_timeout at most.

        Raises:
            LaunchError: that did not happen.
        """
        dist.register_rendezvous_handler(
            SCHEME, lambda url, **_: iter([(rendezvous.store, topology.rank, topology.world_size)])
        )
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=_num_threads(topology),
            rpc_timeout=config.rpc_timeout,
            init_method=f"{SCHEME}://",
            _transports=["uv"],  # the default, shm, polls: an idle process takes a whole core
        )

        def join() -> None:
            rpc.init_rpc(
                _name(topology.rank),
                rank=topology.rank,
                world_size=topology.world_size,
                rpc_backend_options=options,
            )

        with warnings.catch_warnings():
            # RPC's own start uses a process group in a way that torch itself calls deprecated.
            warnings.filterwarnings(
                "ignore", message="You are using a Backend", category=UserWarning
            )
            joined, error = _within(config.start_timeout, join)
        if not joined:
            raise LaunchError(f"RPC did not start: {_first_line(error or 'no answer in time')}")

    def close(self) -> bool:
        """Leave together with all others; tells whether that worked in time.

        For when everybody is there to leave. A process that does not close must end by
        os._exit, as a normal exit aborts on running threads.
        """
        closed, error = _within(2 * CLOSE_BOUND_S, lambda: rpc.shutdown(timeout=CLOSE_BOUND_S))
        if not closed:
            log.warning("RPC did not close: %s", _first_line(error or "no answer in time"))
        return closed


def _within(bound_s: float, call: Callable[[], None]) -> tuple[bool, Exception | None]:
    """Whether the call returned in time, and what it raised.

    It runs in a thread of its own: torch's calls neither keep a bound in every case nor let a
    signal through.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="rpc", daemon=True)
    thread.start()
    thread.join(bound_s)
    return not thread.is_alive() and not errors, errors[0] if errors else None


def _first_line(error: object) -> str:
    return (str(error).splitlines() or [""])[0]


def _name(rank: int) -> str:
    return "server" if rank == SERVER_RANK else f"trainer-{rank}"


def _num_threads(topology: Topology) -> int:
    """The server computes in these threads: one for each trainer, as each makes one call at a
    time, and one to spare for the goodbye of all."""
    return len(topology.trainers) + 1 if topology.is_server else 2


# RPC finds the server by this one name; nothing else may use it.
_served: Service | None = None


def serve(server: Service) -> None:
    """Let the trainers' calls reach this object. Before RpcGroup, so that none is too early."""
    global _served
    _served = server


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception of the server's code, as a value: RPC itself would print its traceback, too."""

    text: str
    traceback: str


class ServerError(RuntimeError):
    """The server's code raised while it answered; the message has its traceback."""


def _answer(method: str, *args: Any) -> Any:
    try:
        assert _served is not None, "nothing is served in this process"
        return getattr(_served, method)(*args)
    except Exception as error:
        return _Raised(f"{type(error).__name__}: {error}", traceback.format_exc())


def _answer_later(method: str, *args: Any) -> Future[Any]:
    answer = _answer(method, *args)
    if not isinstance(answer, _Raised):
        return answer  # type: ignore[no-any-return]
    failed: Future[Any] = Future()
    failed.set_result(answer)
    return failed


if rpc is not None and rpc.is_available():
    _answer_later = rpc.functions.async_execution(_answer_later)


class RpcLink:
    """The server, called over RPC (see protocol.Server)."""

    def next_order(self, trainer: int, result: Result | None) -> Order:
        order: Order = _call(_answer_later, "next_order", trainer, result)
        return order

    def forward(self, trainer: int, epoch: int, batch: int, inputs: Tensor) -> Tensor:
        outputs: Tensor = _call(_answer, "forward", trainer, epoch, batch, inputs)
        return outputs

    def evaluate(self, trainer: int, inputs: Tensor) -> Tensor:
        outputs: Tensor = _call(_answer, "evaluate", trainer, inputs)
        return outputs

    def leave(self, trainer: int) -> None:
        _call(_answer, "leave", trainer)

    def fail(self, trainer: int, cause: str, exit_code: int) -> None:
        _call(_answer, "fail", trainer, cause, exit_code)


def _call(function: Callable[..., Any], method: str, *args: Any) -> Any:
    try:
        answer = rpc.rpc_sync(_name(SERVER_RANK), function, args=(method, *args))
    except RuntimeError as error:
        if "RPC ran for more than" in str(error):
            limit = f"{rpc.get_rpc_timeout():.0f} s (--rpc-timeout)"
            raise PeerLost(f"{method} got no answer from the server in {limit}") from None
        raise PeerLost(f"lost the server during {method}: {_first_line(error)}") from None
    if isinstance(answer, _Raised):
        raise ServerError(f"on the server, {method}: {answer.text}\n\n{answer.traceback}")
    return answer


class InProcessLink:
    """The server object itself, for the one process of world size 1 and for tests."""

    def __init__(self, server: Service) -> None:
        self._server = server
        self.evaluate = server.evaluate
        self.forward = server.forward
        self.leave = server.leave
        self.fail = server.fail

    def next_order(self, trainer: int, result: Result | None) -> Order:
        order: Order = self._server.next_order(trainer, result).wait()
        return order
