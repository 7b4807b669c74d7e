"""The vocabulary of the tests: models, servers, links and whole jobs in one call each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ps.metrics import Metrics
from ps.orders import Orders, Plan, permutation
from ps.randomness import step_seed
from ps.server import ParameterServer
from ps.store import Store
from ps.workload import Workload, fetch, make_model


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


@dataclass
class Parts:
    """A server in this process, and what it is made of."""

    server: ParameterServer
    store: Store
    orders: Orders
    metrics: Metrics
    workload: Workload
    plan: Plan


def server_of(
    workload: Workload,
    *,
    trainers: Sequence[int] = (1,),
    batch_size: int = 8,
    epochs: int = 1,
    seed: int = 0,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    slice_size: int = 40,
) -> Parts:
    plan = Plan(
        num_train_samples=len(workload.train),
        num_test_samples=len(workload.test),
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        slice_size=slice_size,
    )
    model = make_model(workload, seed)
    store, orders, metrics = Store(model, optimizer(model)), Orders(plan), Metrics(plan)
    server = ParameterServer(store, orders, metrics, trainers=trainers, seed=seed)
    return Parts(server, store, orders, metrics, workload, plan)


def train_alone(
    workload: Workload,
    *,
    updates: int,
    batch_size: int = 8,
    seed: int = 0,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> dict[str, torch.Tensor]:
    """The reference: a plain loop over the same batches, as anybody would write it."""
    torch.manual_seed(seed)
    model = workload.model().train()
    optim = optimizer(model)
    per_epoch = -(-len(workload.train) // batch_size)
    for update in range(updates):
        epoch, batch = divmod(update, per_epoch)
        order = permutation(seed, epoch, len(workload.train))
        torch.manual_seed(step_seed(seed, epoch, batch))
        inputs, targets = fetch(
            workload.train, order[batch * batch_size : (batch + 1) * batch_size]
        )
        loss = workload.loss(model(inputs), targets)
        optim.zero_grad()
        loss.backward()
        optim.step()
    return {name: value.detach() for name, value in model.state_dict().items()}
