"""The link over torch's RPC, with the tensors in the messages.

RPC runs any pickle it is sent, from anybody who reaches its port, so it listens on loopback alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251
from torch import Tensor
from torch.futures import Future

from ps.host.timeouts import call_with_timeout
from ps.links.calls import RemoteCalls, answer, value
from ps.links.rendezvous import Rendezvous
from ps.model.flat import FlatModel
from ps.model.mailbox import Mailbox, private_mailbox
from ps.protocol import Assignment, Push, Reply, Result, Service, Trained
from ps.server.compute import TrainerCompute
from ps.settings.config import WEEK_S, Config
from ps.settings.errors import LaunchError, PeerLost, first_line
from ps.settings.log import log
from ps.settings.topology import SERVER_RANK, Topology

try:
    import torch.distributed.rpc as rpc  # noqa: TID251
except ImportError:  # builds without RPC fail in several ways here
    rpc = None  # type: ignore[assignment]

SCHEME = "parameter-server"
CLOSE_TIMEOUT_S = 5.0
THREAD = "rpc"
"""Name of the threads that torch's own calls may hang in."""


def check_rpc() -> None:
    """Raises:
    LaunchError: this build of torch has no usable RPC.
    """
    if rpc is None or not rpc.is_available() or not hasattr(rpc, "TensorPipeRpcBackendOptions"):
        raise LaunchError(
            "this build of torch has no TensorPipe RPC; install one for Linux or macOS from "
            "pytorch.org, or type --link local"
        )


class RpcGroup:
    """This process's membership in the RPC group. One per process and lifetime.

    Trainers call the server, never each other.
    """

    def __init__(
        self, rendezvous: Rendezvous, config: Config, num_threads: int | None = None
    ) -> None:
        """Joins; blocks until all ranks have, for config.start_timeout at most.

        num_threads is how many answer calls: by default as many as there can be calls at once.

        Raises:
            LaunchError: that did not happen.
        """
        topology = rendezvous.topology
        dist.register_rendezvous_handler(
            SCHEME, lambda url, **_: iter([(rendezvous.store, topology.rank, topology.world_size)])
        )
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=num_threads or _num_threads(topology),
            rpc_timeout=config.rpc_timeout_s or WEEK_S,  # 0 would break the start off
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
            try:
                call_with_timeout(config.start_timeout, join, THREAD)
            except Exception as error:
                raise LaunchError(f"RPC did not start: {first_line(error)}") from None

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Leave together with all others; a warning tells if that did not work in time.

        For when everybody is there to leave. A process that does not close must end by
        os._exit, as a normal exit aborts on running threads.
        """
        try:
            call_with_timeout(2 * timeout_s, lambda: rpc.shutdown(timeout=timeout_s), THREAD)
        except Exception as error:
            log.warning("RPC did not close: %s", first_line(error))


def _name(rank: int) -> str:
    return "server" if rank == SERVER_RANK else f"trainer-{rank}"


def _num_threads(topology: Topology) -> int:
    """The server computes in these threads: one for each trainer, as each makes one call at a
    time, and one to spare for the goodbye of all. Fewer only make calls wait for each other."""
    return len(topology.trainers) + 1 if topology.is_server else 2


class RpcServer:
    """The server's end (see choice.ServerEnd). Tensors travel in the messages.

    The server's side of each mailbox is in this process: what a trainer sends is laid into it
    before its call, and what was written for it goes out with the reply.
    """

    name: str | None = "rpc"
    invitation: Mapping[str, str] = {"link": "rpc"}

    def __init__(self, service: Service, compute: TrainerCompute | None = None) -> None:
        """compute has a mailbox attached for each trainer; None where the server computes."""
        self._service = service
        self._compute = compute
        self._group: RpcGroup | None = None

    def open(
        self, rendezvous: Rendezvous, config: Config, on_disconnect: Callable[[int, str], None]
    ) -> None:
        serve(self)
        self._group = RpcGroup(rendezvous, config)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def answer(self, method: str, *args: Any) -> Any:
        """See calls.answer()."""
        return answer(self._service, method, *args)

    def next_order(
        self, trainer: int, result: Result | None, sent: Sent | None
    ) -> Future[tuple[Any, Tensor | None]]:
        """The reply or the error, and the weights that are new to the trainer."""
        if sent is not None and self._compute is not None:
            self._compute.receive(trainer, *sent)
        answered = self.answer("next_order", trainer, result)
        if not isinstance(answered, torch.futures.Future):
            failed: Future[tuple[Any, Tensor | None]] = Future()
            failed.set_result((answered, None))
            return failed
        return answered.then(lambda future: self._with_weights(trainer, future.value()))

    def _with_weights(self, trainer: int, reply: Reply) -> tuple[Reply, Tensor | None]:
        if self._compute is None or not isinstance(reply, Assignment):
            return reply, None
        num_bytes = reply.weights.fresh_bytes
        return reply, self._compute.fresh_weights(trainer, num_bytes) if num_bytes else None


Sent = tuple[Tensor, Tensor]
"""What a trainer that computes sends with a result: its gradients, uint8 [FlatModel.trained.stop],
and its buffers, uint8 of the layout FlatModel.buffers."""

# RPC finds the server by this one name; nothing else may use it.
_served: RpcServer | None = None


def serve(server: RpcServer) -> None:
    """Let the trainers' calls reach this object. Before RpcGroup, so that none is too early."""
    global _served
    _served = server


def _answer(method: str, *args: Any) -> Any:
    assert _served is not None, "nothing is served in this process"
    return _served.answer(method, *args)


def _next_order(
    trainer: int, result: Result | None, sent: Sent | None
) -> Future[tuple[Any, Tensor | None]]:
    assert _served is not None, "nothing is served in this process"
    return _served.next_order(trainer, result, sent)


if rpc is not None and rpc.is_available():
    _next_order = rpc.functions.async_execution(_next_order)


class RpcLink(RemoteCalls):
    """The server, called over RPC (see choice.Link)."""

    def __init__(self, group: RpcGroup) -> None:
        """Owns the group, which is closed with it."""
        self._group = group
        self._flat: FlatModel | None = None
        self._mailbox: Mailbox | None = None

    def open_mailbox(self, flat: FlatModel) -> Mailbox:
        """The trainer's side of it: the server has its own."""
        self._flat, self._mailbox = flat, private_mailbox(flat)
        return self._mailbox

    def close(self) -> None:
        self._group.close()

    def next_order(self, trainer: int, result: Result | None) -> Reply:
        is_push = isinstance(result, Trained) and isinstance(result.gradient, Push)
        sent = self._content() if is_push else None
        answered, fresh = self._remote("next_order", _next_order, trainer, result, sent)
        reply: Reply = value("next_order", answered)
        if fresh is not None and self._mailbox is not None:
            self._mailbox.weights[: len(fresh)].copy_(fresh)
        return reply

    def _content(self) -> Sent:
        assert self._flat is not None and self._mailbox is not None
        buffers = self._flat.buffers
        return self._mailbox.gradients, self._mailbox.weights[buffers.start : buffers.stop]

    def _call(self, method: str, *args: Any) -> Any:
        return value(method, self._remote(method, _answer, method, *args))

    def _remote(self, method: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return rpc.rpc_sync(_name(SERVER_RANK), function, args=args)
        except RuntimeError as error:
            if "RPC ran for more than" in str(error):
                limit = f"{rpc.get_rpc_timeout():.0f} s (--rpc-timeout)"
                raise PeerLost(f"{method} got no answer from the server in {limit}") from None
            raise PeerLost(f"lost the server during {method}: {first_line(error)}") from None
