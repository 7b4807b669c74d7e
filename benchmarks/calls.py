"""What a call costs over each link: an empty one, and a push with the update and fresh weights.

    python -m benchmarks.calls [--quick]

The server is in this process, the one trainer in another; nothing is computed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from typing import Any

import torch
from torch import nn

from ps.host import libc
from ps.links.choice import choose, connect
from ps.links.rendezvous import Rendezvous
from ps.model.flat import FlatModel
from ps.model.store import Store
from ps.protocol import Assignment, Push, Train, Trained
from ps.server.compute import TrainerCompute
from ps.server.metrics import Metrics
from ps.server.orders import Orders, Plan
from ps.server.server import ParameterServer
from ps.server.state import begin
from ps.server.training import Training
from ps.settings.config import Config
from ps.settings.topology import Topology

LINKS = ("local", "rpc")
SIZES = (1_200_000, 10_000_000, 100_000_000)
TRAINER = 1
BATCH_SIZE = 32
WARM_UP = 20
BUDGET_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    for row in measure(quick=parser.parse_args().quick):
        print(line(row), flush=True)


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    return (
        f"{row['link']:6} {row['parameters'] / 1e6:6.1f} M parameters   "
        f"empty call {row['empty_call_ms']:7.3f} ms   push + update + refresh "
        f"{row['push_refresh_ms']:8.3f} ms"
    )


def measure(quick: bool) -> list[dict[str, Any]]:
    """A row for each link and number of parameters; times are medians, in ms."""
    sizes = SIZES[:1] if quick else SIZES
    return [_row(link, size, quick) for link in LINKS for size in sizes]


def _row(link: str, parameters: int, quick: bool) -> dict[str, Any]:
    """The server runs in a process of its own too, as torch allows RPC once in each."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    port = _free_port()
    config = Config(link=link, compute="trainer", batch_size=BATCH_SIZE)
    budget_s = BUDGET_S / 4 if quick else BUDGET_S
    processes = [
        context.Process(target=_serve, args=(config, parameters, port)),
        context.Process(target=_push, args=(config, parameters, port, budget_s, results)),
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        if process.exitcode != 0:
            for other in processes:
                other.kill()
            raise RuntimeError(f"a process of the {link} link ended with {process.exitcode}")
    empty_s, push_s = results.get()
    return {
        "link": link,
        "parameters": parameters,
        "empty_call_ms": 1000 * empty_s,
        "push_refresh_ms": 1000 * push_s,
    }


def _model(parameters: int) -> nn.Module:
    """Eight tensors, as in the net of the built-in workloads, of unequal sizes."""
    shares = (0.001, 0.001, 0.015, 0.001, 0.9, 0.001, 0.08, 0.001)
    return nn.ParameterList([nn.Parameter(torch.zeros(int(parameters * s))) for s in shares])


def _serve(config: Config, parameters: int, port: int) -> None:
    libc.keep_freed_memory()
    torch.set_num_threads(1)
    rendezvous = Rendezvous(_topology(0, port), 60.0)
    model = _model(parameters)
    plan = Plan(
        num_train_samples=BATCH_SIZE * 1_000_000,
        num_test_samples=1,
        batch_size=BATCH_SIZE,
        epochs=1,
        seed=0,
    )
    state = begin(
        plan,
        Store(model, torch.optim.SGD(model.parameters(), lr=0.01)),
        Orders(plan, lambda epoch: range(plan.num_train_samples)),
        Metrics(plan, [TRAINER]),
        clock=time.monotonic,
    )
    compute = TrainerCompute(state)
    server = ParameterServer(Training(state, compute, [TRAINER]), [TRAINER])
    end = choose(server, compute, [TRAINER], config.link)
    rendezvous.announce(json.dumps(dict(end.invitation)))
    rendezvous.barrier("", 60.0)
    end.open(rendezvous, config, lambda trainer, how: None)
    server.ended.wait(110)
    end.close()


def _push(config: Config, parameters: int, port: int, budget_s: float, results: Any) -> None:
    libc.keep_freed_memory()
    torch.set_num_threads(1)
    rendezvous = Rendezvous(_topology(TRAINER, port), 60.0)
    invitation = json.loads(rendezvous.announced(60.0))
    flat = FlatModel(_model(parameters))
    rendezvous.barrier("", 60.0)
    server = connect(invitation, rendezvous, config)
    layout = flat.describe()
    server.join(TRAINER, layout)
    server.open_mailbox(flat)

    def push() -> None:
        nonlocal reply
        assert isinstance(reply, Assignment) and isinstance(reply.order, Train)
        order, message = reply.order, Push(reply.weights.version)
        result = Trained(order.epoch, order.batch, BATCH_SIZE, 0.0, message)
        reply = server.next_order(TRAINER, result)

    reply = server.next_order(TRAINER, None)
    medians = (_median_s(lambda: server.join(TRAINER, layout), budget_s), _median_s(push, budget_s))
    server.leave(TRAINER)
    server.close()
    results.put(medians)


def _median_s(call: Any, budget_s: float) -> float:
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 2 * WARM_UP or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def _topology(rank: int, port: int) -> Topology:
    return Topology(rank=rank, world_size=2, master_addr="127.0.0.1", master_port=port)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
